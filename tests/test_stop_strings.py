"""Text as it comes: whole characters, and stop strings that end it wherever they lie."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from byte_tokenizer import byte_level
from harness import Pair
from saguaro.engines.scripted import ScriptedEngine
from saguaro.errors import ConfigError
from saguaro.orchestrator.bad_words import encode_bad_words
from saguaro.orchestrator.detokenizer import TextStream
from saguaro.orchestrator.types import Mode, SamplingParams

TOKENIZER = byte_level()
VOCAB = TOKENIZER.get_vocab_size()


def stream(tokens: list[int], **params: object) -> tuple[list[str], str, bool]:
    """What is shown after each token, what at the end, and whether a stop string was found."""
    text = TextStream(TOKENIZER, SamplingParams(**params))  # type: ignore[arg-type]
    return [text.push(token) for token in tokens], text.finish(), text.stopped


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text).ids)


def single(text: str) -> list[int]:
    """One token a byte: every border there can be."""
    return [TOKENIZER.token_to_id(pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(char)[0][0][i])
            for char in text for i in range(len(char.encode()))]  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, VOCAB - 1), max_size=40))
def test_the_pieces_are_the_text(tokens: list[int]) -> None:
    """Also where tokens are no text at all: random bytes."""
    pieces, rest, _ = stream(tokens)
    assert "".join(pieces) + rest == TOKENIZER.decode(tokens, skip_special_tokens=True)


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="aé世🌵 ", max_size=12))
def test_no_piece_ends_inside_a_character(text: str) -> None:
    pieces, rest, _ = stream(single(text))
    assert "".join(pieces) == text
    assert rest == ""
    assert "\ufffd" not in "".join(pieces)


def expected(text: str, stops: tuple[str, ...], include: bool) -> tuple[str, bool]:
    """The definition, character by character."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end if include else end - max(map(len, found))], True
    return text, False


@settings(max_examples=300, deadline=None)
@given(
    st.text(alphabet="ab世🌵", max_size=14),
    st.lists(st.text(alphabet="ab世🌵", min_size=1, max_size=4), min_size=1, max_size=3).map(tuple),
    st.booleans(),
    st.booleans(),
)
def test_a_stop_string_ends_the_text_wherever_tokens_divide_it(
    text: str, stops: tuple[str, ...], include: bool, whole: bool
) -> None:
    pieces, rest, stopped = stream(ids(text) if whole else single(text), stop=stops, include_stop_str_in_output=include)
    assert ("".join(pieces) + rest, stopped) == expected(text, stops, include)
    shown = ""
    for piece in pieces:  # at no time was more shown than belongs to the answer
        shown += piece
        assert expected(text, stops, include)[0].startswith(shown)


def test_hold_back_releases_what_does_not_complete() -> None:
    pieces, rest, stopped = stream(single("a STOx STO"), stop=("STOP",))
    assert pieces == ["a", " ", "", "", "", "STOx", " ", "", "", ""]
    assert (rest, stopped) == ("STO", False)


def test_before_min_tokens_no_stop_string_is_looked_for() -> None:
    pieces, _, stopped = stream(single("x.x.x"), stop=(".",), min_tokens=3)
    assert ("".join(pieces), stopped) == ("x.x", True)


def following(chain: list[int]) -> Pair:
    """Target and draft that both say these tokens, then repeat them."""

    def table(context: tuple[int, ...]) -> list[float]:
        probs = [0.0] * VOCAB
        probs[chain[(len(context) - 1) % len(chain)]] = 1.0
        return probs

    engines = [ScriptedEngine(table, VOCAB, 200, 4, 100) for _ in range(2)]
    return Pair(*engines, lookahead=4, budget=5, tokenizer=TOKENIZER)


@pytest.mark.parametrize("mode", ["ar", "sd", "ssd"])
@pytest.mark.parametrize(
    ("text", "stop", "kept"),
    [
        ("one stop two", "stop", "one stop"),
        ("wide 世界 🌵 end", "界 🌵", "wide 世界 🌵"),
        ("abcabd abcabe", "abe", "abcabd abcabe"),
        ("x", "xxxxxxxxx", "xxxxxxxxx"),
    ],
)
def test_tokens_end_with_the_one_that_completes_the_stop_string(mode: Mode, text: str, stop: str, kept: str) -> None:
    """Across tokens and rounds, and inside an accepted block: nothing after it is committed, and blocks come back."""
    pair = following(single(text))
    sequence = pair.sequence([0], SamplingParams(temperature=0, max_tokens=100, stop=(stop,), logprobs=0), mode)
    while not sequence.finish_reason:
        pair.step([sequence])
    assert sequence.target_length == sequence.length - 1  # the KV of what was cut off does not count
    tokens = sequence.tokens[1:]
    sequence.release()
    pair.finish([])  # checks both pools
    assert TOKENIZER.decode(tokens) == kept
    assert sequence.finish_reason == "stop"
    assert sum(record.tokens for record in sequence.rounds) == len(tokens) == len(sequence.logprobs)


def test_i08_a_stop_string_is_found_beside_other_requests() -> None:
    """I-08: seeded neighbours changed a greedy request that was to stop at "20:"."""
    text = "".join(f"{n}: yes " for n in range(1, 25))
    params = SamplingParams(temperature=0, max_tokens=180, stop=("20:",))
    alone = following(single(text))
    expected_tokens = alone.run([0], params)
    assert TOKENIZER.decode(expected_tokens).endswith("19: yes 20:")
    beside = following(single(text))
    others = [beside.sequence([0], SamplingParams(temperature=1.5, seed=s, max_tokens=9)) for s in range(8)]
    assert beside.finish([beside.sequence([0], params), *others])[0] == expected_tokens


def test_bad_words_as_text_are_banned_alone_and_after_a_space() -> None:
    params = encode_bad_words(TOKENIZER, SamplingParams(bad_words=("stop", (7, 8), " stop")))
    assert params.bad_words == (tuple(ids("stop")), tuple(ids(" stop")), (7, 8))
    pair = following(ids("one stop two"))
    banned = encode_bad_words(TOKENIZER, SamplingParams(bad_words=("stop",), max_tokens=9, temperature=0))
    sequence = pair.sequence([0], banned)
    pair.finish([sequence])
    assert sequence.finish_reason == "error"  # this table knows no other way to go on
    assert TOKENIZER.decode(sequence.tokens[1:]) in ("one", "one ")


@pytest.mark.parametrize(
    "params",
    [{"stop": "text"}, {"stop": ("",)}, {"stop": ("x" * 1025,)}, {"stop": ("x",) * 65}, {"bad_words": ("  ",)},
     {"bad_words": "text"}],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused(params: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(params))} must be"):
        SamplingParams(**params)  # type: ignore[arg-type]
