"""Training of gates: `train_gate(model, texts, out)` on a frozen model, on a CPU or a GPU.

With acts="prompt" a text is read with what the flags let its queries see, in all layers, and gradients flow through all
of its tokens. With acts="end" a prompt is read once, in full and without gradients; its later tokens, which ask, are
read a second time with what the gates keep of the prompt, and gradients flow through these few tokens alone. Every step
is a function of (settings, step, state), and the state lies in one checkpoint file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from millpond.errors import CacheMismatchError, OptionError
from millpond.hf.adapter import ALL, acting
from millpond.hf.calibration.load import model_mark
from millpond.hf.model_profile import ModelProfile
from millpond.policy.trained.adapter import Adapter
from millpond.policy.trained.file import save_heads
from millpond.policy.trained.kinds import GATE
from millpond.policy.trained.networks import (
    ACTS,
    ATTENTION,
    LARGE,
    SINKS,
    WINDOW,
    Gates,
    LayerGate,
    RetainingHeads,
    default_shape,
)
from millpond_lab.train.common.network_run import NetworkRun, RunSettings, StopLimits, checkpoint_of, cpu_threads
from millpond_lab.train.common.progress import step_progress
from millpond_lab.train.gate.low_rank import Sizes, TrainedAdapter, projection_sizes
from millpond_lab.train.gate.objective import (
    Teacher,
    TrainedGate,
    gate_loss,
    pinned_entries,
    prediction_loss,
    pruned,
    straight_through,
)
from millpond_lab.train.gate.shares import Acts, GateJudge, flags_of, read_gated, read_inside, share_of
from millpond_lab.train.retain.features import HeadSizes, TextReader
from millpond_lab.train.retain.texts import Texts
from millpond_lab.train.retain.train import defaults_of as retain_defaults


@dataclass(frozen=True)
class GateSettings(RunSettings):
    """The numbers of the recipe.

    Attributes:
        target: share of a prompt's entries that is to be kept, pinned ones included. alpha: weight of its loss.
        teacher: see `prediction_loss`. hidden: width of the networks. n_heads, width: of their narrow attention.
        sinks, window: first and newest entries of a prompt that stay. clip: of the norm of all gradients.
        start: what the gates begin with, see `start_of`; empty: nothing.
        attention: what a token of a prompt looks at: causal, those before it; global, the whole prompt.
        acts: where flags act: inside a prompt, as later queries of it do not see what has none; or at its end.
        lora: rank of an adapter of the attention projections that is trained beside the gates; 0: none is.
    """

    target: float = 0.2
    alpha: float = 5.0
    teacher: Teacher = "self"
    hidden: int = 1024
    n_heads: int = 4
    width: int = 16
    sinks: int = SINKS
    window: int = WINDOW
    clip: float = 1.0
    start: str = ""
    attention: Literal["causal", "global"] = "causal"
    acts: Acts = "prompt"
    lora: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.target < 1:
            raise OptionError(f"target={self.target} is a share of the entries, between 0 and 1, such as 0.1 or 10%")
        if self.teacher not in ("self", "text"):
            raise OptionError(f"teacher={self.teacher!r} must be self or text")
        if self.attention not in ("causal", "global"):
            raise OptionError(f"attention={self.attention!r} must be causal or global")
        if self.acts not in ("prompt", "end"):
            raise OptionError(f"acts={self.acts!r} must be prompt or end")
        if self.lora < 0:
            raise OptionError(f"lora={self.lora} is the rank of an adapter: 1 or more, or 0 for none")
        if self.lora and self.acts == "end":
            raise OptionError(
                f"lora={self.lora} with acts='end': prompts are read without gradients then, so an adapter would not "
                "learn how to read them; train it with acts='prompt'"
            )


class GateLogLine(NamedTuple):
    """One point of the learning curve."""

    step: int
    time_s: float
    loss: float
    predicted: float  # of it, how far predictions are from the teacher's
    kept: float  # share of the text's entries

    @property
    def said(self) -> str:
        return f"kept {self.kept:.1%}"

    def timed(self, time_s: float) -> GateLogLine:
        return self._replace(time_s=time_s)


GateRun = NetworkRun[GateSettings, GateLogLine]


def new_run(
    settings: GateSettings,
    mark: str,
    data: str,
    sizes: Sequence[HeadSizes],
    device: torch.device,
    start: RetainingHeads | Gates | None = None,
    projections: Sequence[Sizes] = (),
) -> GateRun:
    """A run that begins. Equal seeds give equal weights; the caller's random state is kept.

    projections: of every layer, see `projection_sizes`; none without an adapter.

    Raises:
        CacheMismatchError: the networks to start from are of another model or width, or have another adapter.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        gates = [
            TrainedGate(
                s.inputs,
                settings.hidden,
                s.n_kv_heads,
                settings.n_heads,
                settings.width,
                settings.attention == "causal",
            )
            for s in sizes
        ]
        for index, linears in enumerate(projections):
            gates[index].adapter = TrainedAdapter(linears, settings.lora)
    if start is not None:
        _begin(gates, start, mark, settings)
    return GateRun(settings, mark, data, nn.ModuleList(gates).to(device), GateLogLine)


def start_of(networks: RetainingHeads | Gates | None) -> str:
    """What `GateSettings.start` says of networks that gates begin with."""
    if networks is None:
        return ""
    return f"{GATES_START}{networks.digest}" if isinstance(networks, Gates) else networks.digest


def _begin(gates: Sequence[TrainedGate], start: RetainingHeads | Gates, mark: str, settings: GateSettings) -> None:
    """Let gates begin with given networks; see `new_run`."""
    if start.model != mark or len(start.layers) != len(gates):
        raise CacheMismatchError(
            f"the networks to start from were trained for another model ({start.name}): take those of this model"
        )
    if isinstance(start, Gates):
        rank = 0 if start.adapter is None else start.adapter.rank
        if rank and rank != settings.lora:
            raise CacheMismatchError(
                f"the gates to start from have an adapter of rank {rank}, without which they were not trained: give "
                f"--lora {rank}"
            )
        for index, gate in enumerate(gates):
            gate.continue_from(start.layers[index])
            if start.adapter is not None and gate.adapter is not None:
                gate.adapter.continue_from(start.adapter.layers[index])
        return
    for gate, heads in zip(gates, start.layers, strict=True):
        if len(heads.b1) != settings.hidden:
            raise CacheMismatchError(
                f"the retaining heads to start from are {len(heads.b1)} wide and these gates {settings.hidden}: "
                f"give --hidden {len(heads.b1)}"
            )
        gate.start_from(heads.to(torch.device("cpu")), settings.target)


#: What `GateSettings.start` of gates begins with.
GATES_START = "gates "
#: Names of the random streams: of training, and of the texts that the result is measured on.
TRAIN_STREAM, CHECK_STREAM = "retain", "retain-check"


class TrainedGates(NamedTuple):
    """Result of `train_gate`.

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
    start: RetainingHeads | Gates | None = None,
    max_minutes: float | None = None,
    max_steps: int | None = None,
    threads: int | None = None,
    show_progress: bool = True,
) -> TrainedGates:
    """Train gates into the file `out`, continuing from `out`.checkpoint if there is one.

    Args:
        start: retaining heads or gates that these begin with, see `start_of`; gates have their own width.
        max_minutes: stop this call after that many minutes; call again to continue.
        max_steps: stop at this step of the whole run; for tests.
        threads: CPU threads of torch; None leaves them as they are.

    Raises:
        OptionError: the checkpoint is of another model, data or settings.
        CacheMismatchError: `start` is of another model or width, or has another adapter.
        NumericsError: a loss that is not finite; the checkpoint before it stays.
        UnsupportedModelError: a model whose rotation cannot be undone, with latents, or without position ids.
    """
    file = Path(out)
    file.parent.mkdir(parents=True, exist_ok=True)
    with cpu_threads(threads):
        reader = TextReader(model)
        projections = projection_sizes(ModelProfile.of(model)) if settings.lora else []
        run = new_run(settings, model_mark(model), texts.name, reader.sizes(), model.device, start, projections)
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
    pinned = pinned_entries(asked.begin, settings.sinks, settings.window, reader.model.device)
    flags: list[Tensor] = []

    def flag(layer: int, features: Tensor) -> Tensor:
        flags.append(straight_through(run.networks[layer](features.float()), pinned))
        return flags[-1]

    if settings.acts == "prompt":
        full = reader.predict(asked.ids, asked.begin)
        adapter = _adapter(run)
        with acting(ModelProfile.of(reader.model), [] if adapter is None else [(adapter, ALL)]):
            logits = read_inside(reader, asked, flag, settings.sinks, settings.window)
    else:
        prompt = reader.read_prompt(asked.ids, asked.begin)
        full, kept_flags = prompt.logits, [flag(index, layer.features) for index, layer in enumerate(prompt.layers)]
        logits = read_gated(reader.model, asked, prompt, kept_flags)
    predicted = prediction_loss(logits, full, asked.ids[asked.begin :], settings.teacher)
    loss, kept = gate_loss(predicted, flags, settings.target, settings.alpha)
    value = run.descend(loss, lambda gates: nn.utils.clip_grad_norm_(gates.parameters(), settings.clip), checkpoint)
    parts = predicted.detach(), kept.detach()
    return GateLogLine(run.step, 0.0, round(value, 5), *(round(float(part), 5) for part in parts))


@torch.no_grad()
def _measured(run: GateRun, reader: TextReader, texts: Texts, name: str) -> TrainedGates:
    """The gates as a file stores them, shifted to keep the target on held-out texts, and what they do there."""
    settings = run.settings
    layers, adapter = [_as_stored(gate) for gate in run.networks], _adapter(run, as_stored=True)
    asked = [texts.draw(CHECK_STREAM, settings.seed, step) for step in range(settings.check_texts)]
    judge = GateJudge(reader, settings.acts, settings.sinks, settings.window, adapter)
    shift = judge.shift_to(settings.target, layers, asked)
    moved = [replace(gate, b2=gate.b2 + shift) for gate in layers]
    hidden = zip(*(judge.judge(moved, text).hidden for text in asked), strict=True)
    kept_units = [pruned(*given) for given in zip(moved, hidden, strict=True)]
    gates = Gates(kept_units, run.mark, name, _facts(run), adapter=adapter)
    kept: list[Tensor] = []
    shares: list[float] = []
    same = total = 0
    for text in asked:
        found = judge.judge(gates.layers, text)
        kept.append(torch.stack([flags_of(logits, *judge.pins).mean(1) for logits in found.logits]))
        shares.append(share_of(found.logits, *judge.pins))
        same += int((found.predicted.argmax(-1) == reader.predict(text.ids, text.begin).argmax(-1)).sum())
        total += len(found.predicted)
    return TrainedGates(run, gates, shift, torch.stack(kept).mean(0).tolist(), shares, same / total)


def _adapter(run: GateRun, as_stored: bool = False) -> Adapter | None:
    """The adapter as it is now, or in the numbers of its file; None if none is trained."""
    layers = [gate.adapter for gate in run.networks if isinstance(gate, TrainedGate) and gate.adapter is not None]
    return Adapter([layer.as_stored() if as_stored else layer.added for layer in layers]) if layers else None


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
        ACTS: settings.acts,
        **({"lora": str(settings.lora)} if settings.lora else {}),
    }
