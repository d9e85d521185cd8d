"""Plan of `bench generate`: shape of the model, cells, steps and repeats."""

from __future__ import annotations

from dataclasses import dataclass, field

from millpond_lab.bench.generate.candidates import TINY, BenchModel, ModelShape


@dataclass(frozen=True)
class GeneratePlan:
    """What is measured."""

    shape: BenchModel = field(default_factory=ModelShape)
    cells: tuple[tuple[int, int], ...] = ((1, 2048), (1, 4096), (4, 2048))  # (batch, prompt)
    new_tokens: int = 64
    repeats: int = 5
    budget: str = "20%"
    threads: int | None = None
    seed: int = 0


QUICK = GeneratePlan(shape=TINY, cells=((1, 256), (2, 192)), new_tokens=8, repeats=2)
