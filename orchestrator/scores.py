"""The chain from logits to scores: the one definition of the target's distribution, for ar, sd, ssd and the draft.

    logits -> logit bias, bad words, min_tokens, penalties, grammar mask -> temperature -> top-k -> top-p -> min-p

Scores are what softmax turns into p; an excluded token scores -inf. Each row is computed from that row alone, so a row
has the same bits in any batch. Work over the vocabulary is a few vector passes; sorting happens on short lists.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor
from torch.nn import functional

from saguaro.errors import ConfigError, EngineError
from saguaro.orchestrator.types import RequestSampling, SamplingParams

# Length of the first list of best tokens that the filters look at; it grows when they keep all of it.
_LIST = 64
_GROWTH = 8
_SMALL = 1 << 14  # scores whose best are found sooner than groups are made
_MAX_BIAS = 1e30  # beyond any logit, and still a float32


@dataclass(frozen=True)
class Scores:
    """R rows of scores, over the whole vocabulary or, where filters left few tokens, as lists of those."""

    values: Tensor  # [R, n] float32 or float64
    ids: Tensor | None  # [R, n] token of each value, best first; None: n = V and value i belongs to token i
    vocab_size: int
    empty: tuple[bool, ...]  # [R] rows in which no token may follow

    def dense(self) -> Tensor:
        """[R, V], with -inf for every token that is not listed."""
        if self.ids is None:
            return self.values
        table = self.values.new_full((len(self.values), self.vocab_size), -math.inf)
        return table.scatter_(1, self.ids, self.values)


def check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """Refuse token ids the target does not have; for admission. Raises ConfigError naming field, id and limit."""
    fields: dict[str, Iterable[int]] = {
        "logit_bias": params.logit_bias,
        "bad_words": (token for word in _bad_words(params) for token in word),
        "stop_token_ids": params.stop_token_ids,
    }
    for name, ids in fields.items():
        for token in ids:
            if not 0 <= token < vocab_size:
                raise ConfigError(f"{name} names token id {token}; this model's ids are 0 to {vocab_size - 1}")


def needs_history(params: SamplingParams) -> bool:
    """Whether earlier tokens matter. Where they do not, only the lengths of context and tails are read."""
    return _penalised(params) or any(len(word) > 1 for word in _bad_words(params))


def changes_logits(params: SamplingParams) -> bool:
    """Whether anything is done to logits but masking them by a grammar."""
    return bool(params.logit_bias or params.bad_words or params.min_tokens) or _penalised(params)


def filtered(table: Tensor, params: SamplingParams) -> Scores:
    """[R, V] adjusted logits, in the host's memory, after temperature and filters, each row by itself.

    At temperature 0 the scores are not scaled and the filters, which cannot change the argmax, are skipped. `table` is
    left as it is, but may be returned. Raises EngineError if a row is not a number.
    """
    greatest = table.numpy().max(-1, keepdims=True)  # see `near_ties`
    listed: list[float] = greatest[:, 0].tolist()
    check_numbers(listed)
    values, ids = table, None
    if params.temperature > 0:
        if params.top_k > 0 or params.top_p < 1 or params.min_p > 0:
            values, ids = _shortlist(table, or_zero(torch.from_numpy(greatest)), params)
        elif params.temperature != 1:
            values = scaled(table, or_zero(torch.from_numpy(greatest)), params.temperature)
    return Scores(values, ids, table.shape[-1], tuple(value == -math.inf for value in listed))


def adjusted(
    logits: Tensor,
    request: RequestSampling,
    context: Sequence[int],
    tails: Sequence[Sequence[int]],
    allowed: Tensor | None,
) -> Tensor:
    """[R, V] logits after bias, bans, penalties and grammar; the argument itself (in float32) if there are none.

    Row r's history is context + tails[r]; it predicts the token after it. `allowed` [R, V] bool is the grammar mask.
    Ids the logits do not cover, which a draft with a smaller head may meet, have nothing to adjust.
    """
    params, (rows, vocab_size) = request.params, logits.shape
    if len(tails) != rows:
        raise ValueError(f"{rows} rows of logits need as many tails, got {len(tails)}")
    table = logits if logits.dtype == torch.float64 else logits.float()
    if not changes_logits(params):
        return table if allowed is None else table.masked_fill(~allowed, -math.inf)
    table = table.clone()
    bias = {token: value for token, value in params.logit_bias.items() if 0 <= token < vocab_size}
    if bias:
        amounts = torch.tensor(list(bias.values()), dtype=torch.float64).clamp(-_MAX_BIAS, _MAX_BIAS)
        table[:, list(bias)] += amounts.to(table)
    for row, tail in enumerate(tails):
        banned = [token for token in _banned(request, context, tail) if 0 <= token < vocab_size]
        if banned:
            table[row, banned] = -math.inf
    if _penalised(params):
        _penalise(table, request, context, tails)
    return table if allowed is None else table.masked_fill(~allowed, -math.inf)


def _banned(request: RequestSampling, context: Sequence[int], tail: Sequence[int]) -> list[int]:
    """Tokens that may not follow: the end of a bad word begun in prompt or output, and stops before `min_tokens`."""
    params = request.params
    banned = [word[-1] for word in _bad_words(params) if _ends_with(context, tail, word[:-1])]
    if len(context) + len(tail) - request.prompt_length < params.min_tokens:
        banned.extend(request.stop_ids)
        banned.extend(params.stop_token_ids)
    return banned


def _bad_words(params: SamplingParams) -> Iterator[tuple[int, ...]]:
    for word in params.bad_words:
        if isinstance(word, str):
            raise ValueError(f"the bad word {word!r} has not been encoded")
        yield word


def _ends_with(context: Sequence[int], tail: Sequence[int], suffix: tuple[int, ...]) -> bool:
    missing = len(suffix) - len(tail)
    if missing <= 0:
        return tuple(tail[len(tail) - len(suffix) :]) == suffix
    return missing <= len(context) and (*context[len(context) - missing :], *tail) == suffix


def _penalised(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


def _penalise(table: Tensor, request: RequestSampling, context: Sequence[int], tails: Sequence[Sequence[int]]) -> None:
    """Penalties in place: repetition (Keskar et al., 2019) over prompt and output, the others over output only."""
    params, vocab_size = request.params, table.shape[-1]
    start = 0 if params.repetition_penalty != 1 else request.prompt_length
    history = np.asarray(context[start:], np.int64)
    output = history[request.prompt_length - start :]
    ids = np.unique(np.concatenate([history, *(np.asarray(tail, np.int64) for tail in tails)]))
    ids = ids[(ids >= 0) & (ids < vocab_size)]

    def count(tokens: ArrayLike) -> Tensor:  # [len(ids)]
        known = np.asarray(tokens, np.int64)
        known = known[(known >= 0) & (known < vocab_size)]
        return torch.from_numpy(np.bincount(np.searchsorted(ids, known), minlength=len(ids)))

    in_tail = torch.stack([count(tail) for tail in tails])  # [R, len(ids)]
    emitted = (count(output) + in_tail).to(table)
    columns = torch.from_numpy(ids).to(table.device)
    part = table[:, columns]
    if params.repetition_penalty != 1:
        seen = (count(history) + in_tail).to(table) > 0
        repeated = torch.where(part > 0, part / params.repetition_penalty, part * params.repetition_penalty)
        part = torch.where(seen, repeated, part)
    table[:, columns] = part - params.frequency_penalty * emitted - params.presence_penalty * (emitted > 0)


def near_ties(logits: Tensor, tolerance: float) -> list[int]:
    """Rows of [R, V] logits on the host in which another token comes within `tolerance` of the best."""
    table = logits.numpy()  # five times as fast as torch on a CPU
    close = np.flatnonzero(table >= table.max(1, keepdims=True) - tolerance)
    if len(close) == len(table):
        return []  # as a rule: nothing comes close to the best one
    rows: list[int] = np.flatnonzero(np.bincount(close // table.shape[1]) > 1).tolist()
    return rows


def check_numbers(best: Iterable[float]) -> None:
    """Raises EngineError if one of the rows' best values is not a finite number. -inf is: a row without any token."""
    if not all(value < math.inf for value in best):  # nor is a NaN
        raise EngineError(
            "the model returned logits that are not finite numbers (NaN or infinity); its weights or its quantisation "
            "are damaged: verify the engine directory, or rebuild it with a wider dtype"
        )


def or_zero(best: Tensor) -> Tensor:
    """The best value of each row, 0 for a row without any token."""
    return best.masked_fill(best == -math.inf, 0)


def scaled(table: Tensor, best: Tensor, temperature: float) -> Tensor:
    """Scores at a temperature above 0. Measured from the best, so that no temperature can overflow them."""
    if temperature == 1:
        return table
    return table.sub(best).div_(max(temperature, torch.finfo(table.dtype).tiny))


def top(table: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The n best values of each row and their columns, both [R, n], best first, equal values by column.

    The n best lie in the n groups with the greatest maxima, which a vector pass finds; only those are searched. Among
    values equal to the last one, which are listed is not specified.
    """
    rows, columns = table.shape
    if n == 1:
        return table.max(-1, keepdim=True)  # the first of equal values
    if n >= columns:
        values, ids = table.sort(dim=-1, descending=True, stable=True)
        return values, ids
    height = math.isqrt(columns // n)  # of a group: columns j, j + width, j + 2 width, ...
    if height < 4 or table.numel() <= _SMALL:
        ids = table.topk(n, -1, sorted=False).indices
    else:
        width = columns // height
        grouped = width * height
        maxima = table[:, :grouped].reshape(rows, height, width).amax(1)
        groups = maxima.topk(n, -1, sorted=False).indices
        offsets = width * torch.arange(height, device=table.device)
        members = (groups[:, None, :] + offsets[:, None]).flatten(1)
        rest = torch.arange(grouped, columns, device=table.device).expand(rows, -1)
        members = torch.cat([members, rest], 1)
        ids = members.gather(1, table.gather(1, members).topk(n, -1, sorted=False).indices)
    ids = ids.sort(-1).values
    values, order = table.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def log_total(table: Tensor) -> Tensor:
    """[R, 1] log of the sum of exp of each row."""
    if table.is_cuda:
        return table.logsumexp(-1, keepdim=True)
    return torch.stack([row.logsumexp(-1, keepdim=True) for row in table])  # one row at a time stays in the cache


def survivors(values: Tensor, params: SamplingParams, mass: Tensor | None = None) -> Tensor:
    """Which of the listed scores top-k, top-p and min-p keep; [R, n] bool, true for a prefix of each row.

    `values` are the best of each row, best first. `mass` [R, 1] is the row's sum of exp(score - best); None, as after
    top-k, means that of the tokens kept so far. top-k keeps ties with the k-th value, top-p the tokens before which
    less than `top_p` of the mass lies, min-p those with at least `min_p` times the greatest probability.
    """
    best = values[:, :1]
    keep = values > -math.inf
    if 0 < params.top_k < values.shape[1]:
        keep &= values >= values[:, params.top_k - 1 : params.top_k]
    if params.top_p < 1:
        # One by one in float64: the sums do not depend on the length of the list.
        cumulated = torch.where(keep, (values - best).double().exp(), 0).cumsum(-1)
        total = cumulated[:, -1:] if mass is None else mass
        keep &= functional.pad(cumulated[:, :-1], (1, 0)) < params.top_p * total
    if params.min_p > 0:
        keep &= values >= best + math.log(params.min_p)
    return keep


def _shortlist(table: Tensor, best: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Scores and ids of the tokens the filters keep, [R, n], best first, -inf where a row keeps fewer."""
    vocab_size = table.shape[1]
    limited = 0 < params.top_k < vocab_size
    mass = _mass(table, best, params.temperature) if params.top_p < 1 and not limited else None
    n = min(vocab_size, max(_LIST, 2 * params.top_k))
    while True:
        values, ids = top(table, n)
        values = scaled(values, best, params.temperature)
        keep = survivors(values, params, mass)
        # The list is too short if a cut may fall beyond it, or among values of which it need not hold the lowest ids.
        last = values[:, -1:]
        reaching = keep & (values == last)
        if limited:
            reaching |= (values[:, params.top_k - 1 : params.top_k] == last) & (last > -math.inf)
        if n == vocab_size or not bool(reaching.any()):
            break
        n = min(vocab_size, n * _GROWTH)
    n = max(1, int(keep.sum(-1).max()))
    return values[:, :n].masked_fill(~keep[:, :n], -math.inf), ids[:, :n]


def _mass(table: Tensor, best: Tensor, temperature: float) -> Tensor:
    """[R, 1] float64 sum of exp(score - best score). Each row by itself: summed together, the order may differ."""
    weights = scaled(table, best, temperature)
    weights = (weights - weights.amax(-1, keepdim=True)).exp_()
    return torch.stack([row.sum(dtype=torch.float64) for row in weights])[:, None]
