"""Rows of a measurement of chunks, kept in a file from which the next run goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from millpond_lab.bench.common.machine import describe_machine


class Kept:
    """Measured units by name; those that the file has of the same settings are not measured again.

    Attributes:
        out: path of the files without suffix; None: nothing is written.
        units: what was measured, by name.
    """

    def __init__(self, out: Path | None, settings: dict[str, Any]) -> None:
        self.out, self.units = out, {}
        self._report = describe_machine().header("chunk-reuse") | {"settings": settings}
        file = None if out is None else out.with_suffix(".json")
        if file is not None and file.exists():
            held = json.loads(file.read_text(encoding="utf-8"))
            if held["settings"] == settings:
                self.units = held.get("units", {})

    def unit(self, name: str, measure: Callable[[], Any]) -> Any:
        """What was measured of a unit; measured and written now where it is new."""
        if name not in self.units:
            self.units[name] = json.loads(json.dumps(measure()))
            self.write()
            print(f"{name}: {self.units[name]}", flush=True)
        return self.units[name]

    def write(self, page: str | None = None, **more: Any) -> None:
        """Write the units, and `more`; with a page its Markdown too, which is printed."""
        if page is not None:
            print(page)
        if self.out is None:
            return
        self.out.parent.mkdir(parents=True, exist_ok=True)
        data = self._report | more | {"units": self.units}
        self.out.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        if page is not None:
            self.out.with_suffix(".md").write_text(page, encoding="utf-8")


def ratio(top: np.ndarray, base: np.ndarray, seed: int = 7) -> tuple[float, float, float]:
    """Ratio of means, and its 95 % interval by a bootstrap over units."""
    drawn = np.random.default_rng(seed).integers(0, len(top), (2000, len(top)))
    low, high = np.percentile(top[drawn].mean(1) / base[drawn].mean(1), [2.5, 97.5])
    return float(top.mean() / base.mean()), float(low), float(high)


def interval(found: tuple[float, float, float]) -> str:
    """A ratio with its interval, as text."""
    return "{:.2f} [{:.2f}, {:.2f}]".format(*found)
