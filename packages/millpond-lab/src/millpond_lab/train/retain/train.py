"""Training of retaining heads: `train_retain(model, texts, out)` on a frozen model, on a CPU or a GPU.

Every step is a function of (settings, step, state), and the state lies in one checkpoint file, so a run that was cut
off and called again ends with the weights of a run that was not (same machine, same threads).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from millpond.hf.calibration.load import model_mark
from millpond.hf.model_profile import ModelProfile
from millpond.policy.policy import Policy
from millpond.policy.protect import Protect
from millpond.policy.scores.trained import Retained
from millpond.policy.trained.file import save_heads
from millpond.policy.trained.networks import (
    LARGE,
    QUANTILE_STEPS,
    LayerHeads,
    RetainingHeads,
    default_width,
    quantiles_of,
)
from millpond_lab.train.common.checkpoint import cpu_threads
from millpond_lab.train.common.network_run import StopLimits, checkpoint_of
from millpond_lab.train.common.step_progress import step_progress
from millpond_lab.train.retain.features import LayerText, TextReader
from millpond_lab.train.retain.objective import TrainedHeads, overlap, retaining_loss
from millpond_lab.train.retain.run import RetainLogLine, RetainRun, RetainSettings, new_run
from millpond_lab.train.retain.texts import Texts

#: Names of the random streams: of training, and of the texts behind quantiles and overlap.
TRAIN_STREAM, CHECK_STREAM = "retain", "retain-check"


class TrainedResult(NamedTuple):
    """What a call of `train_retain` came to.

    Attributes:
        overlaps: of each layer, by KV head: of the best tenth of the entries of held-out texts, how many are chosen.
    """

    run: RetainRun
    heads: RetainingHeads
    overlaps: list[list[float]]


def train_retain(
    model: PreTrainedModel,
    texts: Texts,
    out: str | Path,
    settings: RetainSettings,
    *,
    max_minutes: float | None = None,
    max_steps: int | None = None,
    threads: int | None = None,
    show_progress: bool = True,
) -> TrainedResult:
    """Train heads into the file `out`, continuing from `out`.checkpoint if there is one.

    Args:
        max_minutes: stop this call after that many minutes; call again to continue. What was learned until then is
            written, at a learning rate that had not fallen yet.
        max_steps: stop at this step of the whole run; for tests.
        threads: CPU threads of torch; None leaves them as they are.

    Raises:
        OptionError: the checkpoint is of another model, data or settings.
        NumericsError: a loss that is not finite; the checkpoint before it stays.
        UnsupportedModelError: a model whose rotation cannot be undone, or with latents.
    """
    file = Path(out)
    file.parent.mkdir(parents=True, exist_ok=True)
    with cpu_threads(threads):
        reader = TextReader(model, settings.label)
        run = new_run(settings, model_mark(model), texts.name, reader.sizes(), model.device)
        if checkpoint_of(file).exists():
            run.load(checkpoint_of(file))
        with step_progress(show_progress, run.step, settings.steps) as show:
            run.go(
                lambda checkpoint: _step(run, reader, texts, checkpoint), file, StopLimits(max_minutes, max_steps), show
            )
        heads, overlaps = _measured(run, reader, texts, type(model).__name__)
    save_heads(heads, file)
    return TrainedResult(run, heads, overlaps)


def _step(run: RetainRun, reader: TextReader, texts: Texts, checkpoint: Path) -> RetainLogLine:
    """One step of training: one text. `time_s` is left to the caller."""
    found = _read(run, reader, texts, TRAIN_STREAM, run.step)
    if run.step == 0:
        _begin_at_mean(run, found)
    labels = [text.labels for text in found]
    scores = [head(text.features.float()) for head, text in zip(run.networks, found, strict=True)]
    clip = run.settings.clip
    loss = run.descend(
        retaining_loss(scores, labels), lambda heads: nn.utils.clip_grad_value_(heads.parameters(), clip), checkpoint
    )
    best = torch.stack([overlap(s.detach(), y).mean() for s, y in zip(scores, labels, strict=True)]).mean()
    return RetainLogLine(run.step, 0.0, round(loss, 5), round(float(best), 4))


def _begin_at_mean(run: RetainRun, found: Sequence[LayerText]) -> None:
    """Let the networks begin at the mean label of each head."""
    with torch.no_grad():
        for head, text in zip(run.networks, found, strict=True):
            assert isinstance(head, TrainedHeads), "one network per layer"
            head.second.bias.copy_(text.labels.mean(1))


def _read(run: RetainRun, reader: TextReader, texts: Texts, name: str, step: int) -> list[LayerText]:
    """Features and labels of the text of one step."""
    settings = run.settings
    ids, begin = texts.draw(name, settings.seed, step)
    evicts = settings.chunk and name == TRAIN_STREAM and step >= settings.steps // 4 and step % 2
    if not evicts or begin <= settings.budget:
        return reader.read(ids, begin)
    return reader.read(ids, begin, _evicting(run), settings.budget)


def _evicting(run: RetainRun) -> Policy:
    """Eviction in chunks by the heads as they are: the past that they will meet, not that of full attention."""
    plain = torch.linspace(-12, 0, QUANTILE_STEPS + 1)
    layers = [_as_stored(head, plain) for head in run.networks]
    return Policy(
        score=Retained(RetainingHeads(layers, run.mark, "in training")),
        protect=Protect(sinks=4),
        every_step=False,
        prefill="chunks",
        chunk=run.settings.chunk,
        stabilizers=0.25,
    )


@torch.no_grad()
def _measured(run: RetainRun, reader: TextReader, texts: Texts, name: str) -> tuple[RetainingHeads, list[list[float]]]:
    """The heads as a file stores them, with quantiles from held-out texts; and their overlaps with the best tenth."""
    plain = torch.linspace(-12, 0, QUANTILE_STEPS + 1)
    layers = [_as_stored(head, plain) for head in run.networks]
    raws: list[list[Tensor]] = [[] for _ in layers]
    overlaps: list[list[Tensor]] = [[] for _ in layers]
    for step in range(run.settings.check_texts):
        for index, text in enumerate(_read(run, reader, texts, CHECK_STREAM, step)):
            raw = layers[index].raw(text.features.float()).T
            raws[index].append(raw)
            overlaps[index].append(overlap(raw, text.labels))
    made = [
        LayerHeads(heads.w1, heads.b1, heads.w2, heads.b2, quantiles_of(torch.cat(raw, 1)))
        for heads, raw in zip(layers, raws, strict=True)
    ]
    facts = {
        "data": run.data,
        "steps": str(run.step),
        "seed": str(run.settings.seed),
        "label": run.settings.label,
        "budget": str(run.settings.budget),
        "chunk": str(run.settings.chunk),
        "width": str(run.settings.width),
    }
    return RetainingHeads(made, run.mark, name, facts), [torch.stack(o).mean(0).tolist() for o in overlaps]


def _as_stored(head: object, plain: Tensor) -> LayerHeads:
    """A network in the numbers of its file."""
    assert isinstance(head, TrainedHeads), "one network per layer"
    parts = head.first.weight, head.first.bias, head.second.weight, head.second.bias
    w1, b1, w2, b2 = (part.detach().bfloat16().float() for part in parts)
    return LayerHeads(w1, b1, w2, b2, plain.to(w1.device).repeat(len(b2), 1))


def defaults_of(model: PreTrainedModel) -> tuple[int, float]:
    """Width of the networks and learning rate for a model."""
    hidden = int(ModelProfile.of(model).config.hidden_size)
    return default_width(hidden), 5e-4 if hidden >= LARGE else 3e-3
