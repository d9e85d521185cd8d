"""Card of retaining heads, written from their run: no number is typed by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import transformers

from millpond_lab.markdown import one_per_line
from millpond_lab.train.common.learning_curve import curve_rows
from millpond_lab.train.retain.objective import NEIGHBOURS
from millpond_lab.train.retain.run import RetainLogLine
from millpond_lab.train.retain.train import TrainedResult

#: Of the learning curve.
COLUMNS: list[tuple[Callable[[RetainLogLine], float], str]] = [
    (lambda line: line.loss, ".3f"),
    (lambda line: line.overlap, ".2f"),
]

CARD = """\
# Retaining heads of {name}

One small network per layer scores each entry of the KV cache when it is written, from its query, key and value before
RoPE (Locret, arXiv:2410.01805). They are made for one model, whose mark begins with `{mark}`, and for nothing else.

```python
with millpond.compress(model, "locret", budget="10%", heads={file!r}) as cache: ...
```

## Data
{data}: {steps:,} texts, one a step, seed {seed}; {check} more of another random stream gave the quantiles and the
table of overlaps. Each text has questions, or its last eighth asks. The model saw each text in full{chunks}.
What was not like these texts was not learned: measure before you rely on it.

## Training
The model is frozen. The label of an entry is the largest {label} that any query of the questions gives it, over the
query heads of its KV head. Loss: smooth L1, and {neighbours:g} of the squared differences between neighbours. AdamW at
{lr:g}, betas {betas}, {warmup:.0%} of the steps to rise, then linearly to zero; gradients clipped at {clip:g}.
Networks {width:,} wide, {parameters:,} parameters, {size:,} bytes on disk. {minutes:.1f} minutes by the clock on
{hardware}, with other programs running, one process, torch {torch}, transformers {transformers}.{unfinished}

| step | minutes | loss | of the text's best tenth |
|---:|---:|---:|---:|
{curve}

## Overlap with the best tenth
Of the tenth of the entries with the highest labels, how many have the highest scores, on {check} held-out texts.

| layer | {heads} |
|---:|{rule}|
{overlaps}
"""


def write_card(result: TrainedResult, out: Path, *, name: str, hardware: str) -> str:
    """Write `out` with the ending .md; returns the text.

    name: of the model. hardware: in words, what the run was trained on.
    """
    run, settings = result.run, result.run.settings
    chunks = ""
    if settings.chunk:
        chunks = (
            f", and from a quarter of the steps on every other text with eviction to {settings.budget} entries per KV "
            f"head behind every {settings.chunk} tokens"
        )
    n_heads = max(len(row) for row in result.overlaps)
    text = CARD.format(
        name=name,
        mark=result.heads.model[:12],
        file=out.name,
        data=run.data.capitalize(),
        steps=run.step,
        seed=settings.seed,
        check=settings.check_texts,
        chunks=chunks,
        label="log-probability (at least -12)" if settings.label == "log_prob" else "logit before the softmax",
        neighbours=NEIGHBOURS,
        lr=settings.lr,
        betas=settings.betas,
        warmup=settings.warmup,
        clip=settings.clip,
        width=settings.width,
        parameters=sum(p.numel() for p in run.networks.parameters()),
        size=out.stat().st_size,
        minutes=run.time_s / 60,
        hardware=hardware,
        torch=torch.__version__,
        transformers=transformers.__version__,
        unfinished="" if run.step == settings.steps else f" The run stopped before step {settings.steps:,}.",
        curve="\n".join(curve_rows(run.log, COLUMNS)),
        heads=" | ".join(f"KV head {i}" for i in range(n_heads)),
        rule="|".join(["---:"] * n_heads),
        overlaps="\n".join(
            f"| {layer} | {' | '.join(f'{value:.2f}' for value in row)} |" for layer, row in enumerate(result.overlaps)
        ),
    )
    text = one_per_line(text)
    out.with_suffix(".md").write_text(text, encoding="utf-8")
    return text
