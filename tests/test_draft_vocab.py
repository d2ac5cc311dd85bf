"""A draft whose head computes a part of the vocabulary: which part, what its logits are, and that texts stay exact."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models

from conftest import require_compiler
from harness import Pair
from saguaro.bench import draft_vocab as bench
from saguaro.bench.replay import Figures, Played, Text
from saguaro.build.draft_vocab import frequent_tokens
from saguaro.build.driver import build, engine_directory
from saguaro.build.recipe import Recipe, Tiny, read_recipe
from saguaro.doctor.deployment import Part, engines
from saguaro.engines.base import causal_batch, fan_out_batch
from saguaro.engines.draft_vocab import read_draft_vocab
from saguaro.engines.manifest import DRAFT_VOCAB, QUANTISED, TOKENIZER, Manifest, file_sha256
from saguaro.engines.pytorch import PytorchEngine
from saguaro.errors import ConfigError, EngineError
from saguaro.orchestrator.config import FanOutConfig, SpeculationConfig, find_deployment, read_deployment
from saguaro.orchestrator.drafters.model import ModelDrafter
from saguaro.orchestrator.grammar import Grammars
from saguaro.orchestrator.launch import Launcher
from saguaro.orchestrator.types import SamplingParams
from saguaro.plugins.fan_out import FanOut

TINY = Tiny("qwen2", layers=2, hidden_size=64, heads=4, kv_heads=2, vocab_size=300, max_model_len=64)
TEXT = "Zebras zigzag; quizzes puzzle.\n"


def recipe(**fields: Any) -> Recipe:
    return Recipe(
        **{"name": "test", "engine": "pytorch", "dtype": "float32", "tiny": TINY, "draft_vocab": 100} | fields
    )


def engine(directory: Path) -> PytorchEngine:
    return PytorchEngine.load(directory, block_size=4, num_blocks=200)


def whole(store: Path, **fields: Any) -> PytorchEngine:
    return engine(build(recipe(draft_vocab=None, **fields), store))


def listed(directory: Path) -> list[int]:
    return json.loads((directory / DRAFT_VOCAB).read_text())  # type: ignore[no-any-return]


# The list -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(recipe(), tmp_path_factory.mktemp("built"))


def test_without_a_text_the_lowest_ids_and_all_added_tokens_are_kept(built: Path) -> None:
    tokenizer = Tokenizer.from_file(str(built / TOKENIZER))
    added = set(tokenizer.get_added_tokens_decoder())
    tokens = listed(built)
    assert len(tokens) == 100
    assert tokens == sorted(added | set(range(100)))[:100]
    manifest = Manifest.load(built)
    assert added | set(manifest.eos_token_ids) <= set(tokens)
    assert manifest.reduced
    assert manifest.files[DRAFT_VOCAB].sha256 == file_sha256(built / DRAFT_VOCAB)


def test_end_and_added_tokens_are_kept_wherever_they_are() -> None:
    tokenizer = Tokenizer(models.BPE({chr(97 + index): index for index in range(20)}, []))
    tokenizer.add_tokens(["<tool>"])
    tokenizer.add_special_tokens(["<end>"])
    assert frequent_tokens(tokenizer, 6, [11], []) == [0, 1, 2, 11, 20, 21]


def test_with_texts_the_most_frequent_tokens_are_kept_and_ids_break_ties(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE({chr(97 + index): index for index in range(20)}, []))
    (tmp_path / "a").write_text("ttss")
    (tmp_path / "b").write_text("tqqr")
    # t 3, then q and s 2; without a text's help, a
    texts = [tmp_path / "a", tmp_path / "b"]
    assert frequent_tokens(tokenizer, 2, [9], texts) == [9, 19]
    assert frequent_tokens(tokenizer, 3, [9], texts) == [9, 16, 19]
    assert frequent_tokens(tokenizer, 6, [9], texts) == [0, 9, 16, 17, 18, 19]


def test_a_long_text_is_counted_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saguaro.build.draft_vocab._CHARACTERS", 3)
    (tmp_path / "text").write_text("aaaaaaabbbbbbtttttttttt")
    tokenizer = Tokenizer(models.BPE({chr(97 + index): index for index in range(20)}, []))
    assert frequent_tokens(tokenizer, 2, [3], [tmp_path / "text"]) == [3, 19]


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (3, "draft_vocab is 3, but must be more than the 3 end and added tokens"),
        (300, "draft_vocab is 300, but must be .* less than all 300 tokens of the tokenizer"),
        (1000, "recipe test: draft_vocab is 1000, but must be"),
    ],
)
def test_sizes_that_do_not_fit_the_tokenizer_are_refused(size: int, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        build(recipe(draft_vocab=size), tmp_path)
    assert list((tmp_path / "engines").iterdir()) == []


def test_ids_are_a_ranking_for_bpe_alone(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({f"w{index}": index for index in range(20)}, unk_token="w0"))
    with pytest.raises(ConfigError, match="most frequent tokens of a BPE tokenizer; the model's is WordLevel"):
        frequent_tokens(tokenizer, 10, [], [])
    (tmp_path / "text").write_text("w12")
    assert frequent_tokens(tokenizer, 2, [5], [tmp_path / "text"]) == [5, 12]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"draft_vocab": 0}, "draft_vocab must be at least 1, or left out"),
        ({"draft_vocab": None, "vocab_text": ("a",)}, "vocab_text .* give both"),
        ({"vocab_text": ()}, "vocab_text .* and a file"),
        ({"engine": "trtllm", "dtype": "bfloat16"}, "draft_vocab is not for the engine trtllm, but for pytorch and"),
    ],
)
def test_recipes_out_of_range_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recipe(**fields)


def test_a_text_s_bytes_name_the_engine_and_not_its_place(tmp_path: Path) -> None:
    found = []
    for folder, text in (("a", TEXT), ("b", TEXT), ("c", TEXT + "x")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.txt").write_text(text)
        (tmp_path / folder / "r.yaml").write_text(
            "name: r\nengine: pytorch\ndraft_vocab: 100\nvocab_text: [mine.txt]\ntiny: {family: llama, layers: 1, "
            "hidden_size: 32, heads: 2, kv_heads: 1, vocab_size: 300}\n"
        )
        found.append(engine_directory(read_recipe(tmp_path / folder / "r.yaml"), tmp_path))
    assert found[0] == found[1] != found[2]
    tokens = listed(build(read_recipe(tmp_path / "a" / "r.yaml"), tmp_path))
    assert set(Tokenizer.from_file(str(found[0] / TOKENIZER)).encode(TEXT).ids) <= set(tokens)
    (tmp_path / "c" / "mine.txt").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="vocab_text: .*mine.txt cannot be read as UTF-8"):
        build(read_recipe(tmp_path / "c" / "r.yaml"), tmp_path)
    (tmp_path / "c" / "mine.txt").unlink()
    with pytest.raises(ConfigError, match="vocab_text: .*mine.txt cannot be read .* Name files"):
        build(read_recipe(tmp_path / "c" / "r.yaml"), tmp_path)


# The engine -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])  # qwen2: the head is tied to the embedding
def test_logits_are_the_whole_head_s_where_there_are_any(family: str, dtype: Any, tmp_path: Path) -> None:
    if dtype in QUANTISED:
        require_compiler()
    fields = {"dtype": dtype, "tiny": dataclasses.replace(TINY, family=family)}
    directory = build(recipe(**fields), tmp_path)
    reduced, reference = engine(directory), whole(tmp_path, **fields)
    kept = listed(directory)
    rest = sorted(set(range(300)) - set(kept))
    table = list(range(30))
    batches = [
        causal_batch([list(range(200, 217))], [0], [table], [9], 4),
        fan_out_batch(torch.tensor([250, 3, 90]), [FanOut((2, 1))], [15], [table], 0, 4),
    ]
    for batch in batches:
        logits, expected = reduced.forward(batch).logits, reference.forward(batch).logits
        assert logits.shape == expected.shape
        assert (logits[:, rest] == -torch.inf).all()
        torch.testing.assert_close(logits[:, kept], expected[:, kept], rtol=0, atol=1e-5)
    assert reduced.logit_tolerance == reference.logit_tolerance
    for pool, expected in zip(reduced._pool.keys, reference._pool.keys):
        assert torch.equal(pool, expected)


@pytest.mark.parametrize("text", ["", "{}", '["a"]', "[]", "[3, 2]", "[2, 2]", "[-1, 2]", "[5, 300]", "[[1], [2]]"])
def test_a_list_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / DRAFT_VOCAB).write_text(text)
    with pytest.raises(EngineError, match=f"{DRAFT_VOCAB}: (is not a list|does not list ascending).*Build the engine"):
        read_draft_vocab(tmp_path, 300)


def test_a_target_s_distribution_has_to_be_whole(built: Path) -> None:
    config = read_deployment(find_deployment("tiny"))
    message = "was built with draft_vocab.*It can draft.*recipe without draft_vocab"
    with pytest.raises(EngineError, match=message):
        Launcher(config, built, None)
    Launcher(config, build(recipe(draft_vocab=None), built.parents[1]), built)
    part = Part(config.target, recipe(), built.parents[1], built, Manifest.load(built))
    target, draft, *_ = (check for check in engines({"target": part, "draft": part}) if "engine" in check.name)
    assert (target.level, draft.level) == ("problem", "ok")
    assert re.search(message, target.found)


# Texts ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[PytorchEngine, PytorchEngine, Path]:
    """A target and a draft that leaves out two thirds of the tokens it likes."""
    store = tmp_path_factory.mktemp("pair")
    directory = build(recipe(tiny=dataclasses.replace(TINY, noise=0.2)), store)
    return whole(store), engine(directory), directory


FILTERS: dict[str, Any] = {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.01}
PENALTIES: dict[str, Any] = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.3}
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=12),
    SamplingParams(seed=1, max_tokens=12),
    SamplingParams(seed=2, max_tokens=12, **FILTERS),
    SamplingParams(seed=3, max_tokens=12, **PENALTIES),
    SamplingParams(seed=4, max_tokens=12, logit_bias={250: 6.0, 251: 6.0, 5: -9.0}, bad_words=((7,), (8, 9))),
    # Nothing that the draft keeps has a chance; then, one by one, nothing that it keeps may follow at all.
    SamplingParams(seed=5, max_tokens=12, logit_bias=dict.fromkeys(range(150, 250), 50.0)),
    SamplingParams(seed=6, max_tokens=12, bad_words=tuple((token,) for token in range(150))),
]
PROMPT = [5, 280, 17]


@pytest.mark.parametrize("confidence", [0.0, 0.02])
def test_coupled_texts_are_plain_decoding_s(pair: Any, confidence: float) -> None:
    target, draft, directory = pair
    kept = set(listed(directory))
    manifest = Manifest.load(directory)
    grammars = [Grammars(directory / TOKENIZER, manifest.vocab_size, manifest.eos_token_ids) for _ in range(2)]
    both = Pair(target, draft, min_confidence=confidence, grammars=grammars[0], draft_grammars=grammars[1])
    params = [*PARAMS, SamplingParams(seed=7, max_tokens=12, regex="(zebra|quiz|[0-9]{2}){3,20}")]
    plain = both.finish([both.sequence(PROMPT, p, "ar") for p in params])
    sequences = [both.sequence(PROMPT, p) for p in params]
    assert both.finish(sequences) == plain
    assert {token for text in plain for token in text} - kept  # what the draft cannot propose
    assert {record.hit for sequence in sequences for record in sequence.rounds} >= {True, False}
    assert sum(record.tokens - 1 for sequence in sequences for record in sequence.rounds) > 10  # accepted


@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_under_ratio_q_is_zero_for_what_is_left_out(pair: Any, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft, directory = pair
    kept = set(listed(directory))
    drafted: list[Any] = []
    draft_of = ModelDrafter.draft
    monkeypatch.setattr(ModelDrafter, "draft", lambda *given: drafted.append(draft_of(*given)) or drafted[-1])
    both = Pair(target, draft, "ratio", cache_aware=scale)
    assert [len(text) for text in both.finish([both.sequence(PROMPT, p) for p in PARAMS[:-1]])] == [12] * 6
    speculations = [speculation for made in drafted for row in made for speculation in row]
    assert {bool(speculation.draft_probs) for speculation in speculations} == {True, False}
    for speculation in speculations:
        assert set(speculation.tokens) <= kept
        for token, probs in zip(speculation.tokens, speculation.draft_probs or ()):
            assert token in probs.ids
            assert set(probs.ids) <= kept
            assert abs(sum(probs.probs) - 1) < 1e-9


# The bench ------------------------------------------------------------------------------------------------------------


def ran(target: PytorchEngine, draft: PytorchEngine, texts: list[Text], setting: SpeculationConfig) -> Figures:
    """Of the running roles, which have to say those answers: their rounds that could have K+1 tokens."""
    both = Pair(target, draft, lookahead=setting.max_lookahead, budget=setting.budgets()[-1], width=setting.width)
    sequences = [
        both.sequence(
            text.prompt,
            SamplingParams(temperature=text.request.params.temperature, seed=seed, max_tokens=len(text.answer)),
        )
        for seed, text in enumerate(texts)
    ]
    assert both.finish(sequences) == [list(text.answer) for text in texts]
    rounds: list[list[Played]] = []
    for sequence, text in zip(sequences, texts, strict=True):
        at = 1  # after the prefill, which verifies nothing
        rounds.append([])
        for r in sequence.rounds[1:]:
            if len(text.answer) - at <= setting.max_lookahead:
                break
            rounds[-1].append(Played(bool(r.hit), r.drafted, r.accepted, None))
            at += r.accepted + 1
    return Figures.of(rounds)


def test_the_bench_finds_the_rounds_of_a_running_draft(pair: Any, tmp_path: Path) -> None:
    """Of a list of all tokens those of the whole head, of a shorter one those of a draft that is built with it."""
    directory = build(recipe(draft_vocab=None, tiny=dataclasses.replace(TINY, noise=0.2)), pair[2].parents[1])
    lists = bench.lists_of(directory, [100], ())
    folders = [directory, bench.reduced(directory, lists["100"], tmp_path / "100")]
    target, draft, reduced = (
        PytorchEngine.load(each, block_size=bench._BLOCK, num_blocks=40)
        for each in (build(recipe(draft_vocab=None), pair[2].parents[1]), *folders)
    )
    setting = SpeculationConfig(lookahead=3, width=16, fan_out=FanOutConfig(budget=6, policy="uniform"))
    prompts, ends = [[5, 280, 17], [100], [9, 9, 9, 200]], {299}
    found = bench.rounds(target, draft, prompts, ends, 30, lists | {"every": list(range(300))}, setting)
    assert found["covered"]["every"] == 1 > found["covered"]["100"] > 0
    for temperature in bench.TEMPERATURES:
        rows = found["rounds"][f"{temperature:g}"]
        assert rows["every"] == rows[bench.WHOLE]
        assert rows["every"]["of_all"] == [1, 1, 1]
        assert rows["100"]["acceptance"] < rows[bench.WHOLE]["acceptance"]
        figures = ran(target, reduced, bench.answers_of(target, prompts, temperature, ends, 30), setting)
        for what in ("acceptance", "hit_rate", "tokens_per_round"):
            assert 0 < rows["100"][what] == getattr(figures, what), (temperature, what)
