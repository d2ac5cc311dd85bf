"""How the budget of branches is spread over the acceptance lengths of a trunk. Pure arithmetic."""

from __future__ import annotations

from saguaro.plugins.fan_out import FanOut


def uniform(budget: int, lookahead: int) -> FanOut:
    """`budget` guesses spread evenly over rows 0..`lookahead`; what does not divide goes to the last rows.

    The last rows first, because row K (everything accepted) is the likeliest single outcome of a good draft.
    """
    share, rest = divmod(budget, lookahead + 1)
    return FanOut(tuple(share + (k > lookahead - rest) for k in range(lookahead + 1)))


def fixed(counts: tuple[int, ...], lookahead: int) -> FanOut:
    """A hand-written list (F_0, ..., F_K), fitted to a trunk of `lookahead` tokens.

    A shorter trunk keeps the list's tail: its last row is still the row where everything was accepted. A longer one
    repeats F_0 in front.
    """
    padding = max(0, lookahead + 1 - len(counts))
    return FanOut((counts[:1] * padding + counts)[-(lookahead + 1) :])
