"""Card of gates, written from their run: no number is typed by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import transformers

from millpond_lab.markdown import one_per_line
from millpond_lab.train.common.learning_curve import curve_rows
from millpond_lab.train.gate.prune import CHANGED
from millpond_lab.train.gate.run import GateLogLine
from millpond_lab.train.gate.train import TrainedGates

#: Of the learning curve.
COLUMNS: list[tuple[Callable[[GateLogLine], float], str]] = [
    (lambda line: line.loss, ".3f"),
    (lambda line: line.predicted, ".3f"),
    (lambda line: line.kept, ".1%"),
]

CARD = """\
# Gates of {name}

One small network per layer says of each entry of the KV cache when it is written whether a KV head keeps it
(Attention-Gate, arXiv:2410.12876). They are made for one model, whose mark begins with `{mark}`, and for nothing else.

```python
with millpond.compress(model, "attention_gate", gate={file!r}) as cache: ...
```

## Data
{data}: {steps:,} texts, one a step, seed {seed}; {check} more of another random stream gave the last shift of the
biases and the table of shares. Each text has questions, or its last eighth asks. What was not like these texts was not
learned: measure before you rely on it.

## Training
The model is frozen and reads each prompt in full. The tokens behind it are read with what the gates keep. Loss: {loss},
and {alpha:g} times the distance of the mean flag from {target:.0%}, with straight-through gradients; the first {sinks}
and the newest {window} entries of a prompt stay and count as kept. {start}AdamW at {lr:g}, betas {betas}, {warmup:.0%}
of the steps to rise, then linearly to zero; the norm of the gradients clipped at {clip:g}. Networks {hidden:,} wide,
{heads} narrow heads of {width} numbers that look at {sees}, {parameters:,} parameters. At the end every bias was moved
by {shift:+.3f}, and units that decide nothing on those texts (at most {changed:.1%} of the flags) were left out:
{units} of the layers stay, {size:,} bytes on disk. {minutes:.1f} minutes by the clock on {hardware}, with other
programs running, one process, torch {torch}, transformers {transformers}.{unfinished}

| step | minutes | loss | of it predictions | kept |
|---:|---:|---:|---:|---:|
{curve}

## What is kept
On {check} held-out texts {low:.1%} to {high:.1%} of the entries are kept, {mean:.1%} in the mean. {same:.1%} of the
tokens that ask have the same most likely next token as with everything kept.

| layer | {columns} |
|---:|{rule}|
{kept}
"""


def write_card(result: TrainedGates, out: Path, *, name: str, hardware: str) -> str:
    """Write `out` with the ending .md; returns the text.

    name: of the model. hardware: in words, what the run was trained on.
    """
    run, settings = result.run, result.run.settings
    n_heads = max(len(row) for row in result.kept)
    losses = {"self": "KL divergence from the model with everything kept", "text": "cross entropy of the next token"}
    text = CARD.format(
        name=name,
        mark=result.gates.model[:12],
        file=out.name,
        data=run.data.capitalize(),
        steps=run.step,
        seed=settings.seed,
        check=settings.check_texts,
        loss=losses[settings.teacher],
        alpha=settings.alpha,
        target=settings.target,
        sinks=settings.sinks,
        window=settings.window,
        start="The networks begin as retaining heads of the same model. " if settings.start else "",
        lr=settings.lr,
        betas=settings.betas,
        warmup=settings.warmup,
        clip=settings.clip,
        hidden=settings.hidden,
        heads=settings.n_heads,
        width=settings.width,
        sees="the text before a token" if settings.attention == "causal" else "the whole prompt",
        parameters=sum(p.numel() for p in run.networks.parameters()),
        changed=CHANGED,
        units=", ".join(str(len(layer.b1)) for layer in result.gates.layers),
        size=out.stat().st_size,
        shift=result.shift,
        minutes=run.time_s / 60,
        hardware=hardware,
        torch=torch.__version__,
        transformers=transformers.__version__,
        unfinished="" if run.step == settings.steps else f" The run stopped before step {settings.steps:,}.",
        curve="\n".join(curve_rows(run.log, COLUMNS)),
        low=min(result.shares),
        high=max(result.shares),
        mean=sum(result.shares) / len(result.shares),
        same=result.same,
        columns=" | ".join(f"KV head {i}" for i in range(n_heads)),
        rule="|".join(["---:"] * n_heads),
        kept="\n".join(
            f"| {layer} | {' | '.join(f'{value:.1%}' for value in row)} |" for layer, row in enumerate(result.kept)
        ),
    )
    text = one_per_line(text)
    out.with_suffix(".md").write_text(text, encoding="utf-8")
    return text
