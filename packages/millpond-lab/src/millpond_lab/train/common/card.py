"""Card of networks that were trained on a frozen model: what every such card says of its run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import torch
import transformers

from millpond_lab.markdown import one_per_line
from millpond_lab.train.common.network_run import CurvePoint, NetworkRun, S
from millpond_lab.train.common.progress import LogLine, curve_rows


class TimedPoint(CurvePoint, LogLine, Protocol):
    """A point of a learning curve that has its seconds."""


Line = TypeVar("Line", bound=TimedPoint)


def write_network_card(
    template: str,
    run: NetworkRun[S, Line],
    out: Path,
    *,
    name: str,
    mark: str,
    hardware: str,
    curve: Sequence[tuple[Callable[[Line], float], str]],
    n_heads: int,
    **more: object,
) -> str:
    """Write `out` with the ending .md; returns the text.

    Args:
        template: text with fields in braces; those of the run are filled from it.
        run: the training run.
        out: file of the networks.
        name: of the model.
        mark: of the model's weights.
        hardware: in words, what the run was trained on.
        curve: columns of the learning curve, see `curve_rows`.
        n_heads: KV heads of a layer at most, each of which is a column of the last table.
        **more: the other fields.
    """
    settings = run.settings
    text = template.format(
        name=name,
        mark=mark[:12],
        file=out.name,
        data=run.data.capitalize(),
        steps=run.step,
        seed=settings.seed,
        check=settings.check_texts,
        lr=settings.lr,
        betas=settings.betas,
        warmup=settings.warmup,
        parameters=sum(p.numel() for p in run.networks.parameters()),
        size=out.stat().st_size,
        minutes=run.time_s / 60,
        hardware=hardware,
        torch=torch.__version__,
        transformers=transformers.__version__,
        unfinished="" if run.step == settings.steps else f" The run stopped before step {settings.steps:,}.",
        curve="\n".join(curve_rows(run.log, curve)),
        columns=" | ".join(f"KV head {i}" for i in range(n_heads)),
        rule="|".join(["---:"] * n_heads),
        **more,
    )
    text = one_per_line(text)
    out.with_suffix(".md").write_text(text, encoding="utf-8")
    return text
