"""Training of retaining heads: `train_retain(model, texts, out)` on a frozen model, on a CPU or a GPU.

Every step is a function of (settings, step, state), and the state lies in one checkpoint file, so a run that was cut
off and called again ends with the weights of a run that was not (same machine, same threads).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
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
from millpond_lab.train.common.card import write_network_card
from millpond_lab.train.common.network_run import NetworkRun, RunSettings, StopLimits, checkpoint_of, cpu_threads
from millpond_lab.train.common.progress import step_progress
from millpond_lab.train.retain.features import HeadSizes, Label, LayerText, TextReader
from millpond_lab.train.retain.texts import Texts

#: Weight of the squared differences of neighbouring scores, as in the paper's code.
NEIGHBOURS = 0.0025


class TrainedHeads(nn.Module):
    """The network of one layer while it is trained: W2 SiLU(W1 x + b1) + b2."""

    def __init__(self, inputs: int, width: int, n_kv_heads: int) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, width)
        self.second = nn.Linear(width, n_kv_heads)

    def forward(self, features: Tensor) -> Tensor:
        """(KV heads, n) raw scores of features (n, inputs)."""
        raw: Tensor = self.second(F.silu(self.first(features)))
        return raw.T


def retaining_loss(scores: list[Tensor], labels: list[Tensor]) -> Tensor:
    """Mean over layers, heads and tokens of smooth L1(s, label) + 0.0025 sum over layers of mean (s_t - s_t+1)^2.

    Args:
        scores, labels: one (KV heads, n) per layer.
    """
    fit = torch.stack([F.smooth_l1_loss(s, y) for s, y in zip(scores, labels, strict=True)]).mean()
    rough = torch.stack([(s[:, 1:] - s[:, :-1]).square().mean() for s in scores]).sum()
    return fit + NEIGHBOURS * rough


def overlap(scores: Tensor, labels: Tensor, share: float = 0.1) -> Tensor:
    """(KV heads,) of the `share` entries with the highest labels, how many have the highest scores.

    Args:
        scores, labels: (KV heads, n).
    """
    n = scores.shape[1]
    count = max(1, round(share * n))
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, scores.topk(count, 1).indices, True)
    best = torch.zeros_like(chosen).scatter_(1, labels.topk(count, 1).indices, True)
    return (chosen & best).sum(1) / count


@dataclass(frozen=True)
class RetainSettings(RunSettings):
    """The numbers of the recipe.

    Attributes:
        label: see `labels_of`. width: of the networks. clip: of each gradient.
        budget, chunk: entries per KV head and tokens, where texts are read with eviction; 0: with full attention.
    """

    label: Label = "log_prob"
    width: int = 1024
    clip: float = 0.5
    budget: int = 0
    chunk: int = 0


class RetainLogLine(NamedTuple):
    """One point of the learning curve."""

    step: int
    time_s: float
    loss: float
    overlap: float  # of the text's best tenth, mean over heads

    @property
    def said(self) -> str:
        return f"best tenth {self.overlap:.2f}"

    def timed(self, time_s: float) -> RetainLogLine:
        return self._replace(time_s=time_s)


RetainRun = NetworkRun[RetainSettings, RetainLogLine]


def new_run(settings: RetainSettings, mark: str, data: str, sizes: list[HeadSizes], device: torch.device) -> RetainRun:
    """A run that begins. Equal seeds give equal weights; the caller's random state is kept."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        heads = nn.ModuleList([TrainedHeads(s.inputs, settings.width, s.n_kv_heads) for s in sizes])
    return RetainRun(settings, mark, data, heads.to(device), RetainLogLine)


#: Names of the random streams: of training, and of the texts behind quantiles and overlap.
TRAIN_STREAM, CHECK_STREAM = "retain", "retain-check"


class TrainedResult(NamedTuple):
    """Result of `train_retain`.

    Attributes:
        overlaps: by layer and KV head, share of the best tenth of the entries of held-out texts that is chosen.
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

| layer | {columns} |
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
    return write_network_card(
        CARD,
        run,
        out,
        name=name,
        mark=result.heads.model,
        hardware=hardware,
        curve=COLUMNS,
        n_heads=max(len(row) for row in result.overlaps),
        chunks=chunks,
        label="log-probability (at least -12)" if settings.label == "log_prob" else "logit before the softmax",
        neighbours=NEIGHBOURS,
        clip=settings.clip,
        width=settings.width,
        overlaps="\n".join(
            f"| {layer} | {' | '.join(f'{value:.2f}' for value in row)} |" for layer, row in enumerate(result.overlaps)
        ),
    )
