"""What caches hold in the GPU benchmarks, by the name that rows and tables show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from millpond.presets import DEFAULT_PRESET, PRESETS

Given = dict[str, Any]

H2O = "h2o 20%"
H2O_CODES = "h2o 20%, int4"
#: What steps, prompts and profiles are measured of.
SETTINGS: dict[str, Given] = {
    "full": {"method": "full"},
    H2O: {"method": "h2o", "budget": "20%"},
    H2O_CODES: {"method": "h2o", "budget": "20%", "codec": "int4"},
    "snapkv 20%": {"method": "snapkv", "budget": "20%"},
    "int4": {"method": "full", "codec": "int4"},
    "rotated4": {"method": "full", "codec": "rotated4"},
    "fp8": {"method": "full", "codec": "fp8"},
}
#: Half of the entries, in four bits.
HALF_CODES = "h2o 50%, int4"
#: Share of the full cache's answers, in the mean over the board's tasks, that the setting `board_setting` keeps.
KEPT = 0.97
_CHOICE = Path(__file__).parents[1] / "results" / "default-choice.json"


def preset_name(name: str) -> str:
    """A preset and what it stands for: light (full int8)."""
    return f"{name} ({' '.join(PRESETS[name].values())})"


def board_setting() -> tuple[str, Given, float]:
    """The setting of fewest bytes that keeps `KEPT` on the board: its name, its options, and the share it keeps.

    The share is the lesser one of the two halves of the board's contexts.
    """
    kept = {}
    for found in json.loads(_CHOICE.read_text(encoding="utf-8"))["settings"]:
        share = min(found[half]["over_tasks"] for half in ("even", "odd"))
        if share >= KEPT:
            kept[found["bytes"]] = (tuple(found["setting"]), share)
    (method, budget, codec), share = kept[min(kept)]
    given = {name: value for name, value in (("method", method), ("budget", budget), ("codec", codec)) if value}
    preset = next((name for name, options in PRESETS.items() if options == given), None)
    name = " ".join(given.values()) if preset is None else preset_name(preset)
    return name, given, share


def steady_settings() -> dict[str, Given]:
    """What tokens a second are measured of: those with goals, the default of the day, and what keeps most answers."""
    name, given, _ = board_setting()
    return {
        "full": SETTINGS["full"],
        H2O: SETTINGS[H2O],
        "fp8": SETTINGS["fp8"],
        preset_name(DEFAULT_PRESET): {"preset": DEFAULT_PRESET},
        name: given,
        HALF_CODES: {"method": "h2o", "budget": "50%", "codec": "int4"},
        "snapkv 20%": SETTINGS["snapkv 20%"],
    }
