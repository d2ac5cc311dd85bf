"""Offline use: prompts in, results in order out.

from saguaro import LLM, SamplingParams

with LLM() as llm:
    for result in llm.generate(["def fib(n):", "def gcd(a, b):"], SamplingParams(temperature=0)):
        print(result.text)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from saguaro.errors import ConfigError
from saguaro.orchestrator.config import DeploymentConfig, ModelConfig, find_deployment, read_deployment
from saguaro.orchestrator.detokenizer import TextStream
from saguaro.orchestrator.launch import Launcher
from saguaro.orchestrator.loop_thread import LoopThread
from saguaro.orchestrator.metrics import RequestStats
from saguaro.orchestrator.prompts import Prompt, encode_prompt, load_tokenizer
from saguaro.orchestrator.protocol import Span
from saguaro.orchestrator.service_protocol import Status
from saguaro.orchestrator.types import Auto, FinishReason, Mode, SamplingParams, Setting, TokenLogprobs

if TYPE_CHECKING:
    from saguaro.build.recipe import Recipe


@dataclass(frozen=True)
class Chunk:
    """What a round added to a stream. The last one has a `finish_reason`, `stats` and, if asked for, `spans`."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stats: RequestStats | None = None
    spans: tuple[Span, ...] = ()
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # one per token, if asked for


@dataclass(frozen=True)
class Result:
    """A finished request."""

    text: str
    token_ids: list[int]
    prompt_token_ids: list[int]
    finish_reason: FinishReason
    stats: RequestStats
    spans: tuple[Span, ...] = ()
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # one per token, if asked for


class LLM:
    """A deployment for as long as the object lives: use it as a context manager, or call `close`.

    `deployment` is a YAML file, the name of a shipped one, or a configuration. Missing engines are built first. `mode`
    and `lookahead` replace the deployment's. Raises ConfigError, ModelError, CapacityError or LaunchError, before
    anything is left running.
    """

    def __init__(
        self,
        deployment: str | DeploymentConfig = "qwen-coder-int4-cpu",
        *,
        mode: Mode | Auto | None = None,
        lookahead: int | None = None,
        store: Path | None = None,
    ) -> None:
        if isinstance(deployment, DeploymentConfig):
            path, config = Path(), deployment
        else:
            path = find_deployment(deployment)
            config = read_deployment(path)
        config = self.config = anchored(_with_overrides(config, mode, lookahead), path)
        self.store = store
        target, draft = build_engines(config, path, store)
        self._tokenizer = load_tokenizer(target)
        self._launcher = Launcher(config, target, draft)
        self._loop = LoopThread()
        self._exit = ExitStack()
        self._exit.callback(self._loop.close)
        with ExitStack() as failed:
            failed.push(self._exit)
            self._loop.run(self._launcher.__aenter__())
            self._exit.callback(lambda: self._loop.run(self._launcher.__aexit__(None, None, None)))
            failed.pop_all()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop all processes. Harmless when done twice."""
        self._exit.close()

    def status(self) -> Status:
        """What the service is doing now."""
        return self._loop.run(self._launcher.client.status())

    def metrics(self) -> str:
        """The service's metrics in Prometheus' text format; docs/metrics.md says what they mean."""
        return self._loop.run(self._launcher.client.metrics())

    def settings(self) -> list[Setting]:
        """The best setting of each mode for one sequence, by what has been measured so far."""
        return self._loop.run(self._launcher.client.settings())

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        mode: Mode | None = None,
        lookahead: int | None = None,
        trace: bool = False,
        echo: bool = False,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> list[Result]:
        """`params.n` results per prompt, in order. A prompt is text, token ids, or a chat (role and content).
        `params` are for all prompts, or a list with those of each. Raises ConfigError for a list of another length.

        With `echo` text and tokens of a result begin with the prompt's; log probabilities are of the answer's tokens.
        A lower `priority` goes first. An answer that takes longer than `timeout_s` seconds, waiting included, ends with
        what it has and the finish reason "timeout".
        """
        many = [prompts] if _is_one(prompts) else list(prompts)
        encoded = [self.encode(prompt) for prompt in many]  # type: ignore[arg-type]
        one = params or SamplingParams()
        each = [one] * len(many) if isinstance(one, SamplingParams) else list(one)
        if len(each) != len(many):
            raise ConfigError(f"{len(many)} prompts need as many params, or one for all; got {len(each)}")
        options = _options(mode, lookahead, trace, priority, timeout_s)

        async def all_results() -> list[Result]:
            tasks = [
                asyncio.create_task(_collect(ids, self._chunks(ids, sample, echo, options)))
                for ids, one in zip(encoded, each)
                for sample in one.samples()
            ]
            try:
                return await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()  # when one of them fails, the others are of no use

        return self._loop.run(all_results())

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        mode: Mode | None = None,
        lookahead: int | None = None,
        trace: bool = False,
        echo: bool = False,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Generator[Chunk, None, None]:
        """A chunk per round. Text never ends inside a character or a stop string: what is incomplete waits.

        With `echo` the prompt is the first chunk; `priority` and `timeout_s` are as in `generate`.
        Raises ConfigError for `params.n` above 1.
        """
        params = params or SamplingParams()
        if params.n != 1:
            raise ConfigError(f"a stream has one answer, and n is {params.n}: stream each of params.samples()")
        options = _options(mode, lookahead, trace, priority, timeout_s)
        chunks = self._chunks(self.encode(prompt), params, echo, options)

        async def following() -> Chunk | None:
            return await anext(chunks, None)

        try:
            while chunk := self._loop.run(following()):
                yield chunk
        except GeneratorExit:  # the reader leaves early; an interrupted wait has ended the chunks by itself
            self._loop.run(chunks.aclose())
            raise

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; a chat goes through the model's chat template."""
        return encode_prompt(self._tokenizer, prompt)

    async def _chunks(
        self, ids: list[int], params: SamplingParams, echo: bool, options: dict[str, Any]
    ) -> AsyncGenerator[Chunk, None]:
        text = TextStream(self._tokenizer.backend_tokenizer, params)
        if echo:
            yield Chunk(self._tokenizer.decode(ids, skip_special_tokens=True), ids)
        async with aclosing(self._launcher.client.stream(ids, params, **options)) as events:
            async for event in events:
                piece = text.push_round(event.tokens, event.finish_reason)
                yield Chunk(piece, event.tokens, event.finish_reason, event.stats, tuple(event.spans), event.logprobs)


async def _collect(prompt: list[int], chunks: AsyncGenerator[Chunk, None]) -> Result:
    parts = [chunk async for chunk in chunks]
    last = parts[-1]
    if last.finish_reason is None or last.stats is None:
        raise ConfigError("the service ended a stream without a reason: client and service are different releases")
    text = "".join(part.text for part in parts)
    tokens = [token for part in parts for token in part.token_ids]
    logprobs = [entry for part in parts for entry in part.logprobs]
    return Result(text, tokens, prompt, last.finish_reason, last.stats, last.spans, logprobs)


def build_engines(config: DeploymentConfig, path: Path, store: Path | None) -> tuple[Path, Path | None]:
    """The engine directories of a deployment, built where they are missing."""
    from saguaro.build.driver import build
    from saguaro.cache import cache_folder

    engines = {role: build(recipe, store or cache_folder()) for role, recipe in find_recipes(config, path).items()}
    return engines["target"], engines.get("draft")


def anchored(config: DeploymentConfig, path: Path) -> DeploymentConfig:
    """With the full paths of recipes that lie beside the deployment's file, so that it can do without that."""

    def recipe(part: ModelConfig) -> str:
        beside = path.parent / part.recipe
        return str(beside.resolve()) if beside.is_file() else part.recipe

    draft = replace(config.draft, recipe=recipe(config.draft)) if config.draft else None
    return replace(config, target=replace(config.target, recipe=recipe(config.target)), draft=draft)


def find_recipes(config: DeploymentConfig, path: Path) -> dict[str, Recipe]:
    """Of each model that the deployment loads, by role. Raises ConfigError.

    Recipes are relative to its file, `path`; without one, to the working directory.
    """
    from saguaro.build.driver import find_recipe

    models = {"target": config.target}
    if config.draft is not None and config.speculation.mode != "ar":
        models["draft"] = config.draft
    beside = {role: path.parent / model.recipe for role, model in models.items()}
    return {
        role: find_recipe(str(beside[role]) if beside[role].is_file() else model.recipe)
        for role, model in models.items()
    }


def _with_overrides(config: DeploymentConfig, mode: Mode | Auto | None, lookahead: int | None) -> DeploymentConfig:
    speculation = config.speculation
    if mode is not None:
        speculation = replace(speculation, mode=mode)
    if lookahead is not None:
        speculation = replace(speculation, lookahead=lookahead)
    return replace(config, speculation=speculation)


def _options(
    mode: Mode | None, lookahead: int | None, trace: bool, priority: int, timeout_s: float | None
) -> dict[str, Any]:
    """How a request is to be run, for `Client.stream`."""
    return {"mode": mode, "lookahead": lookahead, "trace": trace, "priority": priority, "timeout_s": timeout_s}


def _is_one(prompts: Prompt | Sequence[Prompt]) -> bool:
    """Text, a list of token ids and a list of messages are one prompt each."""
    return isinstance(prompts, str) or bool(prompts) and isinstance(prompts[0], (int, Mapping))
