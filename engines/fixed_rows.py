"""Causal batches in forwards of one shape, so that a row's logits do not depend on what else is computed.

A matrix product of another shape may sum in another order, and so may a row in another place of it. Here every forward
has ROWS rows, and the row at position p of a sequence is row p mod ROWS of its forward, whichever sequences fill the
other rows or leave them empty. It is then computed by the same instructions alone and in any company, whatever K is and
however a prompt is cut: the same bits, from every kernel whose rows do not read each other and whose work is planned by
shapes alone. Consecutive positions have different places, so that a trunk of up to ROWS tokens is one forward.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from saguaro.engines.base import ForwardBatch

ROWS = 8  # of a forward: at this many, reading the weights is still most of the work of a CPU


@dataclass(frozen=True)
class FixedRows:
    """The part of a batch that is computed in one forward of ROWS rows."""

    batch: ForwardBatch
    places: Tensor  # [N] row of the forward that each row of `batch` is
    logits: tuple[int, ...]  # [L] which of the whole batch's logits those of `batch` are

    def spread(self, rows: Tensor) -> Tensor:
        """[N, ...] -> [ROWS, ...]: every row in its place, zeros elsewhere."""
        spread = rows.new_zeros(ROWS, *rows.shape[1:])
        return spread.index_copy_(0, self.places.to(rows.device), rows)


def fixed_rows(batch: ForwardBatch) -> list[FixedRows]:
    """A causal batch cut into forwards, to be run in order: no row comes before one that it sees."""
    positions = batch.positions.tolist()
    parts: list[list[int]] = []  # rows of each forward
    counts: list[list[int]] = []  # and how many are of each sequence
    free = [0] * ROWS  # the first forward in which a place is free, for what comes behind
    first = 0
    for sequence, count in enumerate(batch.rows):
        part = 0
        for row in range(first, first + count):
            place = positions[row] % ROWS
            part = max(part, free[place])
            free[place] = part + 1
            if part == len(parts):
                parts.append([])
                counts.append([0] * len(batch.rows))
            parts[part].append(row)
            counts[part][sequence] += 1
        first += count
    wanted = {row: index for index, row in enumerate(batch.logit_rows.tolist())}
    return [_part(batch, rows, tuple(of_sequence), wanted) for rows, of_sequence in zip(parts, counts)]


def _part(batch: ForwardBatch, rows: list[int], counts: tuple[int, ...], wanted: dict[int, int]) -> FixedRows:
    index = torch.tensor(rows)
    part = ForwardBatch(
        token_ids=batch.token_ids[index],
        positions=batch.positions[index],
        slots=batch.slots[index],
        rows=counts,
        block_tables=batch.block_tables,
        fan_out=None,
        logit_rows=torch.tensor([i for i, row in enumerate(rows) if row in wanted], dtype=torch.int64),
    )
    return FixedRows(part, part.positions % ROWS, tuple(wanted[row] for row in rows if row in wanted))
