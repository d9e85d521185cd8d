"""Training of gates: `train_gate(model, texts, out)` on a frozen model, on a CPU or a GPU.

A prompt is read once, in full and without gradients. Its later tokens, which ask, are read a second time with what the
gates keep of the prompt; gradients flow through these few tokens alone, so that a step costs little more than the
reading. Every step is a function of (settings, step, state), and the state lies in one checkpoint file.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from millpond.hf.calibration.load import model_mark
from millpond.hf.model_profile import ModelProfile
from millpond.hf.offline import read_later
from millpond.policy.trained.file import GATE, save_heads
from millpond.policy.trained.networks import ATTENTION, LARGE, Gates, LayerGate, RetainingHeads, default_shape
from millpond_lab.train.common.checkpoint import cpu_threads
from millpond_lab.train.common.network_run import StopLimits, checkpoint_of
from millpond_lab.train.common.step_progress import step_progress
from millpond_lab.train.gate.kept_share import flags_of, hidden_of, logits_of, shift_to
from millpond_lab.train.gate.objective import TrainedGate, gate_loss, pinned_entries, prediction_loss, straight_through
from millpond_lab.train.gate.prune import pruned
from millpond_lab.train.gate.run import GateLogLine, GateRun, GateSettings, new_run
from millpond_lab.train.gate.weighted_attention import weighted_attention
from millpond_lab.train.retain.features import ReadPrompt, TextReader
from millpond_lab.train.retain.texts import Asked, Texts
from millpond_lab.train.retain.train import defaults_of as retain_defaults

#: Names of the random streams: of training, and of the texts that the result is measured on.
TRAIN_STREAM, CHECK_STREAM = "retain", "retain-check"


class TrainedGates(NamedTuple):
    """What a call of `train_gate` came to.

    Attributes:
        shift: added to the bias of every head at the end, so that held-out texts keep the target.
        kept: of each layer, by KV head: the share of the entries of held-out texts that is kept.
        shares: of each held-out text, over all layers and heads.
        same: of the later tokens of held-out texts, those whose most likely next token is that of the full cache.
    """

    run: GateRun
    gates: Gates
    shift: float
    kept: list[list[float]]
    shares: list[float]
    same: float


def train_gate(
    model: PreTrainedModel,
    texts: Texts,
    out: str | Path,
    settings: GateSettings,
    *,
    start: RetainingHeads | None = None,
    max_minutes: float | None = None,
    max_steps: int | None = None,
    threads: int | None = None,
    show_progress: bool = True,
) -> TrainedGates:
    """Train gates into the file `out`, continuing from `out`.checkpoint if there is one.

    Args:
        start: retaining heads that the gates begin with; `settings.start` is their digest.
        max_minutes: stop this call after that many minutes; call again to continue.
        max_steps: stop at this step of the whole run; for tests.
        threads: CPU threads of torch; None leaves them as they are.

    Raises:
        OptionError: the checkpoint is of another model, data or settings.
        CacheMismatchError: `start` is of another model or width.
        NumericsError: a loss that is not finite; the checkpoint before it stays.
        UnsupportedModelError: a model whose rotation cannot be undone, with latents, or without position ids.
    """
    file = Path(out)
    file.parent.mkdir(parents=True, exist_ok=True)
    with cpu_threads(threads):
        reader = TextReader(model)
        run = new_run(settings, model_mark(model), texts.name, reader.sizes(), model.device, start)
        if checkpoint_of(file).exists():
            run.load(checkpoint_of(file))
        with step_progress(show_progress, run.step, settings.steps) as show:
            run.go(
                lambda checkpoint: _step(run, reader, texts, checkpoint), file, StopLimits(max_minutes, max_steps), show
            )
        result = _measured(run, reader, texts, type(model).__name__)
    save_heads(result.gates, file)
    return result


def _step(run: GateRun, reader: TextReader, texts: Texts, checkpoint: Path) -> GateLogLine:
    """One step of training: one text. `time_s` is left to the caller."""
    settings = run.settings
    asked = texts.draw(TRAIN_STREAM, settings.seed, run.step)
    prompt = reader.read_prompt(asked.ids, asked.begin)
    pinned = pinned_entries(asked.begin, settings.sinks, settings.window, reader.model.device)
    flags = [
        straight_through(gate(layer.features.float()), pinned)
        for gate, layer in zip(run.networks, prompt.layers, strict=True)
    ]
    logits = read_gated(reader.model, asked, prompt, flags)
    predicted = prediction_loss(logits, prompt.logits, asked.ids[asked.begin :], settings.teacher)
    loss, kept = gate_loss(predicted, flags, settings.target, settings.alpha)
    value = run.descend(loss, lambda gates: nn.utils.clip_grad_norm_(gates.parameters(), settings.clip), checkpoint)
    parts = predicted.detach(), kept.detach()
    return GateLogLine(run.step, 0.0, round(value, 5), *(round(float(part), 5) for part in parts))


def read_gated(model: PreTrainedModel, asked: Asked, prompt: ReadPrompt, flags: list[Tensor]) -> Tensor:
    """(m, vocabulary): predictions of the later tokens with what `flags` (KV heads, n) per layer keep of the prompt."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = prompt.layers[layer]
        return weighted_attention(q, k, v, found.keys, found.values, flags[layer], found.shape)

    return read_later(model, asked.ids[asked.begin :], asked.begin, attend)


@torch.no_grad()
def _measured(run: GateRun, reader: TextReader, texts: Texts, name: str) -> TrainedGates:
    """The gates as a file stores them, shifted to keep the target on held-out texts, and what they do there."""
    settings = run.settings
    layers = [_as_stored(gate) for gate in run.networks]
    asked = [texts.draw(CHECK_STREAM, settings.seed, step) for step in range(settings.check_texts)]
    prompts = [reader.read_prompt(text.ids, text.begin) for text in asked]
    hidden = [hidden_of(gate, prompts, index) for index, gate in enumerate(layers)]
    pins = settings.sinks, settings.window
    shift = shift_to(settings.target, logits_of(layers, hidden), *pins)
    moved = [replace(gate, b2=gate.b2 + shift) for gate in layers]
    gates = Gates([pruned(*given) for given in zip(moved, hidden, strict=True)], run.mark, name, _facts(run))
    hidden = [hidden_of(gate, prompts, index) for index, gate in enumerate(gates.layers)]
    kept: list[Tensor] = []
    shares: list[float] = []
    same = total = 0
    for text, prompt, found in zip(asked, prompts, logits_of(gates.layers, hidden), strict=True):
        flags = [flags_of(logits, *pins) for logits in found]
        kept.append(torch.stack([layer.mean(1) for layer in flags]))
        shares.append(float(torch.cat([layer.flatten() for layer in flags]).mean()))
        predicted = read_gated(reader.model, text, prompt, flags)
        same += int((predicted.argmax(-1) == prompt.logits.argmax(-1)).sum())
        total += len(predicted)
    return TrainedGates(run, gates, shift, torch.stack(kept).mean(0).tolist(), shares, same / total)


def _as_stored(gate: nn.Module) -> LayerGate:
    """A gate in the numbers of its file."""
    assert isinstance(gate, TrainedGate), "one gate per layer"
    found = gate.gate
    parts = {part: getattr(found, part).detach() for part in LayerGate.PARTS}
    numbers = {part: value if part in GATE.exact else value.bfloat16().float() for part, value in parts.items()}
    return LayerGate(**numbers, causal=found.causal)


def defaults_of(model: PreTrainedModel) -> GateSettings:
    """Width of the networks, shape of their narrow attention and learning rate for a model."""
    hidden, _ = retain_defaults(model)
    size = int(ModelProfile.of(model).config.hidden_size)
    n_heads, width = default_shape(size)
    return GateSettings(hidden=hidden, n_heads=n_heads, width=width, lr=3e-4 if size >= LARGE else 1e-3)


def _facts(run: GateRun) -> dict[str, str]:
    settings = run.settings
    return {
        "data": run.data,
        "steps": str(run.step),
        "seed": str(settings.seed),
        "target": f"{settings.target:g}",
        "teacher": settings.teacher,
        "alpha": f"{settings.alpha:g}",
        "sinks": str(settings.sinks),
        "window": str(settings.window),
        "start": settings.start,
        ATTENTION: settings.attention,
    }
