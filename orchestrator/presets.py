"""Related systems as configurations of the same machinery, for comparison; docs/presets.md says what they leave out."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, get_args

Preset = Literal["sd", "pearl", "amusd", "specbranch", "swiftspec", "prompt-lookup", "suffix"]

# Only the last row of the trunk, whatever the lookahead is: everything was accepted.
_ALL_ACCEPTED = {"counts": [0, 1]}

# What each stands for in a `speculation:` section.
PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "sd": {"mode": "sd", "backup": "primary"},
        # A round without a speculation decodes one token while the draft continues its own guess of it: pre-verify.
        "pearl": {"mode": "ssd", "lookahead": "auto", "fan_out": _ALL_ACCEPTED, "backup": "none"},
        "amusd": {"mode": "ssd", "lookahead": "auto", "fan_out": _ALL_ACCEPTED, "backup": "primary"},
        # The branch point is where the draft becomes unsure: there the speculation ends.
        "specbranch": {
            "mode": "ssd",
            "lookahead": "auto",
            "min_confidence": 0.4,
            "fan_out": {"counts": [0, 4]},
            "backup": "primary",
        },
        # A draft of width 1 proposes its likeliest token at any temperature.
        "swiftspec": {
            "mode": "ssd",
            "lookahead": "auto",
            "fan_out": {"policy": "geometric", "budget": 8},
            "backup": "primary",
            "width": 1,
        },
        "prompt-lookup": {"mode": "sd", "backup": "ngram"},
        "suffix": {"mode": "sd", "backup": "suffix"},
    }
)
NAMES: tuple[Preset, ...] = get_args(Preset)


def filled_in(document: object) -> object:
    """A deployment's plain data with the keys that `speculation.preset` stands for; one given beside it wins, whole.

    What is not a known preset is left for the reader to refuse.
    """
    match document:
        case {"speculation": {"preset": str(name)} as given, **others} if name in PRESETS:
            return {**others, "speculation": {**PRESETS[name], **given}}
    return document
