"""Tensors to requests and answers to tensors, without a server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tritonclient.grpc import model_config_pb2

from byte_tokenizer import byte_level
from fuzzing import MANY
from saguaro.errors import CapacityError, ConfigError, DrainingError, LinkError
from saguaro.llm import build_engines
from saguaro.orchestrator.config import find_deployment, read_deployment
from saguaro.orchestrator.service_protocol import Submit, Tokens, decode_command, encode
from saguaro.orchestrator.types import SamplingParams, TokenLogprobs
from saguaro.triton_repo.answers import Answer, to_tensors
from saguaro.triton_repo.decoder import Decoder
from saguaro.triton_repo.fields import MAX_LIST, MAX_WORD, check_parameters, id_of
from saguaro.triton_repo.prompt import PromptReader
from saguaro.triton_repo.repository import render, write_repository
from saguaro.triton_repo.request import Request, code_of, message_of, read_request
from saguaro.triton_repo.tensors import ENSEMBLE, OPTIONS, SSD, TensorSpec
from saguaro.triton_repo.token_text import TokenText
from serving import array

GOLDEN = Path(__file__).parent / "golden" / "triton_repo"
TOKENIZER = byte_level()
MAX_LEN = 64
_SPECS = {spec.name: spec for spec in SSD.inputs}


def read(fields: Mapping[str, Any], parameters: str = "") -> Request:
    given = {"input_ids": [5, 6], "max_tokens": 8} | fields
    return read_request(
        {name: array(_SPECS[name], value) for name, value in given.items()}, parameters, TOKENIZER, MAX_LEN
    )


def test_every_field_reaches_its_parameter() -> None:
    request = read(
        {
            "max_tokens": 20, "min_tokens": 2, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "temperature": 0.7,
            "repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": -0.5, "seed": 2**64 - 1,
            "bad_words": ["one", ""], "stop_words": ["two", "", "é"], "stop_token_ids": [3, 4], "logprobs": 2,
            "ignore_eos": True, "include_stop_str_in_output": True, "num_return_sequences": 3,
            "logit_bias": '{"5": -1.5}', "guided_decoding_guide_type": "regex", "guided_decoding_guide": "[ab]+",
            "stream": True, "speculation_mode": "sd", "speculation_lookahead": 2, "priority": -3, "timeout_s": 1.5,
            "pad_id": 0, "beam_width": 1, "length_penalty": 1.0, "return_context_logits": False,
            "return_generation_logits": False, "return_perf_metrics": False, "return_num_input_tokens": True,
            "return_num_output_tokens": True, "return_log_probs": True, "exclude_input_in_output": True,
        }
    )  # fmt: skip
    params = SamplingParams(
        max_tokens=20, min_tokens=2, top_k=7, top_p=0.9, min_p=0.1, temperature=0.7, repetition_penalty=1.1,
        presence_penalty=0.5, frequency_penalty=-0.5, seed=2**64 - 1, bad_words=("one",), stop=("two", "é"),
        stop_token_ids=(3, 4), logprobs=2, ignore_eos=True, include_stop_str_in_output=True, n=3,
        logit_bias={5: -1.5}, regex="[ab]+",
    )  # fmt: skip
    assert request == Request([5, 6], params, True, False, "sd", 2, -3, 1.5)


def test_left_out_fields_take_the_defaults_of_sampling() -> None:
    assert read({}) == Request([5, 6], SamplingParams(max_tokens=8, temperature=0.0), False, True, None, None, 0, None)
    assert {"text_input", "messages", "max_tokens", *(spec.name for spec in OPTIONS)} == {
        spec.name for spec in ENSEMBLE.inputs
    }


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"random_seed": 5}, {"seed": 5}),
        ({"return_log_probs": True}, {"logprobs": 0}),
        ({"end_id": 9}, {"ignore_eos": True, "stop_token_ids": (9,)}),
        ({"end_id": 9, "stop_token_ids": [3]}, {"ignore_eos": True, "stop_token_ids": (3, 9)}),
        ({"end_id": -1}, {"ignore_eos": True}),
        ({"top_p": 0.0}, {"temperature": 0.0}),  # TensorRT-LLM's way to say greedy,
        ({"top_p": 0.0, "top_k": 5}, {"top_k": 5}),  # and off
        ({"embedding_bias_words": ["a", "", "ab"], "embedding_bias_weights": [1.0, 2.0]}, None),
        ({"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": "{}"}, {"json_schema": "{}"}),
        ({"guided_decoding_guide_type": "grammar", "guided_decoding_guide": "start: X"}, {"grammar": "start: X"}),
    ],
)
def test_fields_with_a_meaning_of_their_own(fields: dict[str, Any], expected: dict[str, Any] | None) -> None:
    if expected is None:
        a, *ab = TOKENIZER.encode("a").ids, *TOKENIZER.encode("ab").ids
        bias: dict[int, float] = {a[0]: 1.0}
        for token in ab:
            bias[token] = bias.get(token, 0.0) + 2.0
        expected = {"logit_bias": bias}
    greedy = {} if {"top_k"} & fields.keys() else {"temperature": 0.0}  # unless sampling is asked for
    assert read(fields).params == SamplingParams(**({"max_tokens": 8} | greedy | expected))


@pytest.mark.parametrize("asked", [{"temperature": 1.0}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.5}])
def test_decoding_is_greedy_unless_sampling_is_asked_for(asked: dict[str, float]) -> None:
    assert read({}).params.temperature == read({"seed": 3}).params.temperature == 0.0
    assert read(asked).params == SamplingParams(max_tokens=8, **asked)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
    ({"max_tokens": -(2**31)}, "max_tokens must be at least 1"),
    ({"min_tokens": 9}, r"min_tokens must be between 0 and max_tokens \(8\), got 9"),
    ({"temperature": np.nan}, "temperature must be between 0 .* got nan"),
    ({"temperature": -1.0}, "temperature must be between"),
    ({"temperature": np.inf}, "temperature must be between"),
    ({"top_k": -1}, "top_k must be 0"),
    ({"top_p": 1.5}, "top_p must be above 0"),
    ({"top_p": np.nan}, "top_p must be above 0"),
    ({"min_p": -0.5}, "min_p must be between"),
    ({"repetition_penalty": 0.0}, "repetition_penalty must be above 0"),
    ({"presence_penalty": 3.0}, "presence_penalty must be between -2 and 2"),
    ({"frequency_penalty": np.nan}, "frequency_penalty must be between -2 and 2"),
    ({"logprobs": 21}, "logprobs must be between 0 and 20"),
    ({"num_return_sequences": 0}, "num_return_sequences must be between 1 and 128"),
    ({"num_return_sequences": 10**9}, "num_return_sequences must be between 1 and 128"),
    ({"seed": 1, "random_seed": 1}, "seed and random_seed were given together"),
    ({"beam_width": 2}, "beam_width must be 1 or left out, got 2: there is no beam search"),
    ({"beam_width": 0}, "beam_width must be 1"),
    ({"length_penalty": 2.0}, "length_penalty must be 1.0"),
    ({"length_penalty": np.nan}, "length_penalty must be 1.0"),
    ({"return_context_logits": True}, "return_context_logits must be False"),
    ({"return_generation_logits": True}, "return_generation_logits must be False"),
    ({"return_perf_metrics": True}, "return_perf_metrics must be False"),
    ({"end_id": -2}, "end_id must be a token id, or -1"),
    ({"pad_id": -7}, "pad_id must be a token id, or -1"),
    ({"end_id": 3, "ignore_eos": True}, "end_id and ignore_eos were given together"),
    ({"stop_words": ["x"] * 65}, "stop_words must be a list of at most 64 texts"),
    ({"stop_words": ["x" * (MAX_WORD + 1)]}, "stop_words must be at most 1024 bytes long, got 1025"),
    ({"stop_words": [b"\xff"]}, "stop_words must be UTF-8: invalid start byte at byte 0"),
    ({"bad_words": ["  "]}, "bad_words must be a list of non-empty words"),
    ({"bad_words": ["x"] * (MAX_LIST + 1)}, "bad_words must have at most 4096 entries, got 4097"),
    ({"stop_token_ids": [1] * (MAX_LIST + 1)}, "stop_token_ids must have at most 4096 entries"),
    ({"logit_bias": "{"}, "logit_bias must be a JSON object of token id to number"),
    ({"logit_bias": "[" * 100_000}, "logit_bias must be a JSON object"),
    ({"logit_bias": '{"a": 1}'}, "logit_bias must be a JSON object"),
    ({"logit_bias": '{"1": NaN}'}, "logit_bias must be a JSON object"),
    ({"logit_bias": "x" * (2**20 + 1)}, "logit_bias must be at most 1048576 bytes"),
    ({"embedding_bias_words": ["a"]}, "embedding_bias_words and embedding_bias_weights must be equally many"),
    ({"embedding_bias_weights": [1.0]}, "embedding_bias_words and embedding_bias_weights must be equally many"),
    ({"embedding_bias_words": ["a"], "embedding_bias_weights": [np.nan]}, "logit_bias must be a map of token id"),
    ({"guided_decoding_guide": "a"}, "guided_decoding_guide was given alone"),
    ({"guided_decoding_guide_type": "regex"}, "guided_decoding_guide_type was given alone"),
    ({"guided_decoding_guide_type": "xml", "guided_decoding_guide": "a"}, "must be one of json_schema, regex, grammar"),
    ({"guided_decoding_guide_type": "regex", "guided_decoding_guide": "a" * 65537}, "guided_decoding_guide must be at"),
    ({"speculation_mode": "fast"}, "speculation_mode must be one of ar, sd, ssd, got 'fast'"),
    ({"input_ids": [5, -1]}, "input_ids must be token ids of 0 or more, got -1"),
    ({"input_ids": [1] * MAX_LEN}, "the prompt has 64 tokens and the context holds 64"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "message"), BAD, ids=[f"{next(iter(f))}-{i}" for i, (f, _) in enumerate(BAD)])
def test_what_cannot_be_honoured_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(fields)


def test_missing_unknown_and_misshapen_tensors_are_named() -> None:
    ids, count = np.array([[1]], np.int32), np.array([[1]], np.int32)
    for inputs, message in (
        ({"input_ids": ids}, "max_tokens is missing"),
        ({"max_tokens": count}, "input_ids is missing"),
        ({"input_ids": ids, "max_tokens": count, "top_q": count}, "top_q is not an input of this model"),
        ({"input_ids": ids, "max_tokens": count.astype(np.int64)}, "max_tokens must be INT32, got int64"),
        ({"input_ids": ids, "max_tokens": np.array([[1, 2]], np.int32)}, r"max_tokens must be one value.*\[1, 2\]"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_request(inputs, "", TOKENIZER, MAX_LEN)


def test_parameters_that_nobody_reads_are_refused() -> None:
    check_parameters("")
    assert id_of("", "") == id_of("", '{"timeout": 3}') == ""
    assert id_of("a", '{"id": "b"}') == "a"
    assert id_of("", '{"id": "b"}') == "b"
    with pytest.raises(ConfigError, match="id must be a string, got 3"):
        id_of("", '{"id": 3}')
    check_parameters('{"id": "b"}')
    check_parameters('{"triton_enable_empty_final_response": true, "sequence_id": 1}')
    with pytest.raises(ConfigError, match="temperatur is not a field"):
        read({}, '{"temperatur": 0.5}')


def test_the_code_of_an_error() -> None:
    assert [code_of(kind("")) for kind in (ConfigError, CapacityError, DrainingError, LinkError)] == [
        "INVALID_ARG", "UNAVAILABLE", "UNAVAILABLE", "UNAVAILABLE",
    ]  # fmt: skip
    assert [message_of(kind("x")) for kind in (ConfigError, CapacityError, DrainingError, LinkError, ValueError)] == [
        "x", "overloaded: x", "unavailable: x", "unavailable: x", "internal error: ValueError: x",
    ]  # fmt: skip


_ANY = {
    "INT32": st.integers(-(2**31), 2**31 - 1) | st.integers(-2, 300),
    "UINT64": st.integers(0, 2**64 - 1),
    "FP32": st.floats(width=32) | st.sampled_from([0.0, 0.5, 1.0]),
    "BOOL": st.booleans(),
    "STRING": st.binary(max_size=40) | st.text(max_size=40).map(lambda text: text.encode("utf-8", "surrogatepass"))
    | st.sampled_from([b"{}", b"regex", b"json_schema", b"ssd", b'{"1": 2}', b"[]"]),
}  # fmt: skip


def _values(spec: TensorSpec) -> st.SearchStrategy[Any]:
    return _ANY[spec.dtype] if spec.dims == (1,) else st.lists(_ANY[spec.dtype], max_size=4)


# A sound request with a few fields that may hold anything.
fuzzed_fields = st.sets(st.sampled_from(SSD.inputs), max_size=4).flatmap(
    lambda specs: st.fixed_dictionaries(
        {"input_ids": st.just([5, 6]), "max_tokens": st.just(8)} | {spec.name: _values(spec) for spec in specs}
    )
)


def check_reading(fields: dict[str, Any], swapped: bool) -> None:
    """Any tensors make a request or a ConfigError that begins with a field's name; `swapped` exchanges types."""
    inputs = {name: array(_SPECS[name], value) for name, value in fields.items()}
    if swapped:
        inputs |= {name: np.zeros(data.shape, np.float64) for name, data in inputs.items() if data.dtype != object}
    try:
        request = read_request(inputs, "", TOKENIZER, MAX_LEN)
    except ConfigError as error:
        named = str(error).split()[0].rstrip(":") in {*_SPECS, "the"}
    else:
        sent = Submit(0, request.prompt, request.params, request.mode, request.lookahead, timeout_s=request.timeout_s)
        named = decode_command(encode(sent)).params == request.params  # what the service cannot read, it would drop
    assert named


@settings(max_examples=300, deadline=None)
@given(fuzzed_fields, st.sampled_from([False, False, False, True]))
def test_any_tensors_are_read_or_refused(fields: dict[str, Any], swapped: bool) -> None:
    check_reading(fields, swapped)


@pytest.mark.soak
@settings(max_examples=MANY, deadline=None)
@given(fuzzed_fields, st.booleans())
def test_many_more_tensors_are_read_or_refused(fields: dict[str, Any], swapped: bool) -> None:
    check_reading(fields, swapped)


# --- answers -------------------------------------------------------------------------------------------------------


def test_chunks_never_split_a_character_and_hold_stop_strings_back() -> None:
    text = "añ€😀 one STOP two"
    ids = [TOKENIZER.token_to_id(piece) for piece in _bytes_as_tokens(text)]
    answer = Answer(0, SamplingParams(stop=("STOP",)), TOKENIZER)
    shown = [answer.push(Tokens(0, [token])).text for token in ids]
    shown.append(answer.push(Tokens(0, [], "stop")).text)
    assert "".join(shown) == "añ€😀 one "
    assert all("\ufffd" not in piece for piece in shown)
    whole = answer.whole()
    assert (whole.text, whole.num_tokens, whole.finish_reason) == ("añ€😀 one ", len(ids), "stop")


def test_a_cancelled_answer_shows_what_was_held_back() -> None:
    answer = Answer(0, SamplingParams(stop=("STOP",)), TOKENIZER, "prompt ")
    answer.push(Tokens(0, [TOKENIZER.token_to_id(letter) for letter in "xST"]))
    assert answer.cancel().text == "ST"
    assert (answer.whole().text, answer.finish_reason) == ("prompt xST", "cancelled")


def test_a_response_has_every_declared_tensor_with_its_type() -> None:
    answers = [Answer(index, SamplingParams(logprobs=0), TOKENIZER) for index in range(2)]
    parts = [
        answers[0].push(Tokens(0, [5, 6], logprobs=[TokenLogprobs(5, -0.5), TokenLogprobs(6, -1.0)])),
        answers[1].push(Tokens(0, [7], "length", logprobs=[TokenLogprobs(7, -2.0)])),
    ]
    tensors = to_tensors(parts, num_input_tokens=4)
    assert set(tensors) == {spec.name for spec in SSD.outputs}
    for spec in SSD.outputs:
        assert tensors[spec.name].dtype == array(spec, []).dtype
        assert tensors[spec.name].ndim == 1 + len(spec.dims)
    assert tensors["output_ids"].tolist() == [[5, 6, 7]]
    assert tensors["num_output_tokens"].tolist() == [[2, 1]]
    assert tensors["output_log_probs"].tolist() == [[[-0.5, -1.0], [-2.0, 0.0]]]
    assert tensors["cum_log_probs"].tolist() == [[-1.5, -2.0]]
    assert tensors["finish_reason"].tolist() == [[b"", b"length"]]


def test_log_probabilities_show_the_bytes_of_their_tokens(tmp_path: Path) -> None:
    TOKENIZER.save(str(tmp_path / "tokenizer.json"))
    text = TokenText(tmp_path / "tokenizer.json")
    first, second = (TOKENIZER.token_to_id(piece) for piece in _bytes_as_tokens("é"))
    end = TOKENIZER.token_to_id("<end>")
    assert [text.bytes_of(token) for token in (first, second, end, 10_000)] == [b"\xc3", b"\xa9", b"<end>", b""]
    for token in range(TOKENIZER.get_vocab_size()):
        if token != end:
            assert text.bytes_of(token).decode(errors="replace") == TOKENIZER.decode([token])
    raw = b'[{"token": %d, "logprob": -0.5, "top": [[%d, -0.5]]}]' % (first, end)
    entry = {"token": "\ufffd", "logprob": -0.5, "bytes": [0xC3]}
    best = {"token": "<end>", "logprob": -0.5, "bytes": list(b"<end>")}
    assert json.loads(text.to_json(raw)) == [entry | {"top_logprobs": [best]}]


def _bytes_as_tokens(text: str) -> list[str]:
    """The one-byte tokens of a text."""
    from saguaro.triton_repo.token_text import _byte_level_alphabet

    names = {byte: character for character, byte in _byte_level_alphabet().items()}
    return [names[byte] for byte in text.encode()]


# --- the decoder without a service ----------------------------------------------------------------------------------


class RecordingSink:
    def __init__(self) -> None:
        self.events: list[Any] = []

    def send(self, outputs: Any, final: bool) -> None:
        self.events.append((outputs, final))

    def finish(self) -> None:
        self.events.append("finished")

    def fail(self, error: Exception) -> None:
        self.events.append(error)

    def is_cancelled(self) -> bool:
        return False


def test_stop_finds_one_request_by_its_id_and_never_a_nameless_one(tmp_path: Path) -> None:
    """No service listens here, so requests wait for ever: until they are cancelled."""
    TOKENIZER.save(str(tmp_path / "tokenizer.json"))
    decoder = Decoder(tmp_path / "tokenizer.json", tmp_path / "service.sock", MAX_LEN)
    request = {name: array(_SPECS[name], value) for name, value in {"input_ids": [5], "max_tokens": 4}.items()}
    stop = {"stop": np.array([[True]])}

    async def settle() -> None:
        await asyncio.sleep(0.05)

    sinks = [RecordingSink() for _ in range(9)]
    try:
        for sink, name in zip(sinks, ("", "", "a", "twice", "twice")):
            decoder.submit(name, request, "", sink)
        for sink, name in zip(sinks[5:], ("", "unknown", "twice", "a")):
            decoder.submit(name, stop, "", sink)
        decoder._loop.run(settle())
        assert [sink.events for sink in sinks[5:7]] == [["finished"], ["finished"]]
        assert "2 running requests have the id 'twice'" in str(sinks[7].events[0])
        assert sinks[8].events == ["finished"]
        assert [len(sink.events) for sink in sinks[:5]] == [0, 0, 1, 0, 0]
        outputs, final = sinks[2].events[0]
        assert final
        assert outputs["finish_reason"].tolist() == [[b"cancelled"]]
        assert len(decoder._live()) == 4
    finally:
        decoder.close()
    assert [len(sink.events) for sink in sinks[:5]] == [1, 1, 1, 1, 1], "what runs at the end is answered"


# --- prompts and the repository -----------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def engine(store: Path) -> Path:
    path = find_deployment("tiny")
    return build_engines(read_deployment(path), path, store)[0]


def test_prompts_are_read_or_refused(engine: Path) -> None:
    reader = PromptReader(engine, 512)
    tokenizer = Tokenizer.from_file(str(engine / "tokenizer.json"))

    def prompt(text: Any, messages: Any = None, parameters: str = "") -> list[int]:
        inputs = {"text_input": np.array([[text]], object)}
        if messages is not None:
            inputs["messages"] = np.array([[messages]], object)
        return list(reader.read(inputs, parameters)[0])

    assert prompt(b"A saguaro") == tokenizer.encode("A saguaro").ids
    chat = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert prompt(b"", b'[{"role": "user", "content": "hi"}]') == tokenizer.encode(chat).ids
    for arguments, message in (
        ((b"",), "text_input must have at least one token"),
        ((b"\xff\xfe",), "text_input must be UTF-8: invalid start byte at byte 0"),
        ((b"a " * 600,), "text_input has .* tokens and the context holds 512"),
        ((b"x" * 10_000_000,), r"text_input must be at most \d+ bytes long, got 10000000"),
        ((b"a", b"[]"), 'text_input must be "" where messages is given'),
        ((b"", b"[]"), "messages must have at least one message"),
        ((b"", b"{"), "messages must be a JSON list"),
        ((b"", b"[" * 2000), "messages must be a JSON list"),
        ((b"", b'[{"role": "user"}]'), "messages must be a JSON list .*missing required field `content`"),
        ((b"", b'[{"role": "user", "content": "a", "tool": 1}]'), "messages must be .*unknown field `tool`"),
        ((b"", b'[{"role": 1, "content": "a"}]'), "messages must be a JSON list"),
        ((b"a", None, '{"temperatur": 1}'), "temperatur is not a field"),
    ):
        with pytest.raises(ConfigError, match=message):
            prompt(*arguments)
    with pytest.raises(ConfigError, match="text_input is missing"):
        reader.read({}, "")


def test_the_generated_configs_are_the_expected_ones() -> None:
    """After a wanted change: write what `render` returns into tests/golden/triton_repo."""
    made = render({"deployment": "tiny", "engine": "/engine", "max_model_len": "512", "socket": "/run/service.sock"})
    assert list(made) == ["preprocessing", "ssd", "postprocessing", "ensemble"]
    for model, text in made.items():
        text_format.Parse(text, model_config_pb2.ModelConfig())
        assert text == (GOLDEN / f"{model}.pbtxt").read_text(), model


def test_a_repository_holds_all_that_triton_needs(engine: Path, tmp_path: Path) -> None:
    path = find_deployment("tiny")
    for _ in range(2):  # again over the last one
        write_repository(tmp_path, config=read_deployment(path), engine=engine, socket=tmp_path / "service.sock")
    files = {str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*") if file.is_file()}
    models = ("preprocessing", "ssd", "postprocessing")
    assert files == {f"{model}/config.pbtxt" for model in (*models, "ensemble")} | {f"{m}/1/model.py" for m in models}
    assert (tmp_path / "ensemble" / "1").is_dir()
    config = text_format.Parse((tmp_path / "ssd" / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())
    assert config.parameters["max_model_len"].string_value == "512"
    assert config.model_transaction_policy.decoupled
