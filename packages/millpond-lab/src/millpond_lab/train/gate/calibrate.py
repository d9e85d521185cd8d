"""Calibration of trained gates: one number is added to every bias, so that given texts keep a target. No training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from millpond.errors import DataError, OptionError
from millpond.policy.trained.file import save_heads
from millpond.policy.trained.networks import SINKS, WINDOW, Gates
from millpond_lab.train.common.checkpoint import cpu_threads
from millpond_lab.train.gate.kept_share import hidden_of, logits_of, share_of, shift_to
from millpond_lab.train.retain.features import TextReader
from millpond_lab.train.retain.texts import Texts

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
        reader = TextReader(model)
        chosen = [_logits(reader, gates, texts, CHOOSE_STREAM, seed, step) for step in range(n_texts)]
        shift = shift_to(target, chosen, sinks, window)
        mean = sum(share_of(found, sinks, window, shift) for found in chosen) / n_texts
        if abs(mean - target) > MOST_APART:
            raise DataError(
                f"the texts keep {mean:.1%} at the nearest, not {target:.0%}: the first {sinks} and the newest "
                f"{window} entries stay; give longer texts or another target"
            )
        check = [_logits(reader, gates, texts, CHECK_STREAM, seed, step) for step in range(n_texts)]
    facts = {**gates.facts, "target": f"{target:g}", "calibrated": texts.name, "shift": f"{shift:.6g}"}
    layers = [replace(gate, b2=gate.b2 + shift) for gate in gates.layers]
    moved = Gates(layers, gates.model, gates.name, facts)
    save_heads(moved, out)
    before, after = ([share_of(found, sinks, window, by) for found in check] for by in (0.0, shift))
    return CalibratedGates(moved, shift, texts.name, target, before, after)


@torch.no_grad()
def _logits(reader: TextReader, gates: Gates, texts: Texts, name: str, seed: int, step: int) -> list[Tensor]:
    """(KV heads, n) of each layer: what the gates say of one text."""
    text = texts.draw(name, seed, step)
    prompts = [reader.read_prompt(text.ids, text.begin)]
    layers = [gate.to(reader.model.device) for gate in gates.layers]
    return logits_of(layers, [hidden_of(gate, prompts, index) for index, gate in enumerate(layers)])[0]


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
