"""Structured output: a JSON schema, a regular expression or a Lark grammar as a mask over the next token.

A mask depends on the tokens of the answer alone, so target and draft come to the same one, whatever was speculated. The
matching is llguidance's; here it is compiled, remembered and walked along speculations.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from torch import Tensor

from saguaro.errors import ConfigError
from saguaro.orchestrator.protocol import GrammarRef
from saguaro.orchestrator.types import SamplingParams

_KEPT = 256  # compiled grammars, and answers being followed
_DIGEST = 16  # bytes
_Key = TypeVar("_Key")
_State = TypeVar("_State")


class GrammarState:
    """How far an answer has come in its grammar."""

    def __init__(self, text: str, digest: bytes, matcher: LLMatcher) -> None:
        self.text = text  # in the form that is compiled
        self.digest = digest
        self._matcher = matcher
        self.tokens: list[int] = []  # of the answer, as far as it has been followed

    @property
    def complete(self) -> bool:
        """Nothing can follow."""
        return bool(self._matcher.is_stopped() and not self._matcher.is_error())

    def advance(self, tokens: Sequence[int]) -> None:
        """Follow committed tokens. Those after the grammar's end change nothing."""
        self.tokens.extend(tokens)
        self._matcher.try_consume_tokens(list(tokens))

    def masks(self, tails: Sequence[Sequence[int]], vocab_size: int) -> Tensor:
        """[R, V] bool: what may follow the answer and each tail.

        A tail that the grammar refuses, or that runs past its end, has no next token, so its row allows everything.
        Raises ConfigError when the grammar has become too ambiguous to be followed.
        """
        allowed = np.ones((len(tails), vocab_size), dtype=bool)
        for row, tail in zip(allowed, tails, strict=True):
            followed = self._matcher.try_consume_tokens(list(tail))
            if followed == len(tail) and not self._matcher.is_stopped():
                bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
                row[:] = np.unpackbits(bits, count=vocab_size, bitorder="little")
            if followed:
                self._matcher.rollback(followed)
        if self._matcher.is_error():
            raise ConfigError(
                f"the grammar cannot be followed any further ({_one_line(self._matcher.get_error())}); make it less "
                "ambiguous or its repetitions shorter"
            )
        return torch.from_numpy(allowed)


class Grammars:
    """Compiles the grammars of requests for one tokenizer; a grammar in use again costs nothing.

    The library bounds what a compilation may do, which can still take seconds; it lets other threads run meanwhile.
    """

    def __init__(self, tokenizer: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """`tokenizer` is a tokenizer.json; `vocab_size` is the width of the masks that will be asked for at most."""
        self._tokenizer = LLTokenizer(str(tokenizer), n_vocab=vocab_size, eos_token=list(eos_token_ids))
        self._compiled: OrderedDict[bytes, tuple[str, LLMatcher]] = OrderedDict()  # by digest
        self._followed: OrderedDict[int, GrammarState] = OrderedDict()

    def start(self, params: SamplingParams) -> GrammarState | None:
        """The beginning of an answer; None without a grammar. Raises ConfigError naming the field that is wrong."""
        source = _source(params)
        if source is None:
            return None
        field, text = source
        return self._begin(GrammarRef(blake2b(text.encode(), digest_size=_DIGEST).digest(), text), field)

    def follow(self, sequence: int, grammar: GrammarRef, answer: Sequence[int]) -> GrammarState | None:
        """The state after `answer`, for whoever is told an answer anew each time; None if the grammar is not known.

        The state of the last call for this sequence is gone on from if it belongs to the beginning of this answer.
        """
        state = self._followed.pop(sequence, None)
        if state is None or state.digest != grammar.digest or state.tokens != list(answer[: len(state.tokens)]):
            state = self._begin(grammar, "the grammar")
        if state is not None:
            state.advance(answer[len(state.tokens) :])
            _remember(self._followed, sequence, state)
        return state

    def _begin(self, grammar: GrammarRef, field: str) -> GrammarState | None:
        """The state before the first token; None for a grammar without text that has not been compiled here."""
        known = self._compiled.pop(grammar.digest, None)
        if known is None:
            if grammar.text is None:
                return None
            known = grammar.text, self._compile(field, grammar.text)
        _remember(self._compiled, grammar.digest, known)
        text, matcher = known
        return GrammarState(text, grammar.digest, matcher.deep_copy())

    def _compile(self, field: str, text: str) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, text, log_level=0)
        if matcher.is_error():
            raise ConfigError(f"{field} cannot be used: {_one_line(matcher.get_error())}")
        return matcher


def has_grammar(params: SamplingParams) -> bool:
    return any(given is not None for given in (params.json_schema, params.regex, params.grammar))


def _source(params: SamplingParams) -> tuple[str, str] | None:
    """The field that holds a request's grammar, and the grammar in the form that the library compiles."""
    if params.json_schema is not None:
        schema = params.json_schema
        try:
            if isinstance(schema, str):
                json.loads(schema)  # the library would name a place in what it has put around the schema
            return "json_schema", LLMatcher.grammar_from_json_schema(schema)
        except ValueError as error:
            raise ConfigError(f"json_schema cannot be used: {_one_line(str(error))}") from error
    if params.regex is not None:
        return "regex", LLMatcher.grammar_from_regex(params.regex)
    if params.grammar is not None:
        return "grammar", LLMatcher.grammar_from_lark(params.grammar)
    return None


def _remember(states: OrderedDict[_Key, _State], key: _Key, state: _State) -> None:
    """Keep the most recently used ones."""
    states[key] = state
    if len(states) > _KEPT:
        states.popitem(last=False)


def _one_line(message: str) -> str:
    return " ".join(message.split())
