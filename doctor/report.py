"""What was looked at, what was found, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Level = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    `warning`: it works, but not as well as it could, or only for some deployments. `problem`: what needs it cannot run.
    """

    name: str
    level: Level
    found: str
    remedy: str = ""  # what to do; "" where there is nothing to do


@dataclass(frozen=True)
class Section:
    """Checks that belong together."""

    title: str
    checks: tuple[Check, ...]
    needed: bool  # by the deployment asked for: its problems are that deployment's


@dataclass(frozen=True)
class Report:
    """`deployment` is the one asked for; None: only the machine was looked at."""

    deployment: str | None
    sections: tuple[Section, ...]

    @property
    def can_run(self) -> bool:
        """No problem concerns the deployment asked for."""
        if self.deployment is None:
            return True
        needed = (check for section in self.sections if section.needed for check in section.checks)
        return not any(check.level == "problem" for check in needed)

    def as_json(self) -> dict[str, Any]:
        return {"can_run": self.can_run, **asdict(self)}

    def as_text(self) -> str:
        lines: list[str] = []
        for section in self.sections:
            lines += [section.title, *_lines(section.checks)]
        if self.deployment is not None:
            lines.append(f"{self.deployment} {'can' if self.can_run else 'cannot'} run here")
        return "\n".join(lines)


def _lines(checks: Sequence[Check]) -> list[str]:
    width = max([20, *(len(check.name) + 1 for check in checks)])
    return [
        f"  {check.level:8} {check.name + ':':{width}} {check.found}{f' -> {check.remedy}' if check.remedy else ''}"
        for check in checks
    ]


def size(count: float) -> str:
    """Bytes of memory, as GiB or MiB."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
