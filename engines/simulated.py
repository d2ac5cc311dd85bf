"""A model that is not there: its forwards take as long as on the device of the profile, and target and draft agree as
often as stated. Everything around it (scheduler, channels, MPI jobs, Triton) is the real thing.

What follows a token is a pure function of (seed, position, token), so target and draft need not talk to each other:
both know the target's candidates in their order, c_0, c_1, …, with probabilities p_j ∝ (1 + j)^-sharpness. A draft has
the same order where it agrees, and otherwise finds c_0 behind others. Hence, at temperature 0, a draft token is
accepted with probability `acceptance`, and after a rejection F guesses miss with probability c F^-r. Acceptance falls
with temperature where the draft's sharpness is not the target's.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from saguaro.engines.base import ForwardBatch, ForwardOutput, check_positions
from saguaro.engines.manifest import Manifest
from saguaro.engines.profile import Profile

_CANDIDATES = 64
_LATENESS = 2e-4  # seconds that a sleep may end late
_ELSEWHERE = -30.0  # logit of a token that is no candidate, relative to the best


class SimulatedEngine:
    """An engine whose logits come late, as from a device.

    It produces the token ids from `first` on: those below have a special meaning.
    """

    asynchronous = True
    logit_tolerance = 0.0

    def __init__(
        self, profile: Profile, *, vocab_size: int, first: int, max_model_len: int, block_size: int, num_blocks: int
    ) -> None:
        self._profile = profile
        self._first = first
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.num_blocks = num_blocks
        self._end = 0.0  # of the last forward, on the monotonic clock
        places = min(_CANDIDATES, vocab_size - first)
        self._values = -profile.sharpness * np.log1p(np.arange(places, dtype=np.float32))

    @classmethod
    def load(cls, directory: Path, *, block_size: int, num_blocks: int, group: None = None) -> SimulatedEngine:
        """The engine of a directory built by `saguaro build`; one rank stands for all of the device's."""
        manifest = Manifest.load(directory)
        return cls(
            Profile.load(directory),
            vocab_size=manifest.vocab_size,
            first=max(manifest.eos_token_ids) + 1,
            max_model_len=manifest.max_model_len,
            block_size=block_size,
            num_blocks=num_blocks,
        )

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        """One forward pass, which takes its time from now on: as on a device, whoever reads the logits waits for it.

        Raises EngineError for a position beyond the longest context.
        """
        start = max(time.monotonic(), self._end)  # one forward after the other
        check_positions(batch, self.max_model_len)
        self._end = start + self._profile.seconds(len(batch.token_ids))
        wanted = batch.logit_rows
        return _Running(self._logits(batch.positions[wanted].numpy(), batch.token_ids[wanted].numpy()), self._end)

    def _logits(self, positions: NDArray[np.int64], tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        """[L, V]: a pure function of each row's token and position."""
        state = _mix(
            _mix(np.full(len(tokens), self._profile.seed, np.uint64)) ^ positions.astype(np.uint64)
        ) ^ tokens.astype(np.uint64)
        places = len(self._values)
        count = self.vocab_size - self._first
        # Neighbours in the vocabulary, from a random one on: distinct, and as good as any.
        ids = self._first + (_mix(state)[:, None] % np.uint64(count) + np.arange(places, dtype=np.uint64)) % count
        logits = np.full((len(tokens), self.vocab_size), _ELSEWHERE, np.float32)
        np.put_along_axis(logits, ids.astype(np.int64), self._values[self._ranks(state)], axis=1)
        return logits

    def _ranks(self, state: NDArray[np.uint64]) -> NDArray[np.int64]:
        """[L, candidates]: where this model has each of the target's candidates. A permutation in every row."""
        order = np.arange(len(self._values))
        agreement = self._profile.agreement
        if agreement is None:
            return np.broadcast_to(order, (len(state), len(order)))
        differs = _uniform(state, 1) > agreement.acceptance
        tail = (agreement.miss_scale / _uniform(state, 2)) ** (1 / agreement.miss_exponent)
        # 1 for the token that was sent, which is no guess; then F or more others with probability c F^-r.
        behind = np.where(differs, 1 + np.minimum(np.floor(tail), len(order)), 0).clip(max=len(order) - 1)
        ranks = np.where(order <= behind[:, None], order - 1, order)
        ranks[:, 0] = behind
        return ranks.astype(np.int64)


class _Running(ForwardOutput):
    """Of a device that is at work until `end`."""

    _computed: Tensor
    _end: float

    def __init__(self, logits: NDArray[np.float32], end: float) -> None:
        vars(self).update(_computed=torch.from_numpy(logits), _end=end)

    @property
    def logits(self) -> Tensor:
        _sleep_until(self._end)
        return self._computed


def _sleep_until(end: float) -> None:
    """To within microseconds on the monotonic clock. A sleep alone ends late, which would be put down to others."""
    if (left := end - time.monotonic() - _LATENESS) > 0:
        time.sleep(left)
    while time.monotonic() < end:
        pass


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's step and finaliser: every bit of the input changes every bit of the output."""
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))


def _uniform(state: NDArray[np.uint64], purpose: int) -> NDArray[np.float64]:
    """[L] in (0, 1], independent for each purpose."""
    return ((_mix(_mix(state) + np.uint64(purpose)) >> np.uint64(11)).astype(np.float64) + 1) * 2.0**-53
