"""Structured output: every answer fits its grammar, in every mode, and speculation stays exact under it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from byte_tokenizer import byte_level
from harness import Pair
from saguaro.engines.scripted import ScriptedEngine, markov_table
from saguaro.errors import ConfigError
from saguaro.orchestrator.grammar import Grammars
from saguaro.orchestrator.protocol import GrammarRef, Round, decode
from saguaro.orchestrator.sequence import Sequence
from saguaro.orchestrator.types import SamplingParams

TOKENIZER = byte_level()
VOCAB = TOKENIZER.get_vocab_size()
EOS = TOKENIZER.token_to_id("<end>")
OBJECT = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}


class TableEngine(ScriptedEngine):
    """Logits straight from a table of log probabilities: hundreds of answers in seconds."""

    def __init__(self, log_probs: np.ndarray) -> None:
        super().__init__(markov_table([]), VOCAB, 400, 8, 4000)
        self._rows = log_probs.tolist()

    def _log_probs(self, context: tuple[int, ...]) -> list[float]:
        return list(self._rows[context[-1]])


def engine(noise: float) -> TableEngine:
    """Sharp random next-token tables; the draft's differ from the target's by some noise."""
    generator = np.random.default_rng(0)
    logits = 2.5 * generator.standard_normal((VOCAB, VOCAB))
    logits += noise * np.random.default_rng(1).standard_normal((VOCAB, VOCAB))
    logits[:, [TOKENIZER.token_to_id(space) for space in "ĠĊčĉ"]] -= 6  # answers stay short
    return TableEngine(logits)


TARGET, DRAFT = engine(0.0), engine(0.7)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    TOKENIZER.save(str(path))
    return path


def pair(tokenizer: Path, *, masked_draft: bool = True) -> Pair:
    grammars, draft_grammars = (Grammars(tokenizer, VOCAB, (EOS,)) for _ in range(2))
    draft = draft_grammars if masked_draft else None
    return Pair(TARGET, DRAFT, lookahead=2, budget=3, stop_ids=(EOS,), grammars=grammars, draft_grammars=draft)


def text(tokens: list[int]) -> str:
    return str(TOKENIZER.decode(tokens, skip_special_tokens=True))


def acceptance_length(sequences: list[Sequence]) -> float:
    rounds = [record.tokens for sequence in sequences for record in sequence.rounds[1:]]
    return sum(rounds) / len(rounds)


def test_i18_every_answer_parses_and_validates(tokenizer: Path) -> None:
    """I-18: guided decoding broke or killed the server with speculation. 200 prompts at T = 1."""
    lengths = {}
    for masked in (True, False):
        both = pair(tokenizer, masked_draft=masked)
        batch = [
            both.sequence([3 + n], SamplingParams(seed=n, max_tokens=300, json_schema=OBJECT))
            for n in range(200 if masked else 30)
        ]
        for sequence, tokens in zip(batch, both.finish(batch), strict=True):
            assert sequence.finish_reason == "stop", text(tokens)
            answer = json.loads(text(tokens))
            assert list(answer) == ["a"]
            assert type(answer["a"]) is int
        lengths[masked] = acceptance_length(batch)
    assert lengths[True] > 1.5 * lengths[False]  # the draft knows the grammar too


LARK = 'start: greeting ", " NAME "!"\ngreeting: "hi" | "hello"\nNAME: /[a-c]{1,3}/'


@pytest.mark.parametrize(
    ("given", "pattern"),
    [
        ({"json_schema": json.dumps(OBJECT)}, r'\s*\{\s*"a"\s*:\s*-?\d+\s*\}'),
        ({"regex": r"[a-f]{3,9}(\.[0-9]{2})?"}, r"[a-f]{3,9}(\.[0-9]{2})?"),
        ({"regex": "世界🌵{2,3}"}, "世界🌵{2,3}"),
        ({"grammar": LARK}, r"(hi|hello), [a-c]{1,3}!"),
    ],
)
@pytest.mark.parametrize("more", [{}, {"temperature": 0, "min_tokens": 2}, {"ignore_eos": True, "top_p": 0.9}])
def test_all_modes_emit_the_same_and_it_fits(
    tokenizer: Path, given: dict[str, str], pattern: str, more: dict[str, float]
) -> None:
    """Beside each other and beside free text, as one batch of mixed modes; `ratio` fits as well."""
    for seed in range(2):
        params = SamplingParams(**({"seed": seed, "max_tokens": 200, "frequency_penalty": 0.1} | given | more))  # type: ignore[arg-type]
        free = SamplingParams(seed=seed, max_tokens=30, ignore_eos=True)
        plain = pair(tokenizer).run([1, 2], params, "ar")
        both = pair(tokenizer)
        batch = [both.sequence([1, 2], params, "ssd"), both.sequence([1, 2], params, "sd")]
        batch.append(both.sequence([1, 2], free, "ssd"))
        assert both.finish(batch) == [plain, plain, pair(tokenizer).run([1, 2], free, "ar")]
        assert {sequence.finish_reason for sequence in batch[:2]} == {"stop"}
        assert re.fullmatch(pattern, text(plain))
        ratio = replace(pair(tokenizer), rule="ratio")
        assert re.fullmatch(pattern, text(ratio.run([1, 2], params)))


def test_max_tokens_ends_an_answer_that_is_not_complete(tokenizer: Path) -> None:
    both = pair(tokenizer)
    sequence = both.sequence([1], SamplingParams(max_tokens=5, regex="[ab]{20}", seed=1))
    assert re.fullmatch("[ab]{3,}", text(both.finish([sequence])[0]))
    assert sequence.finish_reason == "length"


def test_masks_along_a_speculation(tokenizer: Path) -> None:
    """After each accepted prefix, whatever comes later in the tail; the state itself stays where it was."""
    state = Grammars(tokenizer, VOCAB, (EOS,)).start(SamplingParams(regex="ab[0-9]c?"))
    assert state is not None
    a, b, c, seven = (TOKENIZER.token_to_id(char) for char in "abc7")
    for _ in range(2):
        masks = state.masks([(), (a,), (a, b), (a, b, seven), (a, b, seven, c), (b,), (a, EOS)], VOCAB)
        assert masks[0].nonzero().flatten().tolist() == [a]
        assert masks[1].nonzero().flatten().tolist() == [b]
        assert sorted(masks[2].nonzero().flatten().tolist()) == sorted(TOKENIZER.token_to_id(d) for d in "0123456789")
        assert sorted(masks[3].nonzero().flatten().tolist()) == sorted([c, EOS])  # it may end here, or go on
        assert masks[4:].all()  # complete, and twice refused: nothing is ever read there
    state.advance([a, b, seven])
    assert not state.complete
    state.advance([c])
    assert state.complete


def test_following_an_answer_is_starting_anew(tokenizer: Path) -> None:
    """What is remembered of a sequence only saves work: another answer, another grammar, a shorter answer."""
    grammars = Grammars(tokenizer, VOCAB, (EOS,))
    one, two = SamplingParams(regex="[a-d]+"), SamplingParams(regex="[a-b]+c")
    a, b, c = (TOKENIZER.token_to_id(char) for char in "abc")
    answers: list[tuple[SamplingParams, list[int]]] = [
        (one, [a]),
        (one, [a, b, c]),
        (one, [b]),
        (two, [b]),
        (two, [b, a]),
        (one, [b, a, a]),
    ]
    told: set[bytes] = set()
    for params, answer in answers:
        fresh = Grammars(tokenizer, VOCAB, (EOS,)).start(params)
        assert fresh is not None
        if fresh.digest not in told:
            assert grammars.follow(7, GrammarRef(fresh.digest, None), answer) is None
        text = None if fresh.digest in told else fresh.text  # needed once
        told.add(fresh.digest)
        found = grammars.follow(7, GrammarRef(fresh.digest, text), answer)
        assert found is not None
        fresh.advance(answer)
        assert torch.equal(found.masks([()], VOCAB), fresh.masks([()], VOCAB))


def test_a_grammar_s_text_travels_once(tokenizer: Path) -> None:
    """In the row that introduces the sequence, and again when another draft has connected; the draft keeps to it."""
    both = pair(tokenizer)
    sequence = both.sequence([1, 2], SamplingParams(seed=4, max_tokens=40, regex="[a-d]{36}[0-9]{4}"))
    plain = pair(tokenizer).run([1, 2], SamplingParams(seed=4, max_tokens=40, regex="[a-d]{36}[0-9]{4}"), "ar")
    for _ in range(6):
        both.step([sequence])
    fresh = pair(tokenizer)
    fresh.speculator._channel = both.speculator._channel
    both.channel.speculator = fresh.speculator
    before = len(both.channel.sent)
    both.verifier.attach(both.link, [sequence])
    assert both.finish([sequence]) == [plain]
    rows = [m.body.rows[0] for m in map(decode, both.channel.sent) if isinstance(m.body, Round)]
    texts = [index for index, row in enumerate(rows) if row.grammar and row.grammar.text]
    assert texts == [0, before]
    assert all(row.grammar and row.request.params.regex is None for row in rows)
    assert acceptance_length([sequence]) > 2  # of 3; the draft without the grammar comes to 1.1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"regex": "[a-z"}, "regex cannot be used: .*unclosed character class"),
        ({"grammar": "start: missing"}, "grammar cannot be used: .*unknown name"),
        ({"json_schema": '{"type": "strong"}'}, "json_schema cannot be used: .*strong"),
        ({"json_schema": '{"type": '}, "json_schema cannot be used: .*line 1 column 10"),
        ({"json_schema": {"type": "strong"}}, "json_schema cannot be used"),
    ],
)
def test_a_bad_grammar_names_its_field_in_one_line(tokenizer: Path, given: dict[str, object], message: str) -> None:
    grammars = Grammars(tokenizer, VOCAB, (EOS,))
    with pytest.raises(ConfigError, match=message) as raised:
        grammars.start(SamplingParams(**given))  # type: ignore[arg-type]
    assert "\n" not in str(raised.value)


def test_one_grammar_at_most_and_none_too_long() -> None:
    with pytest.raises(ConfigError, match="json_schema and regex were given together"):
        SamplingParams(json_schema="{}", regex="a")
    with pytest.raises(ConfigError, match="regex must be at most 65536 characters"):
        SamplingParams(regex="a" * 65537)
