"""Verifier and speculator in one thread: the real roles, protocol, tables and cache over any two engines."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from saguaro.engines.base import Engine
from saguaro.orchestrator.config import MAX_LOOKAHEAD
from saguaro.orchestrator.detokenizer import TextStream
from saguaro.orchestrator.draft_link import DraftLink
from saguaro.orchestrator.drafters.backups import Primary, backup_drafter
from saguaro.orchestrator.drafters.model import ModelDrafter
from saguaro.orchestrator.drafters.shadows import Shadows
from saguaro.orchestrator.drafters.text import TextDrafter
from saguaro.orchestrator.estimators import Estimators
from saguaro.orchestrator.fan_out_policy import FanOutPolicy, Lists, uniform
from saguaro.orchestrator.grammar import Grammars
from saguaro.orchestrator.kv_blocks import BlockPool, BlockTable
from saguaro.orchestrator.metrics import Timeline
from saguaro.orchestrator.protocol import Hello, decode
from saguaro.orchestrator.sequence import Sequence
from saguaro.orchestrator.speculator import Speculator
from saguaro.orchestrator.target import EngineTarget, Target
from saguaro.orchestrator.types import Backup, Mode, RequestSampling, Rule, SamplingParams, Setting
from saguaro.orchestrator.verifier import RoundResult, Verifier


class PumpChannel:
    """Waiting for an answer is when the speculator works: one thread, no timing, every run the same."""

    def __init__(self) -> None:
        self.speculator: Speculator | None = None
        self.sent: list[bytes] = []  # what the verifier sent
        self._answers: deque[bytes] = deque()
        self._requests: deque[bytes] = deque()
        self.delay = 0  # answers held back: the speculator is late

    def send(self, data: bytes) -> None:
        self.sent.append(data)
        self._requests.append(data)

    def pump(self) -> None:
        """Let the speculator do all it has been asked for."""
        while self._requests and self.speculator:
            self.speculator.take(decode(self._requests.popleft()))

    def receive(self, timeout: float) -> bytes | None:
        self.pump()
        if len(self._answers) <= self.delay:
            return None
        return self._answers.popleft()

    def close(self) -> None:
        pass

    def forget_requests(self) -> None:
        self._requests.clear()

    def forget(self) -> None:
        """Whatever is on its way in either direction."""
        self._requests.clear()
        self._answers.clear()

    def answer(self, data: bytes) -> None:
        self._answers.append(data)


class _SpeculatorEnd:
    def __init__(self, channel: PumpChannel) -> None:
        self._channel = channel

    def send(self, data: bytes) -> None:
        self._channel.answer(data)

    def receive(self, timeout: float) -> bytes | None:
        if timeout == 0:
            return None  # nothing comes while it works ahead
        raise AssertionError("the pump calls the speculator, which never waits")

    def close(self) -> None:
        pass


@dataclass
class Pair:
    """A target and a draft engine, wired up. `run` decodes requests as one batch."""

    target: Engine | Target  # an engine verifies by our own rules
    draft: Engine
    rule: Rule = "coupled"
    lookahead: int = 3
    budget: int = 6
    policy: FanOutPolicy = Lists(uniform)
    estimators: Estimators = field(default_factory=Estimators)
    width: int = 16
    cache_aware: float = 1.0
    backup: Backup = "primary"
    others: Rows[Backup] = ()  # that a setting may name
    min_confidence: float = 0.0
    least_probability: float | None = None
    stop_ids: tuple[int, ...] = ()
    max_batch_tokens: int = 10_000
    tokenizer: Tokenizer | None = None  # for stop strings
    grammars: Grammars | None = None  # of the target
    draft_grammars: Grammars | None = None
    primary: Primary | None = None  # what drafts in place of the draft engine
    channel: PumpChannel = field(default_factory=PumpChannel)
    more_drafts: Rows[Engine] = ()  # replicas of the draft, beside the first
    timeline: Timeline = field(default_factory=Timeline)
    draft_timeline: Timeline = field(default_factory=Timeline)

    def __post_init__(self) -> None:
        self.target_pool = BlockPool(self.target.num_blocks, self.target.block_size)
        self.draft_pool = BlockPool(self.draft.num_blocks, self.draft.block_size)
        replicas = 1 + len(self.more_drafts)
        self.verifier = Verifier(
            EngineTarget(self.target, self.rule) if hasattr(self.target, "forward") else self.target,
            Setting("ssd", MAX_LOOKAHEAD, self.budget, self.backup),
            max_model_len=self.target.max_model_len,
            max_batch_tokens=self.max_batch_tokens,
            replicas=replicas,
            timeline=self.timeline,
        )
        self.channels = [self.channel, *(PumpChannel() for _ in self.more_drafts)]
        self.speculators = [self.start(replica) for replica in range(replicas)]
        self.links = [self.connect(replica) for replica in range(replicas)]
        self.speculator, self.link = self.speculators[0], self.links[0]
        self._ids = 0

    def start(self, replica: int) -> Speculator:
        """A speculator with nothing in its KV pool, as number `replica`."""
        draft = [self.draft, *self.more_drafts][replica]
        channel = self.channels[replica]
        channel.forget()
        timeline = Timeline() if replica else self.draft_timeline
        drafter: Primary = self.primary or ModelDrafter(
            draft,
            self.rule,
            self.policy,
            width=self.width,
            cache_aware=self.cache_aware,
            min_confidence=self.min_confidence,
            least_probability=self.least_probability,
            grammars=self.draft_grammars,
            timeline=timeline,
        )
        vocabulary = range(draft.vocab_size)
        others = {name: backup_drafter(name, drafter, self.rule, vocabulary) for name in self.others}
        text: dict[Backup, TextDrafter] = {n: each for n, each in others.items() if isinstance(each, TextDrafter)}
        channel.speculator = Speculator(
            drafter,
            _SpeculatorEnd(channel),
            self.policy,
            Hello("", draft.vocab_size, draft.max_model_len, draft.num_blocks, draft.block_size),
            backup=backup_drafter(self.backup, drafter, self.rule, vocabulary),
            others=others,
            shadows=Shadows(text, drafter.memory) if text else None,
            timeline=timeline,
            estimators=Estimators() if replica else self.estimators,
            replica=replica,
            replicas=1 + len(self.more_drafts),
        )
        return channel.speculator

    def connect(self, replica: int, running: Rows[Sequence] = ()) -> DraftLink:
        """A link to a speculator just started."""
        link = DraftLink(self.channels[replica], deployment=1, timeout=0)
        self.verifier.attach(link, running, replica)
        return link

    def sequence(
        self, prompt: Rows[int], params: SamplingParams, mode: Mode = "ssd", lookahead: int | None = None
    ) -> Sequence:
        self._ids += 1
        return Sequence(
            id=self._ids,
            request=RequestSampling(
                params.without_grammar(), params.seed or 0, len(prompt), self.stop_ids + params.stop_token_ids
            ),
            tokens=list(prompt),
            mode=mode,
            lookahead=lookahead or self.lookahead,
            target_table=BlockTable(self.target_pool),
            draft_table=BlockTable(self.draft_pool),
            text=TextStream(self.tokenizer, params) if self.tokenizer and params.stop else None,
            grammar=self.grammars.start(params) if self.grammars else None,
        )

    def step(self, batch: Rows[Sequence]) -> RoundResult:
        """A round of all of them, for which the scheduler would have reserved the blocks."""
        for sequence in batch:
            sequence.target_table.grow(sequence.length)
        self.verifier.regroup(batch)
        return self.verifier.step(batch)

    def finish(self, sequences: Rows[Sequence]) -> list[list[int]]:
        """Run rounds until all have ended; every block must come back."""
        running = list(sequences)
        while running:
            self.step(running)
            for sequence in [s for s in running if s.finish_reason]:
                sequence.release()
                running.remove(sequence)
        assert self.target_pool.free_blocks == self.target_pool.num_blocks
        assert self.draft_pool.free_blocks == self.draft_pool.num_blocks
        return [s.tokens[s.request.prompt_length :] for s in sequences]

    def run(
        self, prompt: Rows[int], params: SamplingParams, mode: Mode = "ssd", lookahead: int | None = None
    ) -> list[int]:
        return self.finish([self.sequence(prompt, params, mode, lookahead)])[0]
