"""Tokens to text as they come, and where stop strings end it.

The leader follows a request with stop strings through a `TextStream` to see where it ends; whoever shows text puts the
same tokens through one of its own and gets the same answer, so that no text has to travel.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

from saguaro.orchestrator.types import FinishReason, SamplingParams

_INCOMPLETE = "\ufffd"  # what a decoder shows for bytes that are not, or not yet, a character


class TextStream:
    """The text of one request: never part of a character, never part of a stop string that may still complete.

    A stop string counts where its last character appears, so that it does not matter how tokens divide the text; the
    longest one wins where several end together. Until `min_tokens` were emitted none is looked for.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._stops = params.stop
        self._stop_token_ids = params.stop_token_ids
        self._include = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._count = 0
        self._window: list[int] = []  # the tokens of the last pieces, because decoders look back, and those after them
        self._settled = 0  # how many of the window's tokens have been decoded for good,
        self._shown = 0  # and how many characters of its text
        self._held = ""  # decoded for good, but perhaps the beginning of a stop string
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that may be shown now that `token` has followed. Nothing comes after a stop string."""
        if self.stopped:
            return ""
        self._count += 1
        self._window.append(token)
        text = self._decode()
        complete = text.rstrip(_INCOMPLETE)
        piece = complete[self._shown :]
        if piece:
            self._shown = len(complete)
            if complete == text:
                self._window = self._window[self._settled :]
                self._settled, self._shown = len(self._window), len(self._decode())
        return self._release(piece)

    def push_round(self, tokens: Sequence[int], finish_reason: FinishReason | None) -> str:
        """The text that a round adds, all there is when it is the last. A stop token shows if a stop string would."""
        visible = tokens
        if finish_reason == "stop" and not self._include:
            visible = [token for token in tokens if token not in self._stop_token_ids]  # only the last can be one
        piece = "".join(map(self.push, visible))
        return piece + self.finish() if finish_reason else piece

    def finish(self) -> str:
        """What is left when the request has ended: held-back text, and bytes that never became a character."""
        return "" if self.stopped else self._held + self._decode()[self._shown :]

    def _decode(self) -> str:
        return str(self._tokenizer.decode(self._window, skip_special_tokens=True))

    def _release(self, piece: str) -> str:
        """Hold text back while it may become a stop string; end at the first that does."""
        if not self._stops or self._count <= self._min_tokens:
            return piece
        text = self._held + piece
        for end in range(len(self._held) + 1, len(text) + 1):
            ending = [len(stop) for stop in self._stops if text.endswith(stop, 0, end)]
            if ending:
                self.stopped = True
                return text[: end if self._include else end - max(ending)]
        longest = max(map(len, self._stops)) - 1
        start = max(0, len(text) - longest)
        while not any(stop.startswith(text[start:]) for stop in self._stops):  # at the latest with nothing left
            start += 1
        self._held = text[start:]
        return text[:start]
