"""The target on TensorRT-LLM's Executor, against the strict fake of its API and behaviour.

Every trap of the contract has a test that fails if we step into it:

| trap | test |
|---|---|
| misspelt, misplaced or mistyped parameter; None where refused | test_the_fake_is_as_strict_as_nanobind |
| names that are gone or never were | test_what_the_tables_do_not_have_does_not_exist |
| tokens without logits are not exact when sampling | test_tokens_alone_are_not_exact, test_sampling_is_exact |
| acceptance_threshold is not exact | test_a_threshold_is_not_exact |
| empty draft list trips an assertion | test_a_round_without_draft_is_an_ordinary_request |
| neither top_k nor top_p means greedy | test_every_filter_is_named |
| top_p without a draft is another distribution | test_top_p_is_exact_without_a_draft |
| q that was not sampled from | test_sampling_is_exact, test_q_that_loses_precision_would_not_be_exact |
| logits in half precision | test_engines_that_cannot_be_run_are_refused |
| one seed for all rounds repeats draws | test_every_round_has_a_seed_of_its_own |
| end_id is taken out of the output | test_ends_are_ours |
| output includes the prompt | test_greedy_tokens_equal_the_engines |
| chunked context drops drafts | test_chunked_context_stays_off |
| output longer than the outcome | test_tokens_beyond_the_outcome_are_not_used |
| block reuse off: the target does not start | test_reuse_off_salts_each_request |
| awaiting without a time-out hangs | test_a_silent_executor_is_diagnosed |
| a late response is taken for another's | test_late_and_stray_responses |
| result and error_msg raise in the other state | test_an_error_ends_one_request_alone |
| embedding_bias of another length; vocabulary of the tokenizer | test_the_vocabulary_is_the_engines |
| tokens out of range after reuse | test_every_token_is_checked |
| statistics drain, and the oldest are dropped | test_statistics_reach_the_metrics |
| generation logits need engine and config | test_log_probabilities |
| unsupported release | test_engines_that_cannot_be_run_are_refused |
| pickling drops fields | test_nothing_of_the_executor_is_pickled |
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import trtllm_fake as fake

trtllm = fake.install()

from byte_tokenizer import byte_level  # noqa: E402
from harness import Pair  # noqa: E402
from oracles import Table, assert_same_law, completed, drawn, nothing, pointed, target_law  # noqa: E402
from saguaro.build.driver import plan  # noqa: E402
from saguaro.build.recipe import find_recipe  # noqa: E402
from saguaro.build.trtllm import expected_config  # noqa: E402
from saguaro.engines.manifest import Manifest  # noqa: E402
from saguaro.engines.pytorch import PytorchEngine  # noqa: E402
from saguaro.engines.scripted import ScriptedEngine, markov_table  # noqa: E402
from saguaro.engines.trtllm import NEVER, Ask, ExecutorSession, Options, work  # noqa: E402
from saguaro.engines.trtllm_config import read_trtllm_config  # noqa: E402
from saguaro.errors import ConfigError, EngineError  # noqa: E402
from saguaro.orchestrator.config import (  # noqa: E402
    DeploymentConfig,
    DraftConfig,
    FanOutConfig,
    ModelConfig,
    ServingConfig,
    SpeculationConfig,
    find_deployment,
    read_deployment,
)
from saguaro.orchestrator.drafters import stock  # noqa: E402
from saguaro.orchestrator.drafters.stock import ExecutorDrafter  # noqa: E402
from saguaro.orchestrator.executor_target import ExecutorTarget, check_deployment  # noqa: E402
from saguaro.orchestrator.grammar import Grammars  # noqa: E402
from saguaro.orchestrator.kv_blocks import BlockPool, BlockTable  # noqa: E402
from saguaro.orchestrator.scheduler import Scheduler  # noqa: E402
from saguaro.orchestrator.sequence import Sequence  # noqa: E402
from saguaro.orchestrator.types import (  # noqa: E402
    Backup,
    Outcome,
    RequestSampling,
    SamplingParams,
    SparseProbs,
    Speculation,
)
from scripts import load_script  # noqa: E402
from tiny_models import tiny_model  # noqa: E402

ROOT = Path(__file__).parents[1]
GREEDY = SamplingParams(temperature=0, max_tokens=40)
SAMPLED = SamplingParams(temperature=1, max_tokens=40, seed=5)
OPTIONS = Options(kv_tokens=1600, timeout_s=0.05)


@pytest.fixture(autouse=True)
def machine() -> Iterator[fake.Machine]:
    yield fake.reset()
    fake.reset()


def fractions(*rows: tuple[int, ...]) -> Table:
    return tuple(tuple(Fraction(weight, sum(row)) for weight in row) for row in rows)


# Next-token tables over four tokens. Probabilities of every row differ, so that no filter meets a tie.
TARGET = fractions((4, 3, 2, 1), (1, 5, 2, 4), (3, 1, 6, 2), (1, 2, 3, 6))
DRAFT = fractions((1, 2, 3, 4), (6, 1, 2, 3), (1, 6, 2, 3), (6, 3, 2, 1))


def session_of(
    path: Path, model: Any, vocab_size: int, padding: int = 0, options: Options = OPTIONS, **build: Any
) -> ExecutorSession:
    fake.machine.models[str(path)] = model
    fake.write_engine(path, vocab_size + padding, **build)
    return ExecutorSession(path, vocab_size=vocab_size, options=options, target=build.get("target", True))


def table_target(path: Path, table: Table = TARGET, padding: int = 0, **build: Any) -> ExecutorTarget:
    return ExecutorTarget(session_of(path, fake.TableModel(table, padding), len(table), padding, **build))


def sequence_of(
    target: ExecutorTarget, tokens: list[int], params: SamplingParams = GREEDY, stop_ids: tuple[int, ...] = ()
) -> Sequence:
    pool = BlockPool(100, 4)
    return Sequence(
        id=0,
        request=RequestSampling(params, params.seed or 0, len(tokens), stop_ids + params.stop_token_ids),
        tokens=list(tokens),
        mode="ssd",
        lookahead=4,
        target_table=BlockTable(pool),
        draft_table=BlockTable(pool),
    )


def pair_of(target: ExecutorTarget, draft: Table = DRAFT, **options: Any) -> Pair:
    return Pair(target, ScriptedEngine(markov_table(draft), len(draft), 128, 4, 200), rule="ratio", **options)


def requests() -> list[Any]:
    """What the executor was asked since it had warmed up."""
    return list(fake.machine.executors[-1].requests[2:])


# The fake ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: trtllm.SamplingConfig(1, 5),  # top_k is keyword-only
        lambda: trtllm.SamplingConfig(random_seed=1),
        lambda: trtllm.SamplingConfig(top_k=1.0),
        lambda: trtllm.SamplingConfig(beam_width=None),
        lambda: trtllm.Request([1], 1, streaming=None),
        lambda: trtllm.Request([1], 1, False),
        lambda: trtllm.Request([1], 1, request_type=trtllm.RequestType.REQUEST_TYPE_CONTEXT_ONLY),
        lambda: trtllm.Request([1], 1, bad_words=[1]),
        lambda: trtllm.Request((1,), 1),
        lambda: trtllm.KvCacheConfig(True, None, None, None, None, None, True, None, None, 0, True),
        lambda: trtllm.KvCacheConfig(enable_block_reuse=None),
        lambda: trtllm.ExecutorConfig(max_queue_size="8"),
        lambda: trtllm.ExtendedRuntimePerfKnobConfig(cuda_graph_mode=True),
        lambda: trtllm.ExternalDraftTokensConfig(),
        lambda: trtllm.Executor("engine", "DECODER_ONLY", trtllm.ExecutorConfig()),
    ],
)
def test_the_fake_is_as_strict_as_nanobind(wrong: Callable[[], Any]) -> None:
    with pytest.raises(TypeError):
        wrong()


@pytest.mark.parametrize("name", ["GenerationRequest", "DecodingMode.ExternalDraftTokens", "Executor.is_participant"])
def test_what_the_tables_do_not_have_does_not_exist(name: str) -> None:
    owner, _, member = name.rpartition(".")
    assert not hasattr(getattr(trtllm, owner) if owner else trtllm, member)


def test_defaults_are_the_tables() -> None:
    """Those that would bite: chunked context, prompt in the output, logits, drafts."""
    assert trtllm.ExecutorConfig().enable_chunked_context is False
    assert trtllm.OutputConfig().exclude_input_from_output is None
    assert trtllm.KvCacheConfig().enable_block_reuse is True
    assert trtllm.Request([1], 1).request_type is trtllm.RequestType.REQUEST_TYPE_CONTEXT_AND_GENERATION
    with pytest.raises(AttributeError):
        trtllm.SamplingConfig().random_seed = 1
    with pytest.raises(RuntimeError, match="mTokens.empty"):
        trtllm.ExternalDraftTokensConfig([])


# Exactness --------------------------------------------------------------------------------------------------------


def executed(target: ExecutorTarget, params: SamplingParams, speculation: Speculation) -> tuple[int, ...]:
    """What one round emits after token 0."""
    (outcome,) = target.verify([sequence_of(target, [0], params)], [speculation])
    assert isinstance(outcome, Outcome)
    return (*speculation.tokens[: outcome.accepted], outcome.bonus)


def round_law(target: ExecutorTarget, params: SamplingParams, drafter: Any) -> dict[tuple[int, ...], Fraction]:
    fake.machine.exact = True
    found: dict[tuple[int, ...], Fraction] = {}
    for weight, speculation in drafter(0):
        for tokens, mass in fake.law(lambda s=speculation: executed(target, params, s)).items():  # type: ignore[misc]
            found[tokens] = found.get(tokens, Fraction(0)) + weight * mass
    return found


def kept(table: Table, keep: Callable[[list[Fraction]], int]) -> Table:
    """The table with the best `keep(row, best first)` tokens of each row only."""
    rows = []
    for row in table:
        ranked = sorted(row, reverse=True)
        least = ranked[keep(ranked) - 1]
        total = sum(p for p in row if p >= least)
        rows.append(tuple(p / total if p >= least else Fraction(0) for p in row))
    return tuple(rows)


def nucleus(top_p: Fraction) -> Callable[[list[Fraction]], int]:
    return lambda ranked: next(n for n in range(1, len(ranked) + 1) if sum(ranked[:n]) >= top_p)


FILTERS = [
    pytest.param(SAMPLED, TARGET, id="all"),
    pytest.param(SamplingParams(top_k=2), kept(TARGET, lambda ranked: 2), id="top_k"),
    pytest.param(SamplingParams(top_p=0.65), kept(TARGET, nucleus(Fraction(65, 100))), id="top_p"),
]
DRAFTERS = [
    pytest.param(drawn(DRAFT, 2), id="drawn"),
    pytest.param(drawn(kept(DRAFT, lambda ranked: 2), 2), id="drawn from the best two"),
    pytest.param(pointed(DRAFT, 2), id="point masses"),
    pytest.param(nothing, id="nothing"),
]


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize(("params", "expected"), FILTERS)
def test_sampling_is_exact(tmp_path: Path, params: SamplingParams, expected: Table, drafter: Any) -> None:
    """Over every choice of the executor, with every draft: the target's own distribution, as fractions."""
    target = table_target(tmp_path)
    found = round_law(target, params, drafter)
    length = max(map(len, found))
    assert_same_law(completed(found, expected, 0, length), target_law(expected, 0, length), "one round")


def raw_law(path: Path, *, drafter: Any, **options: Any) -> dict[tuple[int, ...], Fraction]:
    """One round by the executor itself, asked as one should not."""
    session = session_of(path, fake.TableModel(TARGET), 4)
    fake.machine.exact = True
    found: dict[tuple[int, ...], Fraction] = {}
    for weight, speculation in drafter(0):
        for tokens, mass in fake.law(lambda s=speculation: ask_raw(session, s, **options)).items():  # type: ignore[misc]
            found[tokens] = found.get(tokens, Fraction(0)) + weight * mass
    return completed(found, TARGET, 0, 3)


def ask_raw(session: ExecutorSession, speculation: Speculation, **options: Any) -> tuple[int, ...]:
    (reply,) = session.run([Ask([0], 3, temperature=1.0, draft=speculation.tokens, **options)])
    assert not isinstance(reply, EngineError)
    return reply.tokens


def test_tokens_alone_are_not_exact(tmp_path: Path) -> None:
    """p(2-p) instead of p for the draft's token: the first token is wrong already."""
    found = raw_law(tmp_path, drafter=pointed(DRAFT, 2))
    assert found != target_law(TARGET, 0, 3)
    first = sum(mass for tokens, mass in found.items() if tokens[0] == 3)
    p = TARGET[0][3]
    assert first == p * (2 - p)


def test_a_threshold_is_not_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = trtllm.ExternalDraftTokensConfig
    monkeypatch.setattr(
        trtllm, "ExternalDraftTokensConfig", lambda *args, **options: plain(*args, acceptance_threshold=0.5, **options)
    )
    target = table_target(tmp_path)
    found = round_law(target, SAMPLED, drawn(DRAFT, 2))
    assert completed(found, TARGET, 0, 3) != target_law(TARGET, 0, 3)


def test_top_p_is_exact_without_a_draft(tmp_path: Path) -> None:
    """The executor's own nucleus keeps only a part of its last token; a pretended draft makes it whole."""
    target = table_target(tmp_path)
    session = target._session
    fake.machine.exact = True
    raw = fake.law(lambda: ask_one(session, top_p=0.65))
    expected = kept(TARGET, nucleus(Fraction(65, 100)))
    assert raw == {(0,): Fraction(40, 65), (1,): Fraction(25, 65)}
    assert round_law(target, SamplingParams(top_p=0.65), nothing) == {(0,): expected[0][0], (1,): expected[0][1]}
    assert "saguaro_executor_pretended_drafts" in {family.name for family in target.metrics()}


def ask_one(session: ExecutorSession, **options: Any) -> tuple[int, ...]:
    (reply,) = session.run([Ask([0], 1, temperature=1.0, **options)])
    assert not isinstance(reply, EngineError)
    return reply.tokens


def test_every_filter_is_named(tmp_path: Path) -> None:
    target = table_target(tmp_path)
    for params in (GREEDY, SAMPLED, SamplingParams(temperature=0.5, top_k=3, top_p=0.5)):
        executed(target, params, Speculation())
    greedy, sampled, filtered = (request.sampling_config for request in requests())
    assert (greedy.top_k, greedy.temperature) == (1, None)
    assert (sampled.top_k, sampled.top_p, sampled.temperature) == (0, 1.0, 1.0)
    assert (filtered.top_k, filtered.top_p, filtered.temperature) == (3, 0.5, 0.5)


def test_every_round_has_a_seed_of_its_own(tmp_path: Path) -> None:
    """With one seed, a flat distribution would draw the same token in every round."""
    flat = fractions((1,) * 4, (1,) * 4, (1,) * 4, (1,) * 4)
    target = table_target(tmp_path, flat)
    pair_of(target).run([0], SAMPLED, "ar")
    seeds = [request.sampling_config.seed for request in requests()]
    assert len(set(seeds)) == len(seeds) == 40
    again = table_target(tmp_path / "again", flat)
    pair_of(again).run([0], SAMPLED, "ar")
    assert [request.sampling_config.seed for request in requests()] == seeds


# The whole loop ---------------------------------------------------------------------------------------------------


def llama(noise: float = 0.0) -> Any:
    model = tiny_model("llama")
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data += noise * parameter.data.std() * torch.randn(parameter.shape, generator=generator)
    return model


def engine_of(model: Any) -> PytorchEngine:
    return PytorchEngine(model, vocab_size=500, max_model_len=128, block_size=4, num_blocks=120)


@pytest.fixture(scope="module")
def llama_engines() -> tuple[PytorchEngine, PytorchEngine, PytorchEngine]:
    """The target twice, for the executor and for the oracle, and a draft that is often right."""
    return engine_of(llama()), engine_of(llama()), engine_of(llama(0.1))


def serve(pair: Pair, prompts: list[list[int]], params: SamplingParams, **limits: int) -> list[list[int]]:
    """Scheduler, verifier and speculator as the service drives them."""
    options = {"max_sequences": 4, "max_model_len": 128, "max_batch_tokens": 16, "max_queue": 9} | limits
    scheduler = Scheduler(pair.target_pool, **options)  # type: ignore[arg-type]
    sequences = [pair.sequence(prompt, params) for prompt in prompts]
    for sequence in sequences:
        scheduler.add(sequence)
    while batch := scheduler.schedule():
        pair.verifier.step(batch)
        for sequence in [sequence for sequence in batch if sequence.finish_reason]:
            assert sequence.error is None
            scheduler.remove(sequence)
    assert pair.target_pool.free_blocks == pair.target_pool.num_blocks
    return [sequence.tokens[sequence.request.prompt_length :] for sequence in sequences]


def test_greedy_tokens_equal_the_engines(tmp_path: Path, llama_engines: tuple[PytorchEngine, ...]) -> None:
    """Chunked prompts, joining, an end inside a block; padding rows that would always win are never emitted."""
    model, oracle, draft = llama_engines
    prompts = [[7 * i % 500 for i in range(n)] for n in (40, 3, 17, 1)]
    params = SamplingParams(temperature=0, max_tokens=18, repetition_penalty=1.2, logit_bias={3: 2.0, 5: -1.0})
    plain = [Pair(oracle, draft).run(prompt, params, "ar") for prompt in prompts]
    stop = plain[0][10]
    expected = [tokens[: tokens.index(stop) + 1] if stop in tokens else tokens for tokens in plain]
    target = ExecutorTarget(session_of(tmp_path, fake.EngineModel(model, 12), 500, 12))
    pair = Pair(target, draft, rule="ratio", stop_ids=(stop,))
    assert serve(pair, prompts, params) == expected
    assert max(len(r.external_draft_tokens_config.tokens) for r in requests() if r.external_draft_tokens_config) == 3
    accepted = sum(len(tokens) for tokens in expected) / sum(len(r.input_token_ids) > 0 for r in requests())
    assert accepted > 1, "speculation did not shorten anything"


@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
def test_both_compiled_engines_emit_what_the_pytorch_engine_does(
    tmp_path: Path, llama_engines: tuple[PytorchEngine, ...]
) -> None:
    """The target on the Executor, the draft's TensorRT network evaluated on the CPU; greedy, both speculating."""
    pytest.importorskip("triton", reason="the kernel language comes with the extra `kernels`")
    from tensorrt_runtime import engine_of as tensorrt_engine

    _, oracle, draft = llama_engines
    params = SamplingParams(temperature=0, max_tokens=10)
    target = ExecutorTarget(session_of(tmp_path, fake.EngineModel(oracle, 12), 500, 12))
    pair = Pair(target, tensorrt_engine(llama(0.1)), rule="ratio", lookahead=2, budget=3)
    sequence = pair.sequence([7, 14, 21], params)
    (found,) = pair.finish([sequence])
    assert found == Pair(engine_of(llama()), draft).run([7, 14, 21], params, "ar")
    assert any(record.accepted for record in sequence.rounds)
    assert any(record.hit for record in sequence.rounds)


def test_the_last_place_of_the_context(tmp_path: Path) -> None:
    """A prompt of max_model_len - 1, max_tokens 1, and a text that reaches the end in full rounds."""
    target = table_target(tmp_path)
    assert target.max_model_len == 128
    for length, params in ((127, GREEDY), (5, SamplingParams(temperature=0, max_tokens=1)), (100, GREEDY)):
        prompt = [0] * length
        answer = pair_of(target).run(prompt, params)
        assert len(answer) == min(params.max_tokens, 128 - length)
        assert set(answer) == {0}


def test_ends_are_ours(tmp_path: Path) -> None:
    """The executor is told of no end: with one, the end token would be missing from its output."""
    target = table_target(tmp_path, fractions((1, 9, 0, 0), (0, 1, 9, 0), (0, 0, 1, 9), (9, 0, 0, 1)))
    pair = pair_of(target, fractions((1, 9, 0, 0), (0, 1, 9, 0), (0, 0, 1, 9), (9, 0, 0, 1)), stop_ids=(2,))
    assert pair.run([3], GREEDY) == [0, 1, 2]
    assert all(request.end_id is None and request.stop_words is None for request in requests())
    session = target._session
    (ended,) = (
        session._executor.enqueue_requests(
            [
                trtllm.Request(
                    [0],
                    3,
                    end_id=2,
                    output_config=trtllm.OutputConfig(exclude_input_from_output=True),
                    sampling_config=trtllm.SamplingConfig(top_k=1),
                )
            ]
        ),
    )
    (response,) = session._executor.await_responses(timeout=timedelta(seconds=1))
    assert response.result.output_token_ids == [[1]]
    assert ended == [response.request_id]


@pytest.mark.parametrize("stops", [True, False])
def test_tokens_beyond_the_outcome_are_not_used(tmp_path: Path, stops: bool) -> None:
    """Whether a request ends with its verification or decodes on: one outcome, the same text."""
    fake.machine.stops_after_verification = stops
    target = table_target(tmp_path, fractions((1, 9, 0, 0), (0, 1, 9, 0), (0, 0, 1, 9), (9, 0, 0, 1)))
    sequence = sequence_of(target, [0])
    outcomes = target.verify([sequence], [Speculation((1, 3, 0))])
    assert outcomes == [Outcome(1, 2)]
    assert target._longer == (0 if stops else 2)


def test_a_round_without_draft_is_an_ordinary_request(tmp_path: Path) -> None:
    target = table_target(tmp_path)
    assert target.verify([sequence_of(target, [0])], [Speculation()]) == [Outcome(0, 0)]
    (request,) = requests()
    assert request.external_draft_tokens_config is None
    assert request.max_tokens == 1


def test_a_chunk_only_fills_the_cache(tmp_path: Path) -> None:
    target = table_target(tmp_path)
    sequence = sequence_of(target, [0, 1, 2, 3] * 5)
    sequence.chunk_end = 12
    assert target.verify([sequence], [Speculation()]) == [None]
    sequence.chunk_end = None
    (outcome,) = target.verify([sequence], [Speculation((3,))])
    assert outcome == Outcome(1, 3)
    assert [len(request.input_token_ids) for request in requests()] == [12, 20]
    assert fake.machine.executors[-1].computed[-2:] == [12, 8]


def test_kv_is_found_again_between_rounds(tmp_path: Path) -> None:
    """Every round computes its last token alone, and the blocks of live sequences outlive others."""
    target = table_target(tmp_path)
    pair_of(target).run([0, 1, 2] * 9, GREEDY)
    first, *rounds = fake.machine.executors[-1].computed[2:]
    assert first == 27
    assert set(rounds) == {1}
    counts = target._session.counts
    assert counts.reused_blocks > 20 * counts.missed_blocks / 40
    retention = requests()[-1].kv_cache_retention_config
    assert retention.decode_retention_priority > 35
    assert retention.token_range_retention_configs[0].token_end is None


def test_reuse_off_salts_each_request(tmp_path: Path) -> None:
    """Block reuse itself has to stay on, or the executor does not start."""
    target = ExecutorTarget(session_of(tmp_path, fake.TableModel(TARGET), 4, options=Options(1600, reuse=False)))
    assert pair_of(target).run([0] * 9, GREEDY) == [0] * 40
    assert len({request.cache_salt_id for request in requests()}) == len(requests())
    assert min(fake.machine.executors[-1].computed[2:]) == 9
    config = trtllm.ExecutorConfig(kv_cache_config=trtllm.KvCacheConfig(enable_block_reuse=False))
    with pytest.raises(RuntimeError, match="block reuse"):
        trtllm.Executor(tmp_path, trtllm.ModelType.DECODER_ONLY, config)


@pytest.mark.parametrize("name", ["llama-3.1-70b-h100", "qwen3-32b-h100", "llama-3.1-8b-h100"])
def test_shipped_deployments_fit_the_engines_that_are_planned(tmp_path: Path, name: str) -> None:
    config = read_deployment(find_deployment(name))
    recipe = find_recipe(config.target.recipe)
    assert config.draft
    draft = find_recipe(config.draft.recipe)
    assert (recipe.engine, draft.engine) == ("trtllm", "tensorrt")
    assert config.target.block_size == 32
    engine = expected_config(plan(recipe, tmp_path), "LlamaForCausalLM")
    check_deployment(config, engine)
    assert engine.max_model_len == recipe.max_model_len
    assert config.target.kv_tokens >= config.serving.max_sequences * engine.max_model_len


# The draft ------------------------------------------------------------------------------------------------------------


def stock_draft(path: Path, model: Any, vocab_size: int, padding: int = 0) -> ExecutorDrafter:
    session = session_of(path, model, vocab_size, padding, target=False)
    return ExecutorDrafter(session, 400, 4)


@pytest.mark.parametrize("backup", ["primary", "ngram"])
def test_a_stock_draft_speculates(tmp_path: Path, llama_engines: tuple[PytorchEngine, ...], backup: Backup) -> None:
    """Both models on Executors. Its drafts and guesses are those of the fan-out engine, greedy as it is."""
    _, oracle, draft = llama_engines
    prompts = [[7 * i % 500 for i in range(n)] for n in (19, 3)]
    params = SamplingParams(temperature=0, max_tokens=10)
    fan_out = Pair(oracle, draft, backup=backup, lookahead=2, budget=4)
    sequences = [fan_out.sequence(prompt, params) for prompt in prompts]
    expected = fan_out.finish(sequences)
    target = ExecutorTarget(session_of(tmp_path / "target", fake.EngineModel(oracle, 12), 500, 12))
    stock = Pair(
        target,
        draft,
        rule="ratio",
        lookahead=2,
        budget=4,
        backup=backup,
        primary=stock_draft(tmp_path / "draft", fake.EngineModel(draft, 12), 500, 12),
    )
    found = [stock.sequence(prompt, params) for prompt in prompts]
    assert stock.finish(found) == expected
    assert [s.rounds for s in found] == [s.rounds for s in sequences], "another draft, or another guess"
    assert any(record.hit for sequence in found for record in sequence.rounds)


def test_a_stock_draft_at_a_temperature_proposes_point_masses(tmp_path: Path) -> None:
    target = table_target(tmp_path / "target")
    pair = pair_of(target, primary=stock_draft(tmp_path / "draft", fake.TableModel(DRAFT), 4))
    assert len(pair.run([0, 1], SAMPLED)) == 40
    sent = [
        r.external_draft_tokens_config for r in fake.machine.executors[0].requests if r.external_draft_tokens_config
    ]
    assert {tuple(sorted(row)) for config in sent for row in config.logits.softmax(-1).tolist()} == {(0, 0, 0, 1)}


def test_a_stock_draft_without_logits_is_refused(tmp_path: Path) -> None:
    session = session_of(tmp_path, fake.TableModel(DRAFT), 4, target=False, gather_generation_logits=False)
    with pytest.raises(ConfigError, match="needs gather_generation_logits"):
        ExecutorDrafter(session, 100, 4)


# Parameters -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "name"),
    [
        (SamplingParams(min_p=0.1), "min_p is 0.1"),
        (SamplingParams(top_k=1025), "top_k is 1025"),
        (SamplingParams(repetition_penalty=1.1, presence_penalty=0.5), "repetition_penalty is 1.1"),
        (SamplingParams(logprobs=0), "logprobs is 0"),
    ],
)
def test_what_cannot_be_exact_is_refused_by_name(tmp_path: Path, params: SamplingParams, name: str) -> None:
    target = table_target(tmp_path, gather_generation_logits=False)
    with pytest.raises(ConfigError, match=name):
        target.admit(params, "ssd")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"speculation": SpeculationConfig()}, r"Set speculation.rule: ratio; at temperature 0 both are greedy"),
        ({"speculation": SpeculationConfig(rule="ratio", deterministic=True)}, "deterministic is set"),
        ({"speculation": SpeculationConfig(rule="ratio", lookahead=9)}, "lookahead is 9 and .* takes 8 draft tokens"),
        ({"serving": ServingConfig(max_sequences=9)}, "max_sequences is 9 and .* takes 8 requests"),
        ({"target": ModelConfig("t")}, "target.block_size is 16 and the engine's blocks hold 4 tokens"),
    ],
)
def test_deployments_that_do_not_fit_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    engine = read_trtllm_config(fake.write_engine(tmp_path, 8))
    fitting = DeploymentConfig(
        "test", ModelConfig("t", block_size=4), ModelConfig("d"), SpeculationConfig(rule="ratio")
    )
    check_deployment(fitting, engine)
    with pytest.raises(ConfigError, match=message):
        check_deployment(replace(fitting, **change), engine)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, max_tokens=30, presence_penalty=0.7, frequency_penalty=0.3),
        SamplingParams(temperature=0, max_tokens=30, frequency_penalty=-1.1, logit_bias={2: 3.0}),
        SamplingParams(temperature=0, max_tokens=30, repetition_penalty=1.5),
        SamplingParams(temperature=0, max_tokens=30, bad_words=((1,), (0, 0), (3, 2)), min_p=0.5, top_k=2000),
        SamplingParams(temperature=0, max_tokens=30, min_tokens=20, stop_token_ids=(1, 3)),
        SamplingParams(temperature=0, max_tokens=30, min_tokens=20, stop_token_ids=(0,), repetition_penalty=1.5),
    ],
)
def test_parameters_mean_what_they_mean_to_an_engine(tmp_path: Path, params: SamplingParams) -> None:
    """Greedy over a table: each parameter changes the text, and as our own chain does."""
    oracle = ScriptedEngine(markov_table(TARGET), 4, 128, 4, 200)
    draft = ScriptedEngine(markov_table(DRAFT), 4, 128, 4, 200)
    target = table_target(tmp_path)
    pair = Pair(target, draft, rule="ratio")
    plain = Pair(oracle, draft).run([0, 2, 1], params, "ar")
    assert plain != Pair(oracle, draft).run([0, 2, 1], SamplingParams(temperature=0, max_tokens=30), "ar")
    assert pair.run([0, 2, 1], params, target.admit(params, "ssd")) == plain


def test_a_grammar_masks_every_token(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(byte_level().to_str())
    size = byte_level().get_vocab_size()
    table = tuple((Fraction(1, size),) * size for _ in range(size))
    grammars = Grammars(tmp_path / "tokenizer.json", size, (0,))
    params = SamplingParams(temperature=0, max_tokens=30, regex="(ab|ba){3}!")
    oracle = ScriptedEngine(markov_table(table), size, 128, 4, 200)
    expected = Pair(oracle, oracle, grammars=grammars).run([65], params, "ar")
    target = table_target(tmp_path / "engine", table, size % 2)  # rows for two ranks
    mode = target.admit(params, "ssd")
    assert mode == "ar"
    assert Pair(target, oracle, rule="ratio", grammars=grammars).run([65], params, mode) == expected
    assert len(expected) == 7


def test_where_nothing_may_follow_the_request_ends(tmp_path: Path) -> None:
    target = table_target(tmp_path)
    params = SamplingParams(temperature=0, bad_words=((0,), (1,), (2,), (3,)))
    (outcome,) = target.verify([sequence_of(target, [0], params)], [Speculation()])
    assert isinstance(outcome, ConfigError)
    assert "no token may follow at position 1" in str(outcome)


def test_log_probabilities(tmp_path: Path) -> None:
    """Of the model's raw logits, for every emitted token, drafted ones included."""
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=2, repetition_penalty=2.0)
    found = []
    for target in (table_target(tmp_path), ScriptedEngine(markov_table(TARGET), 4, 128, 4, 200)):
        pair = Pair(target, ScriptedEngine(markov_table(TARGET), 4, 128, 4, 200), rule="ratio")
        sequence = pair.sequence([1], params)
        pair.finish([sequence])
        found.append([(lp.token, round(lp.logprob, 5), lp.top[0][0]) for lp in sequence.logprobs])
    assert found[0] == found[1]
    assert len(found[0]) == 12
    without = session_of(tmp_path / "without", fake.TableModel(TARGET), 4, gather_generation_logits=False)
    (refused,) = without.run([Ask([0], 1, logits=True)])
    assert isinstance(refused, EngineError)


# What goes wrong --------------------------------------------------------------------------------------------------


def test_late_and_stray_responses(tmp_path: Path) -> None:
    """A response that comes after its request was given up is nobody else's."""
    target = table_target(tmp_path)
    fake.machine.late = 3
    assert target.verify([sequence_of(target, [0])] * 2, [Speculation((0, 0))] * 2) == [Outcome(2, 0)] * 2
    session = target._session
    fake.machine.late = 0
    session._executor.enqueue_request(trtllm.Request([3, 3], 1))  # somebody's, long ago
    assert target.verify([sequence_of(target, [0])], [Speculation()]) == [Outcome(0, 0)]
    assert session.counts.strays == 1


def test_a_silent_executor_is_diagnosed(tmp_path: Path) -> None:
    """Nothing is awaited without a time-out; what is open is cancelled, and the error says how far it had come."""
    target = table_target(tmp_path)
    executor = fake.machine.executors[-1]
    fake.machine.silent = True
    with pytest.raises(
        EngineError, match=r"did not answer 2 requests within 0.05 s: its last iteration was number 2 .* of 400 KV"
    ):
        target.verify([sequence_of(target, [0])] * 2, [Speculation()] * 2)
    assert executor.cancelled == [3, 4]
    with pytest.raises(fake.HangError):
        executor.await_responses(1)
    with pytest.raises(fake.HangError):
        executor.await_responses()


def test_a_dead_executor_ends_the_target(tmp_path: Path) -> None:
    target = table_target(tmp_path)
    fake.machine.executors[-1].running = False
    with pytest.raises(EngineError, match=r"executor failed: .*cannot enqueue"):
        target.verify([sequence_of(target, [0])], [Speculation()])


def test_an_error_ends_one_request_alone(tmp_path: Path) -> None:
    target = table_target(tmp_path)
    fake.machine.errors[3] = "out of memory"
    one, two, three = target.verify([sequence_of(target, [0])] * 3, [Speculation()] * 3)
    assert (one, three) == (Outcome(0, 0), Outcome(0, 0))
    assert isinstance(two, EngineError)
    assert "out of memory" in str(two)


def test_the_error_of_one_request_reaches_its_sequence(tmp_path: Path) -> None:
    target = table_target(tmp_path)
    pair = pair_of(target)
    good, bad = pair.sequence([0], GREEDY), pair.sequence([1], GREEDY)
    fake.machine.errors[3] = "out of memory"
    pair.finish([good, bad])
    assert (good.finish_reason, bad.finish_reason) == ("length", "error")
    assert isinstance(bad.error, EngineError)


def test_every_token_is_checked(tmp_path: Path) -> None:
    """What block reuse once did to somebody: tokens out of range."""
    target = table_target(tmp_path)
    fake.machine.damaged_reuse = 4
    target.verify([sequence_of(target, [0] * 9)], [Speculation()])
    (outcome,) = target.verify([sequence_of(target, [0] * 9)], [Speculation()])
    assert isinstance(outcome, EngineError)
    assert "emitted token 4; the model's ids are 0 to 3. Try target.executor.reuse: false" in str(outcome)


def test_the_canary_notices_reuse_that_changes_tokens(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fake.machine.damaged_reuse = 1
    session = session_of(tmp_path, fake.TableModel(TARGET), 4)
    assert session.counts.canary_failures == 1
    assert "when its KV came from the cache" in caplog.text


def test_the_vocabulary_is_the_engines(tmp_path: Path) -> None:
    """Tensors are as wide as the model's rows, padded for its ranks; ids beyond the tokenizer's are never drawn."""
    target = table_target(
        tmp_path, padding=3, model_vocab_size=7, model_mapping={"world_size": 1, "tp_size": 1, "pp_size": 1}
    )
    params = SamplingParams(temperature=1, logit_bias={1: 1.0})
    fake.machine.exact = False
    for _ in range(20):
        executed(target, params, Speculation((1,)))
    request = requests()[-1]
    assert request.embedding_bias.shape == (7,)
    assert request.external_draft_tokens_config.logits.shape == (1, 7)
    session = session_of(tmp_path / "plain", fake.TableModel(TARGET), 4)
    (refused,) = session.run([Ask([0], 1, bias=torch.zeros(3))])
    assert isinstance(refused, EngineError)
    assert "embedding_bias has 3 elements; the vocabulary has 4" in str(refused)
    assert read_trtllm_config(fake.write_engine(tmp_path / "odd", 7)).padded_vocab_size == 8


def test_chunked_context_stays_off(tmp_path: Path) -> None:
    """With it the executor drops drafts that do not fit, and says nothing."""
    target = table_target(tmp_path)
    executor = fake.machine.executors[-1]
    assert executor.config.enable_chunked_context is False
    for chunked, forwards in ((False, 1), (True, 3)):
        executor.config.enable_chunked_context = chunked
        speculated = target.verify([sequence_of(target, [chunked] * 30)], [Speculation((chunked,) * 2)])
        assert speculated == [Outcome(2, chunked)]
        assert executor.forwards[-1] == forwards


def test_statistics_reach_the_metrics(tmp_path: Path) -> None:
    target = table_target(tmp_path)
    pair_of(target).run([0] * 5, GREEDY)
    session = target._session
    session._executor._iterations += 5  # were dropped before anybody read them
    target.verify([sequence_of(target, [0])], [Speculation()])
    values = {sample.name: sample.value for family in target.metrics() for sample in family.samples}
    assert values["saguaro_executor_missed_iterations_total"] == 5
    assert values["saguaro_executor_iterations_total"] == values["saguaro_executor_requests_total"] > 10
    assert values["saguaro_executor_reused_blocks_total"] > 0
    assert values["saguaro_executor_iteration_seconds"] == 0.001
    assert not session._executor.get_latest_iteration_stats()
    kinds = {f"{f.name}_total" if f.type == "counter" else f.name: f.type for f in target.metrics()}
    documented = re.findall(
        r"^\| `(saguaro_executor_\w+)` \| (\w+) \| \S", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE
    )
    assert dict(documented) == kinds


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": "1.3.0"}, "built with TensorRT-LLM 1.3.0"),
        ({"model_logits_dtype": "float16"}, "logits_dtype is 'float16', which would round"),
        ({"max_beam_width": 2}, "max_beam_width is not 1"),
        ({"plugin_config": {"use_paged_context_fmha": False}}, "use_paged_context_fmha is off"),
        ({"speculative_decoding_mode": 1, "max_draft_len": 0}, "speculative_decoding_mode is none; a target needs"),
        ({"max_batch_size": 500}, "has 400 KV blocks and needs one for each of 500 sequences"),
    ],
)
def test_engines_that_cannot_be_run_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        session_of(tmp_path, fake.TableModel(TARGET), 4, **change)


@pytest.mark.parametrize("spelling", [2, "draft_tokens_external", "SpeculativeDecodingMode.DRAFT_TOKENS_EXTERNAL"])
def test_the_mode_of_an_engine_in_each_spelling(tmp_path: Path, spelling: object) -> None:
    assert session_of(tmp_path, fake.TableModel(TARGET), 4, speculative_decoding_mode=spelling).num_blocks


def test_another_release_of_the_library_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tensorrt_llm

    monkeypatch.setattr(tensorrt_llm, "__version__", "1.3.0rc23")
    with pytest.raises(EngineError, match=r"version 1.3.0rc23, and this engine needs 1.2.1"):
        session_of(tmp_path, fake.TableModel(TARGET), 4)


def test_ranks_construct_one_executor(tmp_path: Path) -> None:
    """The orchestrator and its workers: the same participants and GPUs, nobody spawned; workers hold a share."""
    session = session_of(tmp_path, fake.TableModel(TARGET), 4)
    work(tmp_path, OPTIONS, 1)
    work(tmp_path, OPTIONS, 2)
    leader, *workers = fake.machine.executors
    for executor in (leader, *workers):
        parallel = executor.config.parallel_config
        assert (parallel.device_ids, parallel.participant_ids) == ([0, 1], [1, 2])
        assert parallel.orchestrator_config.spawn_processes is False
        assert parallel.orchestrator_config.is_orchestrator is (executor is leader)
    assert leader.can_enqueue_requests()
    assert not any(worker.can_enqueue_requests() for worker in workers)
    assert all(not worker.requests for worker in workers)
    session.close()
    assert not leader.running


@pytest.mark.parametrize(
    ("key", "given"), [("lookahead", {"lookahead": "auto"}), ("fan_out.budget", {"fan_out": FanOutConfig("auto")})]
)
def test_a_stock_draft_whose_steps_nobody_times_takes_numbers(key: str, given: dict[str, Any]) -> None:
    config = DeploymentConfig("test", ModelConfig("t"), DraftConfig("d"), SpeculationConfig(rule="ratio", **given))
    with pytest.raises(ConfigError, match=rf"speculation.{key} is `auto`.*give a number"):
        stock.check_deployment(config)


@pytest.mark.parametrize("role", ["target", "draft"])
def test_what_each_rank_of_a_group_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str) -> None:
    from saguaro.orchestrator import rank

    fake.machine.models[str(tmp_path)] = fake.TableModel(TARGET)
    fake.write_engine(tmp_path, 4, target=role == "target")
    manifest(tmp_path, 4)
    part = SimpleNamespace(model=ModelConfig("t", kv_tokens=800, block_size=4), engine=str(tmp_path))
    config = DeploymentConfig("test", part.model, part.model, SpeculationConfig(rule="ratio"))
    plan: Any = SimpleNamespace(groups={role: part}, config=config)
    led: list[Any] = []
    monkeypatch.setattr(rank, "run_target", lambda plan, runtime, target: led.append(target))
    monkeypatch.setattr(
        rank, "run_draft", lambda plan, runtime, role, length, primary: led.append(primary(None, None, None))
    )
    for number in (1, 2, 0):
        rank.run_executor(role, plan, tmp_path, number)
    assert [type(leader) for leader in led] == [ExecutorTarget if role == "target" else ExecutorDrafter]
    *workers, leader = fake.machine.executors
    assert [bool(worker.requests) for worker in workers] == [False, False]
    assert leader.requests
    assert not leader.running, "the executor outlives what led it"
    assert leader.config.kv_cache_config.max_tokens == 800
    coupled: Any = SimpleNamespace(groups={role: part}, config=replace(config, speculation=SpeculationConfig()))
    if role == "target":
        with pytest.raises(ConfigError, match="rule: ratio"):
            rank.run_executor(role, coupled, tmp_path, 0)
        assert len(fake.machine.executors) == 3, "refused only after the engine was loaded"


def manifest(directory: Path, vocab_size: int) -> None:
    empty = {"recipe_hash": "0" * 64, "source_sha256": "0" * 64, "token_map_sha256": "0" * 64, "versions": {}}
    names = {"recipe": "test", "model": "tiny", "family": "llama", "dtype": "bfloat16", "device": "90"}
    sizes = {"format": 1, "tp": 2, "vocab_size": vocab_size, "max_model_len": 128, "eos_token_ids": (2,)}
    Manifest(engine="trtllm", shards={}, **empty, **names, **sizes).write(directory)  # type: ignore[arg-type]


def test_nothing_of_the_executor_is_pickled() -> None:
    """Requests and results lose fields on the way, so nothing of ours sends one: no pickle, no mpi4py."""
    for path in (ROOT / "engines" / "trtllm.py", ROOT / "orchestrator" / "executor_target.py"):
        tree = ast.parse(path.read_text())
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        assert not names & {"pickle", "copy", "deepcopy", "bcast", "send"}


def test_q_that_loses_precision_would_not_be_exact(tmp_path: Path) -> None:
    """The softmax of what is sent is what was drawn from."""
    target = table_target(tmp_path)
    probs = SparseProbs((1, 3), (0.2, 0.8))
    executed(target, SAMPLED, Speculation((3,), (probs,)))
    sent = requests()[-1].external_draft_tokens_config.logits.softmax(-1)
    assert torch.allclose(sent, torch.tensor([[0.0, 0.2, 0.0, 0.8]]), atol=1e-7)
    assert sent[0, 0] == sent[0, 2] == 0


# The check list for a GPU ---------------------------------------------------------------------------------------------


def first_hour() -> Any:
    return load_script("tests/gpu/trtllm_first_hour.py")


def lab_of(script: Any, path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Few samples, for quick checks: what they cannot tell apart they are not asked here."""
    monkeypatch.setattr(script, "SAMPLES", 160)
    monkeypatch.setattr(script, "TOLERANCE", 0.19)
    rows = [[1 + (3 * i + 5 * j) % 11 for j in range(8)] for i in range(8)]
    return script.Lab(session_of(path, fake.TableModel(fractions(*map(tuple, rows))), 8), Ask, NEVER)


def test_every_check_passes_where_the_contract_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = first_hour()
    found = list(script.checks(lab_of(script, tmp_path, monkeypatch)))
    assert len(found) == 16
    assert [str(check) for check in found if not check.passed] == []


def test_a_check_fails_where_it_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = first_hour()
    lab = lab_of(script, tmp_path, monkeypatch)
    assert script.one_iteration(lab)[0]
    assert script.seeds(lab)[0]
    assert script.tokens_alone(lab)[0]
    fake.machine.stops_after_verification = False
    assert not script.one_iteration(lab)[0]
    shared = fake.SeededDice(0)
    fake.machine.dice = lambda _request: shared
    assert not script.seeds(lab)[0]
    monkeypatch.setattr(lab, "log_q", lambda *probs: None)  # a q that gets lost: as with tokens alone
    assert not script.point_mass(lab)[0]


def test_the_interface_is_compared_with_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    script = first_hour()
    found = {check.name.rpartition(".")[2]: check for check in script.api_checks(trtllm)}
    wrong = {name for name, check in found.items() if not check.passed}
    assert wrong <= {"Executor", "Response"}  # of which the fake has what is used
    assert len(found) > 40
    monkeypatch.delattr(trtllm, "SamplingConfig")
    assert "FAIL  tensorrt_llm.bindings.executor.SamplingConfig: is not there" in map(str, script.api_checks(trtllm))
    said = "__init__(self, a: int = 1, b: list[int | None] = [], *, c: str | None = None) -> None"
    cls = type("Said", (), {"__init__": lambda self: None})
    cls.__init__.__doc__ = said
    assert script.signature(cls) == [("a", False), ("b", False), ("c", True)]


def test_the_tables_are_complete() -> None:
    """Whatever our code names is in the contract's tables; the fake is made of them."""
    for name in ("trtllm_contract", "trtllm_executor"):
        assert json.loads((ROOT / "tests" / "golden" / f"{name}.json").read_text())["_meta"]
    documented = {line.split("|")[2].strip() for line in (__doc__ or "").splitlines() if line.startswith("| ")}
    tests = {part.strip() for cell in documented for part in cell.split(",")} - {"test", "---"}
    assert tests <= globals().keys(), tests - globals().keys()
