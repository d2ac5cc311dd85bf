"""A strict stand-in for `tensorrt_llm.bindings.executor` 1.2.1: its API from the contract's tables, and an Executor.

*API*: every class, parameter, order, keyword-only marker, default, type and enum of `golden/trtllm_contract.json` and
`golden/trtllm_executor.json`; anything else is a TypeError or AttributeError, as nanobind gives it. What the tables do
not have does not exist.

*Executor*: what the contract says 1.2.1 does with external draft tokens, over a model of the test: acceptance with and
without draft logits, thresholds, filters, penalties, block reuse with partial blocks, statistics. Where it would hang
for ever it fails the test. Its random choices are taken by dice of the test, so that they can be enumerated. `machine`
holds what a test sets: models, dice and faults.

What it cannot show is that the tables are right: `tests/gpu/trtllm_first_hour.py` compares them with a real release.
"""

from __future__ import annotations

import enum
import inspect
import json
import math
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from saguaro.engines.base import Engine, causal_batch

_GOLDEN = Path(__file__).parent / "golden"
_PREFIX = "tensorrt_llm.bindings.executor."
_DEFAULT_PRIORITY = 0.5
VERSION = "1.2.1"


# What a test sets -------------------------------------------------------------------------------------------------


class Model(Protocol):
    """`rows(tokens, count)`: raw logits [count, vocabulary of the engine] after each of the last `count` tokens."""

    def rows(self, tokens: list[int], count: int) -> NDArray[np.float64]: ...


class Dice(Protocol):
    def pick(self, probs: Sequence[Any]) -> int:
        """An index, with these probabilities (numbers or fractions that sum to 1)."""
        ...


class SeededDice:
    """The generator of a request's slot: set up from its seed alone, so that equal seeds give equal draws."""

    def __init__(self, seed: int | None) -> None:
        self._random = random.Random(seed or 0)

    def pick(self, probs: Sequence[Any]) -> int:
        return self._random.choices(range(len(probs)), [float(p) for p in probs])[0]


@dataclass
class Machine:
    """The node. Faults are the traps a test steps into, or must not."""

    models: dict[str, Model] = field(default_factory=dict)  # by engine directory
    dice: Callable[[Any], Dice] = lambda request: SeededDice(request.sampling_config.seed)
    exact: bool = False  # probabilities as fractions, for enumeration
    kv_blocks: int = 400  # that fit into the GPU's memory
    late: int = 0  # calls of await_responses before a response is there
    silent: bool = False  # a worker has died: nothing is ever answered
    errors: dict[int, str] = field(default_factory=dict)  # by place of the request since the start
    stops_after_verification: bool = True  # else it decodes on, up to max_tokens
    damaged_reuse: int | None = None  # the token that a context taken from the cache gives
    executors: list[Any] = field(default_factory=list)


machine = Machine()


def reset() -> Machine:
    machine.__dict__.update(vars(Machine()))
    return machine


class TableModel:
    """Exact next-token probabilities by the last token; logits are their logarithms, and padding rows are likelier."""

    def __init__(self, table: Sequence[Sequence[Fraction]], padding: int = 0) -> None:
        self._rows = [[math.log(p) if p else -1e4 for p in row] + [5.0] * padding for row in table]

    def rows(self, tokens: list[int], count: int) -> NDArray[np.float64]:
        return np.array([self._rows[token] for token in tokens[len(tokens) - count :]])


class EngineModel:
    """A model as an engine of ours computes it, from where a context differs from the one before."""

    def __init__(self, engine: Engine, padding: int = 0) -> None:
        self._engine, self._padding = engine, padding
        self._known: list[int] = []

    def rows(self, tokens: list[int], count: int) -> NDArray[np.float64]:
        same = next((i for i, (a, b) in enumerate(zip(tokens, self._known)) if a != b), len(self._known))
        start = min(same, len(tokens) - count)
        self._known = list(tokens)
        table = range(self._engine.num_blocks)
        batch = causal_batch([tokens[start:]], [start], [table], [count], self._engine.block_size)
        logits = self._engine.forward(batch).logits
        return np.pad(logits.double().numpy(), ((0, 0), (0, self._padding)), constant_values=1e3)


def write_engine(directory: Path, vocab_size: int, *, target: bool = True, **build: Any) -> Path:
    """The config.json of an engine; `build` replaces keys of its build_config; `model_…` of pretrained_config."""
    settings: dict[str, Any] = {
        "max_batch_size": 8,
        "max_num_tokens": 256,
        "max_seq_len": 136,
        "max_beam_width": 1,
        "max_draft_len": 8 if target else 0,
        "speculative_decoding_mode": 2 if target else 1,
        "gather_generation_logits": True,
        "kv_cache_type": "paged",
        "plugin_config": {
            "tokens_per_block": 4,
            "use_paged_context_fmha": True,
            "paged_kv_cache": True,
            "remove_input_padding": True,
            "gpt_attention_plugin": "auto",
        },
    }
    model: dict[str, Any] = {
        "architecture": "LlamaForCausalLM",
        "dtype": "bfloat16",
        "logits_dtype": "float32",
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "max_position_embeddings": 256,
        "position_embedding_type": "rope_gpt_neox",
        "rotary_base": 10000.0,
        "rotary_scaling": None,
        "norm_epsilon": 1e-5,
        "hidden_act": "silu",
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
        "mapping": {"world_size": 2, "tp_size": 2, "pp_size": 1},
    }
    model |= {key.removeprefix("model_"): build.pop(key) for key in list(build) if key.startswith("model_")}
    version = build.pop("version", VERSION)
    plugins = {**settings["plugin_config"], **build.pop("plugin_config", {})}
    config = {
        "version": version,
        "pretrained_config": model,
        "build_config": {**settings, **build, "plugin_config": plugins},
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    for rank in range(model["mapping"]["tp_size"]):
        (directory / f"rank{rank}.engine").write_bytes(b"engine")
    return directory


class UndecidedError(Exception):
    """The next choice has these probabilities."""

    def __init__(self, probs: Sequence[Fraction]) -> None:
        self.probs = probs


class Script:
    """Dice that give the choices fixed so far and ask for the next one."""

    def __init__(self, choices: tuple[int, ...]) -> None:
        self._choices = list(choices)

    def pick(self, probs: Sequence[Any]) -> int:
        if not self._choices:
            raise UndecidedError(probs)
        return self._choices.pop(0)


def law(run: Callable[[], tuple[int, ...]]) -> dict[tuple[int, ...], Fraction]:
    """The exact distribution of what `run` returns, over every choice the executor can make while it runs."""
    found: dict[tuple[int, ...], Fraction] = {}
    open_paths: list[tuple[tuple[int, ...], Fraction]] = [((), Fraction(1))]
    while open_paths:
        choices, mass = open_paths.pop()
        script = Script(choices)
        machine.dice = lambda _request, script=script: script  # type: ignore[misc]
        try:
            result = run()
            found[result] = found.get(result, Fraction(0)) + mass
        except UndecidedError as undecided:
            open_paths.extend(((*choices, i), mass * p) for i, p in enumerate(undecided.probs) if p)
    return found


# The API ----------------------------------------------------------------------------------------------------------


def _tables() -> tuple[dict[str, Any], dict[str, Any]]:
    contract, more = (
        json.loads((_GOLDEN / f"{name}.json").read_text()) for name in ("trtllm_contract", "trtllm_executor")
    )
    for section in ("classes", "enums"):
        contract[section] |= more[section]
    return contract, more["types"]


CONTRACT, TYPES = _tables()
_NAMES: dict[str, Any] = {}  # classes and enums of the module, nested ones too


class _Bound:
    """A class as nanobind makes it."""

    _parameters: tuple[inspect.Parameter, ...] | None = None
    _writable: frozenset[str] = frozenset()
    _readable: frozenset[str] = frozenset()

    def __init__(self, *args: Any, **options: Any) -> None:
        name = type(self).__name__
        if self._parameters is None:
            raise TypeError(f"{name}: no constructor defined!")
        try:
            bound = inspect.Signature(self._parameters).bind(*args, **options)
        except TypeError as error:
            raise TypeError(f"{name}.__init__(): incompatible function arguments ({error})") from error
        given = set(bound.arguments)
        bound.apply_defaults()
        for key, value in bound.arguments.items():
            kind = TYPES.get(name, {}).get(key)
            if key in given and kind is None:
                raise TypeError(f"{name}.{key}: the tables have no type for it; add it before it is used")
            if key in given and not _fits(value, kind):
                raise TypeError(f"{name}.__init__(): incompatible function arguments: {key}={value!r} is not {kind}")
            object.__setattr__(self, _ATTRIBUTES.get((name, key), key), value)
        check = _CHECKS.get(name)
        if check:
            check(self)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._writable:
            raise AttributeError(f"{type(self).__name__!r} object has no settable attribute {name!r}")
        object.__setattr__(self, name, value)


_ATTRIBUTES = {("Request", "type"): "request_type"}


def _fits(value: Any, kind: str) -> bool:
    if kind.endswith("?"):
        return value is None or _fits(value, kind[:-1])
    if kind.startswith("list["):
        return isinstance(value, list) and all(_fits(item, kind[5:-1]) for item in value)
    simple: dict[str, Callable[[Any], bool]] = {
        "bool": lambda v: isinstance(v, bool),
        "int": lambda v: isinstance(v, int),
        "float": lambda v: isinstance(v, (int, float)),
        "str": lambda v: isinstance(v, str),
        "path": lambda v: isinstance(v, (str, Path)),
        "tensor": lambda v: isinstance(v, torch.Tensor),
        "timedelta": lambda v: isinstance(v, timedelta),
    }
    if kind in simple:
        return simple[kind](value)
    return kind in _NAMES and isinstance(value, _NAMES[kind])


def _default(entry: dict[str, Any]) -> Any:
    if entry["required"]:
        return inspect.Parameter.empty
    default = entry["default"]
    if not isinstance(default, dict):
        return default
    if "$none" in default:
        return None
    text = default["$expr"]
    if text == "Request.kDefaultPriority":
        return _DEFAULT_PRIORITY
    name, _, member = text.partition(".")
    return {} if text == "{}" else getattr(_NAMES[name], member) if member else _NAMES[name.removesuffix("()")]()


def _parameters(entries: Sequence[dict[str, Any]]) -> tuple[inspect.Parameter, ...]:
    kinds = {
        "positional_or_keyword": inspect.Parameter.POSITIONAL_OR_KEYWORD,
        "keyword_only": inspect.Parameter.KEYWORD_ONLY,
    }
    return tuple(inspect.Parameter(entry["name"], kinds[entry["kind"]], default=_default(entry)) for entry in entries)


def _external_draft(config: Any) -> None:
    if not config.tokens:
        raise RuntimeError("[TensorRT-LLM][ERROR] Assertion failed: !mTokens.empty()")
    if config.logits is not None:
        if config.logits.dim() != 2:
            raise RuntimeError("[TensorRT-LLM][ERROR] Assertion failed: expected logits of 2 dimensions")
        if config.fast_logits is None and config.logits.shape[0] != len(config.tokens):
            raise RuntimeError("[TensorRT-LLM][ERROR] Assertion failed: logits and tokens differ in number")
    if config.acceptance_threshold is not None and not 0 < config.acceptance_threshold <= 1:
        raise RuntimeError("[TensorRT-LLM][ERROR] Assertion failed: acceptance_threshold in (0, 1]")


def _request(request: Any) -> None:
    if not request.input_token_ids or request.max_tokens < 1:
        raise RuntimeError("[TensorRT-LLM][ERROR] Assertion failed: input tokens and max_tokens > 0")


_CHECKS = {"ExternalDraftTokensConfig": _external_draft, "Request": _request}


def _build() -> ModuleType:
    module = ModuleType(_PREFIX.removesuffix("."))
    module.__dict__["__version__"] = VERSION
    for name, table in CONTRACT["enums"].items():
        if name.startswith(_PREFIX) and "values" in table:
            short = name.rpartition(".")[2]
            _NAMES[short] = enum.Enum(short, table["values"])  # type: ignore[misc]
    classes = {name.removeprefix(_PREFIX): t for name, t in CONTRACT["classes"].items() if name.startswith(_PREFIX)}
    for name in classes:
        if name not in ("Executor", "Response"):
            _NAMES[name.rpartition(".")[2]] = type(name.rpartition(".")[2], (_Bound,), {})
    # Defaults are made of other classes, so those without such come first.
    for full, table in sorted(classes.items(), key=lambda item: item[0] in ("ExecutorConfig", "Request")):
        cls = _NAMES.get(full.rpartition(".")[2])
        if cls is None:
            continue
        cls._writable = frozenset(table.get("attributes_rw", ()))
        for attribute in (*cls._writable, *table.get("attributes_ro", ()), *table.get("methods", ())):
            setattr(cls, attribute, None)
        if "init" in table:
            cls._parameters = _parameters(table["init"])
    for name, thing in _NAMES.items():
        setattr(module, name, thing)
    for name in list(classes) + [n.removeprefix(_PREFIX) for n in CONTRACT["enums"] if n.startswith(_PREFIX)]:
        outer, _, inner = name.rpartition(".")
        if outer:
            delattr(module, inner)
            setattr(_NAMES[outer], inner, _NAMES[inner])
    module.__dict__["Executor"] = Executor
    module.__dict__["Response"] = Response
    return module


def made(name: str, **values: Any) -> Any:
    """What the executor hands out: an object with the table's attributes and no others."""
    thing = _NAMES[name]()
    for key in thing._writable:
        setattr(thing, key, values.pop(key, None))
    assert not values, f"{name} has no {', '.join(values)}"
    return thing


def install() -> ModuleType:
    """Make `import tensorrt_llm` find this; returns `tensorrt_llm.bindings.executor`."""
    if "tensorrt_llm" not in sys.modules:
        package, bindings = ModuleType("tensorrt_llm"), ModuleType("tensorrt_llm.bindings")
        package.__dict__["__version__"] = VERSION
        module = _build()
        package.__dict__["bindings"], bindings.__dict__["executor"] = bindings, module
        sys.modules |= {"tensorrt_llm": package, "tensorrt_llm.bindings": bindings, module.__name__: module}
    return sys.modules["tensorrt_llm.bindings.executor"]


# The Executor -----------------------------------------------------------------------------------------------------


class Response:
    """`result` and `error_msg` each raise in the other's state."""

    def __init__(self, request_id: int, result: Any = None, error: str | None = None) -> None:
        self.request_id = request_id
        self.client_id = None
        self._result, self._error = result, error

    def has_error(self) -> bool:
        return self._error is not None

    @property
    def result(self) -> Any:
        if self._error is not None:
            raise RuntimeError("[TensorRT-LLM][ERROR] Assertion failed: Cannot get the result of a response with error")
        return self._result

    @property
    def error_msg(self) -> str:
        if self._error is None:
            raise RuntimeError("[TensorRT-LLM][ERROR] Assertion failed: Cannot get the error of a response without one")
        return self._error


class HangError(AssertionError):
    """The real executor would wait for ever here."""


class Executor:
    def __init__(self, model_path: Any, model_type: Any, executor_config: Any) -> None:
        if (
            not _fits(model_path, "path")
            or not _fits(model_type, "ModelType")
            or not _fits(executor_config, "ExecutorConfig")
        ):
            raise TypeError("Executor.__init__(): incompatible function arguments")
        config = json.loads((Path(model_path) / "config.json").read_text())
        self.config, self.engine = executor_config, config
        kv, build = executor_config.kv_cache_config, config["build_config"]
        self.external = (
            "external" in str(build["speculative_decoding_mode"]).lower() or build["speculative_decoding_mode"] == 2
        )
        if self.external and not kv.enable_block_reuse:
            raise RuntimeError(
                "[TensorRT-LLM][ERROR] Assertion failed: draft tokens external needs KV cache block reuse"
            )
        if build["plugin_config"]["use_paged_context_fmha"] and not kv.onboard_blocks:
            raise RuntimeError("[TensorRT-LLM][ERROR] Assertion failed: paged context FMHA needs onboard_blocks")
        parallel = executor_config.parallel_config
        world = config["pretrained_config"]["mapping"]["world_size"]
        self.orchestrates = True
        if parallel is not None and parallel.communication_mode is _NAMES["CommunicationMode"].ORCHESTRATOR:
            orchestrator = parallel.orchestrator_config
            if orchestrator is None or (orchestrator.spawn_processes and not orchestrator.worker_executable_path):
                raise RuntimeError("[TensorRT-LLM][ERROR] Assertion failed: a worker executable is needed to spawn")
            self.orchestrates = orchestrator.is_orchestrator
            if 0 in (parallel.participant_ids or ()):
                raise RuntimeError("[TensorRT-LLM][ERROR] Assertion failed: Rank 0 is reserved for the orchestrator")
            for ids in (parallel.device_ids, parallel.participant_ids):
                if ids is None or len(ids) != world:
                    raise RuntimeError(f"[TensorRT-LLM][ERROR] Assertion failed: {ids} for a world of {world}")
        self._model = machine.models[str(model_path)]
        self._vocab = config["pretrained_config"]["vocab_size"]
        self._block = build["plugin_config"]["tokens_per_block"]
        self._blocks = min(machine.kv_blocks, kv.max_tokens // self._block if kv.max_tokens else machine.kv_blocks)
        self._cache: OrderedDict[tuple[Any, tuple[int, ...]], int] = OrderedDict()  # block: (salt, all tokens up to it)
        self._pending: deque[tuple[int, Response]] = deque()  # calls still to wait, response
        self._open: set[int] = set()
        self._done: set[int] = set()
        self._stats: deque[Any] = deque(maxlen=executor_config.iter_stats_max_iterations)
        self._iterations = 0
        self.requests: list[Any] = []  # every request so far
        self.cancelled: list[int] = []
        self.computed: list[int] = []  # context tokens of each request that were not in the cache
        self.forwards: list[int] = []  # of the model, for each request
        self.running = True
        machine.executors.append(self)

    def can_enqueue_requests(self) -> bool:
        return self.running and self.orchestrates

    def shutdown(self) -> None:
        self.running = False

    def enqueue_request(self, request: Any) -> int:
        return self.enqueue_requests([request])[0]

    def enqueue_requests(self, requests: list[Any]) -> list[int]:
        if not _fits(requests, "list[Request]"):
            raise TypeError("enqueue_requests(): incompatible function arguments")
        if not self.can_enqueue_requests():
            raise RuntimeError("[TensorRT-LLM][ERROR] Assertion failed: this process cannot enqueue requests")
        ids = []
        draft_tokens = context = 0
        for request in requests:
            number = len(self.requests)
            self.requests.append(request)
            ids.append(number + 1)
            self._open.add(number + 1)
            if machine.silent:
                continue
            draft_tokens += (
                len(request.external_draft_tokens_config.tokens) if request.external_draft_tokens_config else 0
            )
            try:
                if number in machine.errors:
                    raise RuntimeError(machine.errors[number])
                response = Response(number + 1, self._answer(request))
                context += self.computed[-1]
            except RuntimeError as error:
                response = Response(number + 1, error=str(error))
            self._pending.append((machine.late, response))
        if not machine.silent:
            self._iterations += 1
            self._stats.append(self._iteration(len(requests), draft_tokens, context))
        return ids

    def await_responses(self, *args: Any, **options: Any) -> Any:
        """(timeout) -> list; (id, timeout) -> list; (ids, timeout) -> list of lists."""
        names = ["timeout"]
        first = args[0] if args else options.get("id", options.get("ids"))
        if isinstance(first, (int, list)):
            names = ["ids" if isinstance(first, list) else "id", "timeout"]
        bound = dict(zip(names, args)) | options
        if set(bound) - set(names) or not _fits(bound.get("timeout"), "timedelta?"):
            raise TypeError(f"await_responses(): incompatible function arguments {bound}")
        if "ids" in bound:
            return [self.await_responses(one, bound.get("timeout")) for one in bound["ids"]]
        wanted = bound.get("id")
        ready = [r for calls, r in self._pending if calls == 0 and wanted in (None, r.request_id)]
        if bound.get("timeout") is None and not ready and (not self._pending or wanted in self._done):
            raise HangError("await_responses without a time-out for a response that will never come")
        self._pending = deque((max(0, calls - 1), r) for calls, r in self._pending if r not in ready)
        self._open -= {r.request_id for r in ready}
        self._done |= {r.request_id for r in ready}
        return ready

    def cancel_request(self, id: int) -> None:
        self.cancelled.append(id)

    def get_num_responses_ready(self, id: int | None = None) -> int:
        return sum(calls == 0 and id in (None, r.request_id) for calls, r in self._pending)

    def get_latest_iteration_stats(self) -> list[Any]:
        drained = list(self._stats)
        self._stats.clear()
        return drained

    def _iteration(self, requests: int, draft_tokens: int, context: int) -> Any:
        blocks = made(
            "KvCacheStats",
            max_num_blocks=self._blocks,
            used_num_blocks=0,
            free_num_blocks=self._blocks,
            tokens_per_block=self._block,
        )
        return made(
            "IterationStats",
            iter=self._iterations,
            iter_latency_ms=1.0,
            num_active_requests=requests,
            num_queued_requests=0,
            kv_cache_stats=blocks,
            specdec_stats=made("SpecDecodingStats", num_draft_tokens=draft_tokens),
            inflight_batching_stats=made("InflightBatchingStats", num_ctx_tokens=context),
        )

    def _answer(self, request: Any) -> Any:
        build, output = self.engine["build_config"], request.output_config
        prompt = list(request.input_token_ids)
        external = request.external_draft_tokens_config
        draft = list(external.tokens) if external else []
        room = build["max_seq_len"] - len(prompt) - build["max_draft_len"]
        if room < 1:
            raise RuntimeError(f"Prompt length ({len(prompt)}) exceeds maximum input length")
        if len(draft) > build["max_draft_len"] or (draft and not self.external):
            raise RuntimeError(f"Draft tokens ({len(draft)}) exceed the engine's maximum draft length")
        bias = request.embedding_bias
        if bias is not None and bias.numel() != self._vocab:
            raise RuntimeError(f"embedding_bias has {bias.numel()} elements; the vocabulary has {self._vocab}")
        logits = external.logits if external else None
        if logits is not None and (logits.shape[1] != self._vocab or logits.dtype != torch.float32):
            raise RuntimeError(f"draft logits {tuple(logits.shape)} {logits.dtype} for a vocabulary of {self._vocab}")
        if output.return_generation_logits and not (
            self.config.gather_generation_logits and build["gather_generation_logits"]
        ):
            raise RuntimeError("return_generation_logits needs gather_generation_logits of executor and engine")
        found, missing = self._reuse(prompt, request.cache_salt_id)
        computed = len(prompt) - found
        self.computed.append(computed)
        if computed + len(draft) > build["max_num_tokens"]:
            raise RuntimeError(f"{computed} tokens of context do not fit into max_num_tokens {build['max_num_tokens']}")
        if self.config.enable_chunked_context and computed + len(draft) > self._block:
            draft, logits = [], None  # silently: they do not fit into the chunk
        limit = min(request.max_tokens, room)
        if machine.damaged_reuse is not None and found:
            tokens, reason = [machine.damaged_reuse], "LENGTH"
        else:
            decoding = _Decoding(self, request, prompt)
            tokens, reason = decoding.run(draft, logits, limit)
            self.forwards.append(decoding.forwards)
        self._store([*prompt, *tokens[:-1]], request.cache_salt_id)
        shown = [] if output.exclude_input_from_output else prompt
        raw = None
        if output.return_generation_logits and tokens:
            rows = self._model.rows([*prompt, *tokens[:-1]], len(tokens))
            raw = torch.zeros(1, request.max_tokens, self._vocab)
            raw[0, : len(tokens)] = torch.from_numpy(np.asarray(rows))
        kv = made("KvCacheMetrics", num_reused_blocks=found // self._block, num_missed_blocks=missing)
        return made(
            "Result",
            is_final=True,
            output_token_ids=[[*shown, *tokens]],
            generation_logits=raw,
            finish_reasons=[_NAMES["FinishReason"][reason]],
            sequence_index=0,
            decoding_iter=1,
            request_perf_metrics=made("RequestPerfMetrics", kv_cache_metrics=kv)
            if output.return_perf_metrics
            else None,
        )

    def _reuse(self, prompt: list[int], salt: Any) -> tuple[int, int]:
        """Leading tokens whose KV is found, never all of them; blocks that are not."""
        found = 0
        while found + self._block < len(prompt) and (salt, tuple(prompt[: found + self._block])) in self._cache:
            found += self._block
            self._cache.move_to_end((salt, tuple(prompt[:found])))
        whole = found
        if self.config.kv_cache_config.enable_partial_reuse:
            for other, tokens in self._cache:
                if (
                    other == salt
                    and whole < len(tokens) <= whole + self._block
                    and list(tokens[:whole]) == prompt[:whole]
                ):
                    same = whole
                    while same < min(len(prompt) - 1, len(tokens)) and tokens[same] == prompt[same]:
                        same += 1
                    found = max(found, same)
        return found, -(-(len(prompt) - whole) // self._block)

    def _store(self, tokens: list[int], salt: Any) -> None:
        for start in range(0, len(tokens), self._block):  # the last one may be partial
            self._cache[salt, tuple(tokens[: start + self._block])] = start
        while len(self._cache) > self._blocks:
            self._cache.popitem(last=False)


class _Decoding:
    """One request from its logits to its tokens."""

    def __init__(self, executor: Executor, request: Any, prompt: list[int]) -> None:
        self._executor, self._request, self._prompt = executor, request, prompt
        self._dice = machine.dice(request)
        self._tokens: list[int] = []
        self.forwards = 0

    def run(self, draft: list[int], logits: Any, limit: int) -> tuple[list[int], str]:
        verified = bool(draft)
        if draft:
            self.forwards += 1
            rows = self._executor._model.rows([*self._prompt, *draft], len(draft) + 1)
            for k in range(len(draft) + 1):
                p = self._probs(rows[k], drafted=True)
                token, accepted = self._verify(p, draft, logits, k)
                if not self._emit(token, limit):
                    return self._tokens, self._reason
                if not accepted:
                    break
        while not (verified and machine.stops_after_verification):
            verified = False
            self.forwards += 1
            row = self._executor._model.rows([*self._prompt, *self._tokens], 1)[0]
            if not self._emit(self._sample(row), limit):
                return self._tokens, self._reason
        return self._tokens, "LENGTH"

    def _emit(self, token: int, limit: int) -> bool:
        """False when that was the last one. An end token is not put out."""
        if token == self._request.end_id:
            self._reason = "END_ID"
            return False
        self._tokens.append(token)
        self._reason = "LENGTH"
        return len(self._tokens) < limit

    def _verify(self, p: list[Any], draft: list[int], logits: Any, k: int) -> tuple[int, bool]:
        """The token at row k and whether the next row decides, too."""
        if k == len(draft):
            return self._dice.pick(p), False
        token = draft[k]
        if logits is None:
            # A sample that is not the draft's token is thrown away, and another one is drawn.
            return (token, True) if self._dice.pick(p) == token else (self._dice.pick(p), False)
        q = _numbers(_softmax(logits[k].double().numpy()))  # plain: no temperature, no filter
        threshold = self._request.external_draft_tokens_config.acceptance_threshold
        ratio = p[token] / q[token] if q[token] else 1
        if threshold is not None:
            accepted = ratio >= threshold
        else:
            ratio = min(ratio, 1)
            accepted = self._dice.pick([ratio, 1 - ratio]) == 0
        if accepted:
            return token, True
        rest = [max(a - b, 0) for a, b in zip(p, q)]
        return self._dice.pick([r / sum(rest) for r in rest]), False

    def _sample(self, row: NDArray[np.float64]) -> int:
        """Without a draft: where the cumulated probability reaches a number up to top_p."""
        sampling = self._request.sampling_config
        p = self._probs(row, drafted=False)
        top_p = sampling.top_p
        if top_p is None or top_p >= 1 or self._greedy:
            return self._dice.pick(p)
        limit = Fraction(top_p).limit_denominator(1000) if machine.exact else top_p
        order = sorted(range(len(p)), key=lambda i: (-p[i], i))
        cut, left = [0 * p[0]] * len(p), limit
        for token in order:
            cut[token] = min(p[token], left)
            left -= cut[token]
        return self._dice.pick([share / limit for share in cut])

    @property
    def _greedy(self) -> bool:
        sampling = self._request.sampling_config
        return sampling.top_k == 1 or (not sampling.top_k and not sampling.top_p)

    def _probs(self, row: NDArray[np.float64], *, drafted: bool) -> list[Any]:
        request, sampling = self._request, self._request.sampling_config
        z = np.array(row, dtype=np.float64)
        if request.embedding_bias is not None:
            z += request.embedding_bias.double().numpy()
        if sampling.temperature is not None:
            z /= sampling.temperature
        history = [*self._prompt, *self._tokens]
        counts = np.bincount(history, minlength=len(z))  # the prompt's tokens, too
        seen = counts > 0
        if sampling.repetition_penalty is not None:
            repeated = np.where(z < 0, z * sampling.repetition_penalty, z / sampling.repetition_penalty)
            z = np.where(seen, repeated, z)
        z -= (sampling.presence_penalty or 0) * seen + (sampling.frequency_penalty or 0) * counts
        if len(self._tokens) < (sampling.min_tokens or 0):
            z[request.end_id] = -np.inf
        for word in request.bad_words or ():
            if history[len(history) - len(word) + 1 :] == word[:-1] or len(word) == 1:
                z[word[-1]] = -np.inf
        order = sorted(range(len(z)), key=lambda i: (-z[i], i))
        kept = order
        if self._greedy:
            kept = order[:1]
        elif sampling.top_k:
            kept = order[: min(sampling.top_k, 1024)]
        if drafted and not self._greedy and sampling.top_p is not None and sampling.top_p < 1:
            share = _softmax(np.array([z[i] for i in kept]))
            before = np.cumsum(share) - share
            kept = [token for token, mass in zip(kept, before) if mass < sampling.top_p - 1e-12]
        masked = np.full(len(z), -np.inf)
        masked[kept] = z[kept]
        return _numbers(_softmax(masked))


def _softmax(z: NDArray[np.float64]) -> NDArray[np.float64]:
    weights = np.exp(z - z.max())
    return np.asarray(weights / weights.sum())


def _numbers(probs: NDArray[np.float64]) -> list[Any]:
    """Fractions where a test enumerates; its tables must be simple enough to be recognised after a logarithm."""
    if not machine.exact:
        return probs.tolist()
    exact = [Fraction(p).limit_denominator(1000) for p in probs.tolist()]
    assert sum(exact) == 1, f"{probs} are not simple fractions"
    assert all(math.isclose(a, b, abs_tol=1e-6) for a, b in zip(exact, probs))
    return exact
