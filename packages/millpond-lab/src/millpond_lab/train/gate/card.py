"""Card of gates, written from their run: no number is typed by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedModel

from millpond.errors import DataError, OptionError
from millpond.policy.trained.file import save_heads
from millpond.policy.trained.networks import ACTS, SINKS, WINDOW, Gates, LayerGate
from millpond_lab.train.common.card import write_network_card
from millpond_lab.train.common.network_run import cpu_threads
from millpond_lab.train.gate.objective import CHANGED, TrainedGate
from millpond_lab.train.gate.shares import Acts, GateJudge, share_of
from millpond_lab.train.gate.train import GATES_START, GateLogLine, TrainedGates
from millpond_lab.train.retain.features import TextReader
from millpond_lab.train.retain.texts import Asked, Texts

#: Of the learning curve.
COLUMNS: list[tuple[Callable[[GateLogLine], float], str]] = [
    (lambda line: line.loss, ".3f"),
    (lambda line: line.predicted, ".3f"),
    (lambda line: line.kept, ".1%"),
]

#: How a prompt was read, by where flags acted.
READS = {
    "prompt": ", and queries of a prompt see what has a flag, sinks and the newest entries",
    "end": " and reads each prompt in full",
}
#: What is said of the networks that gates began with.
START = "The networks begin as {} of the same model. "
#: What is said of an adapter.
ADAPTER = (
    "A low-rank adapter of rank {rank} on its attention projections was trained beside the gates (LoRA, the paper's "
    "second route); it is in the file, and acts where they do. "
)
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
The model is frozen{reads}. {adapter}The tokens behind a prompt are read with what the gates keep. Loss: {loss},
and {alpha:g} times the distance of the mean flag from {target:.0%}, with straight-through gradients; the first {sinks}
and the newest {window} entries of a prompt stay and count as kept. {start}AdamW at {lr:g}, betas {betas}, {warmup:.0%}
of the steps to rise, then linearly to zero; the norm of the gradients clipped at {clip:g}. Networks {hidden} wide,
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
    trained = [gate.gate for gate in run.networks if isinstance(gate, TrainedGate)]
    losses = {"self": "KL divergence from the model with everything kept", "text": "cross entropy of the next token"}
    return write_network_card(
        CARD,
        run,
        out,
        name=name,
        mark=result.gates.model,
        hardware=hardware,
        curve=COLUMNS,
        n_heads=max(len(row) for row in result.kept),
        loss=losses[settings.teacher],
        alpha=settings.alpha,
        target=settings.target,
        sinks=settings.sinks,
        window=settings.window,
        start=START.format("gates" if settings.start.startswith(GATES_START) else "retaining heads")
        if settings.start
        else "",
        clip=settings.clip,
        hidden=", ".join(dict.fromkeys(f"{len(gate.b1):,}" for gate in trained)),
        heads=len(trained[0].wq) // trained[0].width,
        width=trained[0].width,
        reads=READS[settings.acts],
        adapter=ADAPTER.format(rank=settings.lora) if settings.lora else "",
        sees="the text before a token" if settings.attention == "causal" else "the whole prompt",
        changed=CHANGED,
        units=", ".join(str(len(layer.b1)) for layer in result.gates.layers),
        shift=result.shift,
        low=min(result.shares),
        high=max(result.shares),
        mean=sum(result.shares) / len(result.shares),
        same=result.same,
        kept="\n".join(
            f"| {layer} | {' | '.join(f'{value:.1%}' for value in row)} |" for layer, row in enumerate(result.kept)
        ),
    )


#: Names of the random streams: of texts that choose the shift, and of others that its result is measured on.
CHOOSE_STREAM, CHECK_STREAM = "gate-share", "gate-share-check"
#: How far from the target the mean of the texts may be: where pinned entries alone are more, no shift helps.
MOST_APART = 0.02


class CalibratedGates(NamedTuple):
    """Gates that were calibrated, with shares of the entries of single texts over all layers and heads.

    Attributes:
        shift: added to every bias. data: name of the texts. before, after: shares of as many held-out texts.
    """

    gates: Gates
    shift: float
    data: str
    target: float
    before: list[float]
    after: list[float]


def calibrate_gates(
    model: PreTrainedModel,
    gates: Gates,
    texts: Texts,
    out: str | Path,
    *,
    target: float,
    n_texts: int = 24,
    seed: int = 0,
    sinks: int = SINKS,
    window: int = WINDOW,
    threads: int | None = None,
) -> CalibratedGates:
    """Write `gates` with moved biases to the file `out`; all other numbers stay.

    Args:
        gates: of this model, as `hf.retaining_heads.gates_finder` checks.
        target: share of a prompt's entries that is to be kept, pinned ones included, between 0 and 1.
        n_texts: texts that choose the shift; as many others are measured.
        sinks: first entries of a prompt that stay.
        window: newest entries of a prompt that stay.
        threads: CPU threads of torch; None leaves them as they are.

    Raises:
        OptionError: a target that is no share, or no text.
        DataError: pinned entries alone are more of these texts than the target; nothing was written.
        UnsupportedModelError: a model whose rotation cannot be undone, or with latents.
    """
    if not 0 < target < 1:
        raise OptionError(f"target={target} is a share of the entries, between 0 and 1, such as 0.1 or 10%")
    if n_texts < 1:
        raise OptionError(f"n_texts={n_texts} must be at least 1 text")
    with cpu_threads(threads):
        acts: Acts = "prompt" if gates.facts.get(ACTS) == "prompt" else "end"
        judge = GateJudge(TextReader(model), acts, sinks, window, gates.adapter)
        chosen = [texts.draw(CHOOSE_STREAM, seed, step) for step in range(n_texts)]
        shift = judge.shift_to(target, gates.layers, chosen)
        mean = sum(_shares(judge, gates.layers, chosen, shift)) / n_texts
        if abs(mean - target) > MOST_APART:
            raise DataError(
                f"the texts keep {mean:.1%} at the nearest, not {target:.0%}: the first {sinks} and the newest "
                f"{window} entries stay; give longer texts or another target"
            )
        check = [texts.draw(CHECK_STREAM, seed, step) for step in range(n_texts)]
        before, after = (_shares(judge, gates.layers, check, by) for by in (0.0, shift))
    facts = {**gates.facts, "target": f"{target:g}", "calibrated": texts.name, "shift": f"{shift:.6g}"}
    layers = [replace(gate, b2=gate.b2 + shift) for gate in gates.layers]
    moved = Gates(layers, gates.model, gates.name, facts, adapter=gates.adapter)
    save_heads(moved, out)
    return CalibratedGates(moved, shift, texts.name, target, before, after)


def _shares(judge: GateJudge, layers: Sequence[LayerGate], texts: Sequence[Asked], shift: float) -> list[float]:
    """Shares that single texts keep with `shift` added to every bias."""
    return [share_of(judge.judge(layers, text, shift).logits, *judge.pins, shift) for text in texts]


SECTION = """
## Calibrated again

After training {shift:+.3f} was added to every bias, so that {data} keep {target:.0%}; {size:,} bytes on disk.
On {count} held-out ones the gates keep {low:.1%} to {high:.1%}, {mean:.1%} in the mean; before it was {before:.1%}.
The shares above are those before.
"""


def calibration_section(result: CalibratedGates, size: int) -> str:
    """A section for the card of the gates, whose file has `size` bytes."""

    def mean(shares: Sequence[float]) -> float:
        return sum(shares) / len(shares)

    return SECTION.format(
        shift=result.shift,
        data=result.data,
        target=result.target,
        count=len(result.after),
        low=min(result.after),
        high=max(result.after),
        mean=mean(result.after),
        before=mean(result.before),
        size=size,
    )
