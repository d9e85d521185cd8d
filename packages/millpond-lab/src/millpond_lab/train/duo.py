"""Training of head classes (DuoAttention): one number per KV head, from 0 (streaming) to 1 (retrieval)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from millpond.errors import DataError, OptionError
from millpond.hf.calibration.load import model_mark
from millpond.hf.offline import read_later
from millpond_lab.pond.facts import stream
from millpond_lab.train.common.network_run import NetworkRun, RunSettings, StopLimits, checkpoint_of, cpu_threads
from millpond_lab.train.common.progress import step_progress
from millpond_lab.train.gate.objective import pinned_entries, prediction_loss
from millpond_lab.train.gate.weighted_attention import weighted_attention
from millpond_lab.train.retain.features import ReadPrompt, TextReader
from millpond_lab.train.retain.texts import Asked, Texts

#: The name of these texts as data.
SPANS = "spans"
#: Number of repeated spans in a text, and the least and most tokens of a span.
SAID_AGAIN, SPAN_TOKENS = 4, (12, 32)


class RepeatedSpans:
    """Texts of random tokens that end with repetitions of some of their spans.

    Args:
        vocabulary: tokens of the model. without: ids that are not drawn, such as those of the end of a text.
        shortest, longest: tokens before the spans.

    Raises:
        OptionError: texts too short for a span.
    """

    name = "spans of random tokens, said again"

    def __init__(self, vocabulary: int, without: Iterable[int] = (), shortest: int = 256, longest: int = 1024) -> None:
        if shortest < 2 * SPAN_TOKENS[1] or longest < shortest:
            raise OptionError(
                f"lengths {shortest} to {longest}: spans of up to {SPAN_TOKENS[1]} tokens need texts of at least "
                f"{2 * SPAN_TOKENS[1]}; give the shortest length first"
            )
        left_out = set(without)
        self._ids = np.array([i for i in range(vocabulary) if i not in left_out])
        self._lengths = shortest, longest

    def draw(self, stream_name: str, seed: int, step: int) -> Asked:
        """The text of one step of the stream `stream_name`."""
        rng = stream("spans", stream_name, seed, step)
        shortest, longest = self._lengths
        text = rng.choice(self._ids, int(rng.integers(shortest, longest + 1)))
        parts = [text]
        for _ in range(SAID_AGAIN):
            n = int(rng.integers(SPAN_TOKENS[0], SPAN_TOKENS[1] + 1))
            begin = int(rng.integers(len(text) - n + 1))
            parts.append(text[begin : begin + n])
        return Asked(torch.from_numpy(np.concatenate(parts)).long(), len(text))


#: Name of the random stream.
TRAIN_STREAM = "retain"
#: Digits behind the point of a number in the file.
DIGITS = 4


@dataclass(frozen=True)
class DuoSettings(RunSettings):
    """Settings of the training.

    Attributes:
        penalty: weight of the mean number of all heads. sinks, recent: first and newest entries of a prompt that a
            streaming head sees, besides the tokens behind it.
    """

    steps: int = 300
    lr: float = 0.02
    penalty: float = 0.5
    sinks: int = 4
    recent: int = 64

    def __post_init__(self) -> None:
        if self.penalty <= 0:
            raise OptionError(f"penalty={self.penalty} must be above 0: without one every head stays a retrieval head")


class DuoLogLine(NamedTuple):
    """One point of the learning curve."""

    step: int
    time_s: float
    loss: float
    alpha: float  # mean over all heads

    @property
    def said(self) -> str:
        return f"mean {self.alpha:.2f}"

    def timed(self, time_s: float) -> DuoLogLine:
        return self._replace(time_s=time_s)


DuoRun = NetworkRun[DuoSettings, DuoLogLine]


class HeadClasses(nn.Module):
    """Numbers of the KV heads of one layer; all start as retrieval heads."""

    def __init__(self, n_kv_heads: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(n_kv_heads))


class TrainedClasses(NamedTuple):
    """Result of `train_duo`: the run, and the numbers by layer and KV head."""

    run: DuoRun
    numbers: list[list[float]]


def train_duo(
    model: PreTrainedModel,
    texts: Texts,
    out: str | Path,
    settings: DuoSettings,
    *,
    max_minutes: float | None = None,
    max_steps: int | None = None,
    threads: int | None = None,
    show_progress: bool = True,
) -> TrainedClasses:
    """Train the numbers into the JSON file `out`, continuing from `out`.checkpoint if there is one.

    Departs from the paper: a prompt is read in full, and only the tokens behind it are mixed; predictions are compared
    in place of the last hidden states.

    Args: as of `train_gate`.

    Raises:
        OptionError: the checkpoint is of another model, data or settings.
        NumericsError: a loss that is not finite; the checkpoint before it stays.
        UnsupportedModelError: a model with latents, or without position ids.
        DataError: `out` cannot be written.
    """
    file = Path(out)
    file.parent.mkdir(parents=True, exist_ok=True)
    with cpu_threads(threads):
        reader = TextReader(model)
        classes = nn.ModuleList([HeadClasses(size.n_kv_heads) for size in reader.sizes()])
        run = DuoRun(settings, model_mark(model), texts.name, classes.to(model.device), DuoLogLine)
        if checkpoint_of(file).exists():
            run.load(checkpoint_of(file))
        with step_progress(show_progress, run.step, settings.steps) as show:
            run.go(
                lambda checkpoint: _step(run, reader, texts, checkpoint), file, StopLimits(max_minutes, max_steps), show
            )
    numbers = [[round(value, DIGITS) for value in alpha.tolist()] for alpha in _alphas(run)]
    try:
        file.write_text(json.dumps(numbers) + "\n", encoding="utf-8")
    except OSError as error:
        raise DataError(f"{str(file)!r} cannot be written: {error}") from error
    return TrainedClasses(run, numbers)


def _alphas(run: DuoRun) -> list[Tensor]:
    found: list[Tensor] = []
    for classes in run.networks:
        assert isinstance(classes, HeadClasses), "numbers of each layer"
        found.append(classes.alpha)
    return found


def _step(run: DuoRun, reader: TextReader, texts: Texts, checkpoint: Path) -> DuoLogLine:
    """One step of training: one text. `time_s` is left to the caller."""
    settings, alphas = run.settings, _alphas(run)
    asked = texts.draw(TRAIN_STREAM, settings.seed, run.step)
    prompt = reader.read_prompt(asked.ids, asked.begin)
    logits = read_mixed(reader.model, asked, prompt, alphas, settings)
    mean = torch.cat(alphas).mean()
    loss = prediction_loss(logits, prompt.logits, asked.ids[asked.begin :], "self") + settings.penalty * mean
    value = run.descend(loss, lambda classes: nn.utils.clip_grad_norm_(classes.parameters(), 1.0), checkpoint)
    with torch.no_grad():
        for alpha in alphas:
            alpha.clamp_(0, 1)
    return DuoLogLine(run.step, 0.0, round(value, 5), round(float(mean.detach()), 4))


def read_mixed(
    model: PreTrainedModel, asked: Asked, prompt: ReadPrompt, alphas: list[Tensor], settings: DuoSettings
) -> Tensor:
    """(m, vocabulary): predictions of the later tokens with heads mixed by `alphas` (KV heads,) per layer."""
    near = pinned_entries(asked.begin, settings.sinks, settings.recent, model.device).float()

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found, alpha = prompt.layers[layer], alphas[layer]
        full, streaming = (
            weighted_attention(q, k, v, found.keys, found.values, weights.expand(len(k), -1), found.shape)
            for weights in (torch.ones_like(near), near)
        )
        share = alpha.repeat_interleave(len(q) // len(k))[:, None, None]
        return share * full + (1 - share) * streaming

    return read_later(model, asked.ids[asked.begin :], asked.begin, attend)
