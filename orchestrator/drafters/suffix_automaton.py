"""All substrings of a growing set of texts, in linear space: a suffix automaton (Blumer et al., 1985)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

ROOT = 0
_COUNTED = 32  # suffixes of a new token whose occurrences are counted: the longest ones, which are looked at first


class SuffixAutomaton:
    """Each state stands for substrings that end at the same places; its transitions are what followed them.

    A text is a walk: it starts at ROOT, and `extend` takes it on by one token. Several texts may grow side by side.
    """

    def __init__(self) -> None:
        self.next: list[dict[int, int]] = [{}]
        self.link = [-1]  # the state of the longest suffix with more places
        self.length = [0]  # of the longest substring of a state
        self.count = [0]  # how often it ended somewhere; a lower bound for short suffixes of repetitive texts
        self.tokens = 0

    def extend(self, state: int, token: int) -> int:
        """The state of a text after one more token."""
        self.tokens += 1
        known = self.next[state].get(token)
        if known is not None:  # another text went the same way
            now = known if self.length[known] == self.length[state] + 1 else self._split(state, token, known)
        else:
            now = self._state({}, self.length[state] + 1)
            parent = state
            while parent != -1 and token not in self.next[parent]:
                self.next[parent][token] = now
                parent = self.link[parent]
            if parent == -1:
                self.link[now] = ROOT
            else:
                known = self.next[parent][token]
                exact = self.length[known] == self.length[parent] + 1
                self.link[now] = known if exact else self._split(parent, token, known)
        counted = now
        for _ in range(_COUNTED):
            if counted == ROOT:
                break
            self.count[counted] += 1
            counted = self.link[counted]
        return now

    def step(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Match one more token: from the match of `length` tokens in `state` to the longest one that ends with it."""
        while state != ROOT and token not in self.next[state]:
            state = self.link[state]
            length = self.length[state]
        after = self.next[state].get(token)
        return (ROOT, 0) if after is None else (after, length + 1)

    def match(self, tokens: Iterable[int]) -> tuple[int, int]:
        """State and length of the longest end of `tokens` that occurs in a text."""
        state, length = ROOT, 0
        for token in tokens:
            state, length = self.step(state, length, token)
        return state, length

    def followers(self, state: int) -> Sequence[int]:
        """The tokens that followed, the most frequent first."""
        after = self.next[state]
        return sorted(after, key=lambda token: (-self.count[after[token]], token))

    def _state(self, following: dict[int, int], length: int) -> int:
        self.next.append(following)
        self.link.append(ROOT)
        self.length.append(length)
        self.count.append(0)
        return len(self.next) - 1

    def _split(self, parent: int, token: int, state: int) -> int:
        """Give the shorter substrings of a state one of their own, since they now end at more places."""
        clone = self._state(dict(self.next[state]), self.length[parent] + 1)
        self.count[clone] = self.count[state]
        self.link[clone], self.link[state] = self.link[state], clone
        while parent != -1 and self.next[parent].get(token) == state:
            self.next[parent][token] = clone
            parent = self.link[parent]
        return clone
