"""What the parts of the orchestrator say to each other. Plain data; no engine, channel or role is known here."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, Literal

import msgspec

from saguaro.errors import ConfigError

Mode = Literal["ar", "sd", "ssd"]
MODES: tuple[Mode, ...] = ("ar", "sd", "ssd")  # each can do what those before it can
Auto = Literal["auto"]
Rule = Literal["coupled", "ratio"]
TextBackup = Literal["ngram", "suffix", "random", "none"]  # those that need no model
TEXT_BACKUPS: tuple[TextBackup, ...] = ("ngram", "suffix", "random", "none")
Backup = Literal["primary", "defer", TextBackup]
FinishReason = Literal["stop", "length", "cancelled", "timeout", "error"]

MAX_SEED = 2**64 - 1
MAX_LOGPROBS = 20
MAX_N = 128
MAX_STOPS = 64
MAX_GRAMMAR = 2**16  # characters
MAX_STOP_LENGTH = 1024  # characters


@dataclass(frozen=True)
class SamplingParams:
    """How one request turns logits into tokens. Every field is honoured exactly in every mode, or refused.

    temperature 0 is argmax. `top_k` 0, `top_p` 1 and `min_p` 0 switch the filter off. Penalties and `min_tokens` count
    per token, also inside a speculation.

    `stop` strings end the request where the text first contains one, which is cut off the text unless
    `include_stop_str_in_output`; the tokens up to the one that completed it are kept. `bad_words` are token sequences,
    or text, of which the leader bans the spellings alone and after a space.

    `logprobs` n asks for the log probability of each emitted token and of the n best at its position (0: only the token
    itself): the log softmax of the model's own logits, before any bias, penalty, temperature or filter.

    One of `json_schema` (a schema, or its JSON text), `regex` (of the whole answer) and `grammar` (Lark) allows only
    answers that fit it. The request ends where nothing can follow any more, whatever `min_tokens` and `ignore_eos` say.

    `n` asks for several answers; each is a request of its own, see `samples`.
    Raises ConfigError naming the field, its limit and what was given.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    bad_words: tuple[str | tuple[int, ...], ...] = ()
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int = 256
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        def check(name: str, valid: bool, limit: str) -> None:
            if not valid:
                raise ConfigError(f"{name} must be {limit}, got {getattr(self, name)!r}")

        def finite(value: float, low: float, high: float) -> bool:
            return math.isfinite(value) and low <= value <= high

        check("temperature", finite(self.temperature, 0, 100), "between 0 (greedy) and 100")
        check("top_k", self.top_k >= 0, "0 (off) or a positive number of tokens")
        check("top_p", finite(self.top_p, 0, 1) and self.top_p > 0, "above 0 and at most 1 (off)")
        check("min_p", finite(self.min_p, 0, 1), "between 0 (off) and 1")
        check("repetition_penalty", finite(self.repetition_penalty, 0, 100) and self.repetition_penalty > 0, "above 0")
        check("presence_penalty", finite(self.presence_penalty, -2, 2), "between -2 and 2")
        check("frequency_penalty", finite(self.frequency_penalty, -2, 2), "between -2 and 2")
        check("logit_bias", all(math.isfinite(b) for b in self.logit_bias.values()), "a map of token id to a number")
        words = [word.strip() if isinstance(word, str) else word for word in self.bad_words]
        check("bad_words", not isinstance(self.bad_words, str) and all(words), "a list of non-empty words or sequences")
        stops = [self.stop] if isinstance(self.stop, str) else self.stop  # a text would pass for a list of letters
        right = self.stop is stops and len(stops) <= MAX_STOPS and all(0 < len(s) <= MAX_STOP_LENGTH for s in stops)
        check("stop", right, f"a list of at most {MAX_STOPS} texts of 1 to {MAX_STOP_LENGTH} characters")
        check("max_tokens", self.max_tokens >= 1, "at least 1")
        check("min_tokens", 0 <= self.min_tokens <= self.max_tokens, f"between 0 and max_tokens ({self.max_tokens})")
        check("seed", self.seed is None or 0 <= self.seed <= MAX_SEED, f"between 0 and {MAX_SEED}")
        check("logprobs", self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS, f"between 0 and {MAX_LOGPROBS}")
        check("n", 1 <= self.n <= MAX_N, f"between 1 and {MAX_N}")
        given = [name for name in ("json_schema", "regex", "grammar") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} were given together: an answer can follow only one of them")
        if any(len(str(getattr(self, name))) > MAX_GRAMMAR for name in given):
            raise ConfigError(f"{given[0]} must be at most {MAX_GRAMMAR} characters long")

    def without_grammar(self) -> SamplingParams:
        """For whoever is told of the grammar in another form."""
        return replace(self, json_schema=None, regex=None, grammar=None)

    def samples(self) -> list[SamplingParams]:
        """The parameters of each of the n answers. With a seed, answer i has seed + i, whatever n is."""
        seeds = [None if self.seed is None else (self.seed + index) % (MAX_SEED + 1) for index in range(self.n)]
        return [replace(self, n=1, seed=seed) for seed in seeds]


@dataclass(frozen=True)
class TokenLogprobs:
    """The natural log probability of an emitted token, and the best (token, log probability) at its position."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class SparseProbs(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A distribution with few non-zero entries: what a draft token was drawn from, complete."""

    ids: tuple[int, ...]
    probs: tuple[float, ...]


class Speculation(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Up to K draft tokens, and how each was drawn: `draft_probs` None means every token is a point mass."""

    tokens: tuple[int, ...] = ()
    draft_probs: tuple[SparseProbs, ...] | None = None

    def __post_init__(self) -> None:
        if self.draft_probs is not None and len(self.draft_probs) != len(self.tokens):
            raise ValueError("a speculation needs one draft distribution per token")

    def first(self, count: int) -> Speculation:
        """The first `count` tokens. Which tokens are kept never depends on their values, so this stays exact."""
        return Speculation(self.tokens[:count], self.draft_probs and self.draft_probs[:count])


@dataclass(frozen=True)
class Setting:
    """How rounds are run at the moment. A request may lower mode and lookahead, never raise them."""

    mode: Mode
    lookahead: int
    budget: int  # branches ΣF_k prepared for one sequence
    backup: Backup  # what drafts after a miss, and in `sd` always

    def for_request(self, mode: Mode, lookahead: int) -> Setting:
        """What remains of it for a request that allows no more than this."""
        if mode == self.mode == "ssd" and lookahead >= self.lookahead:  # as most requests do
            return self
        lower = min(self.mode, mode, key=MODES.index)
        return Setting(lower, min(self.lookahead, lookahead), self.budget if lower == "ssd" else 0, self.backup)


class Outcome(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, order=True):
    """What a verification decided: `accepted` draft tokens, then the target's own `bonus` token. Key of the cache."""

    accepted: int
    bonus: int


class RequestSampling:
    """Everything sampling must know of one request. The draft receives the same, so both sides agree. Read-only.

    `seed` is that of `params`, or the one the service drew; `stop_ids` end the request: EOS unless ignored, and
    params.stop_token_ids. It is named in every row of every round, so it travels as bytes of its own, which are packed
    once and read once.
    """

    def __init__(self, params: SamplingParams, seed: int, prompt_length: int, stop_ids: tuple[int, ...] = ()) -> None:
        self.params = params
        self.seed = seed
        self.prompt_length = prompt_length
        self.stop_ids = stop_ids

    @property
    def _fields(self) -> tuple[SamplingParams, int, int, tuple[int, ...]]:
        return self.params, self.seed, self.prompt_length, self.stop_ids

    @cached_property
    def packed(self) -> bytes:
        asked = {name: value for name, value in vars(self.params).items() if value != getattr(_ORDINARY, name)}
        return msgspec.msgpack.encode((asked, *self._fields[1:]))

    @staticmethod
    @lru_cache(maxsize=1024)
    def unpack(data: bytes) -> RequestSampling:
        """Raises what msgspec does, or ConfigError, for anything `packed` did not make."""
        return RequestSampling(*_request.decode(data))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RequestSampling) and self._fields == other._fields


_ORDINARY = SamplingParams()  # most requests differ from it in a few fields: only those travel
_request = msgspec.msgpack.Decoder(tuple[SamplingParams, int, int, tuple[int, ...]])
