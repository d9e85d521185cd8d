"""Training recipe of `pond-text`: `train_text(folder, data)` from initial or trained weights, on a CPU or a GPU.

Every step is a function of (seed, step, state), and the state lies in one checkpoint file, so a run that was cut off
and called again ends with the weights of a run that was not (same machine, same threads).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from safetensors import SafetensorError
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

from millpond.errors import DataError, OptionError, unknown
from millpond.hf.document import fingerprint
from millpond_lab.train.common.network_run import Optimizers, cpu_threads, muon_and_adamw, save_curve, save_state
from millpond_lab.train.common.progress import no_bars
from millpond_lab.train.text.data import TokenFile, draw_batch, open_tokens
from millpond_lab.train.text.mix import Mixer
from millpond_lab.train.text.recipe import TextRecipe, build_text_model, save_text_model
from millpond_lab.train.text.tokenizer import TOKENIZER_FILE


class TextLogLine(NamedTuple):
    """One point of the learning curve: window and learning rate of that step, the mean loss since the line before."""

    step: int
    tokens: int
    time_s: float
    length: int
    rate: float
    loss: float


@dataclass
class TextRun:
    """A run as it stands.

    Attributes:
        planned: tokens of the whole run; the schedule is a function of `tokens / planned`.
        precision: of the forward and backward passes, bf16 or fp32; the weights are float32.
        history: what the card of the model that the run started from says of its training; empty from nothing.
        origin: the fingerprint of the weights that the run started from; empty from nothing.
        windows: windows read so far; names the place in the data.
    """

    model: LlamaForCausalLM
    optimizers: Optimizers
    recipe: TextRecipe
    seed: int
    planned: int
    precision: str = "bf16"
    history: str = ""
    origin: str = ""
    step: int = 0
    tokens: int = 0
    windows: int = 0
    time_s: float = 0.0
    log: list[TextLogLine] = field(default_factory=list)

    @property
    def share(self) -> float:
        """Share of the planned tokens, 0 to 1."""
        return self.tokens / self.planned

    @property
    def finished(self) -> bool:
        """Whether all planned tokens are read."""
        return self.tokens >= self.planned

    def save(self, file: Path) -> None:
        """Write the run to `file`; a crash while writing leaves the older file whole."""
        state: dict[str, Any] = {name: getattr(self, name) for name in _KEPT}
        state["recipe"] = self.recipe.name
        state["log"] = [tuple(line) for line in self.log]
        state["model"] = self.model.state_dict()
        state["optimizers"] = self.optimizers.state_dict()
        save_state(state, file)

    def load(self, file: Path) -> None:
        """Continue where `file` stands.

        The number of planned tokens may be another one as long as no step taken so far depended on it.

        Raises:
            OptionError: the checkpoint was begun with another seed or recipe, or another plan that already counts.
        """
        state = torch.load(file, map_location=self.model.device, weights_only=True)
        for name, own in (("seed", self.seed), ("recipe", self.recipe.name), ("precision", self.precision)):
            if state[name] != own:
                raise OptionError(f"{file} was begun with {name} {state[name]}, not {own}; use another folder")
        if self.origin and state["origin"] != self.origin:
            raise OptionError(f"{file} was begun with other weights than those of --start; use another folder")
        settled = self.recipe.first_mark * min(state["planned"], self.planned)
        if state["planned"] != self.planned and state["tokens"] > settled:
            raise OptionError(
                f"{file} has read {state['tokens']:,} of {state['planned']:,} planned tokens, too many to plan "
                f"{self.planned:,} instead; ask for {state['planned']:,} or use another folder"
            )
        self.model.load_state_dict(state["model"])
        self.optimizers.load_state_dict(state["optimizers"])
        for name in ("history", "origin", "step", "tokens", "windows", "time_s"):
            setattr(self, name, state[name])
        self.log = [TextLogLine(*line) for line in state["log"]]


_KEPT = ("seed", "planned", "precision", "history", "origin", "step", "tokens", "windows", "time_s")


_SHAPE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rope_parameters",
)
CARD_FILE, TRAINING = "MODEL_CARD.md", "## Training\n"


def begin_with(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> tuple[str, str]:
    """Give `model` the weights of the one saved in `folder`.

    Returns:
        What its card says of its training, and the fingerprint of the weights.

    Raises:
        DataError: `folder` holds no such model, or one of another shape or vocabulary.
    """
    try:
        with no_bars():
            earlier = AutoModelForCausalLM.from_pretrained(folder, dtype=model.dtype, trust_remote_code=False)
        vocabulary = Tokenizer.from_file(str(folder / TOKENIZER_FILE)).get_vocab()
        if _shape(earlier) != _shape(model):
            raise ValueError(f"its shape is {_shape(earlier)}, that of the recipe {_shape(model)}")
        model.load_state_dict(earlier.state_dict())
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise DataError(f"{folder} holds no pond-text to start from: {error}") from error
    if vocabulary != tokenizer.get_vocab():
        raise DataError(
            f"{folder} has another vocabulary than these documents give; start from a model that was grown on them"
        )
    card = folder / CARD_FILE
    if not card.is_file():
        return "", fingerprint(model)
    return card.read_text(encoding="utf-8").partition(TRAINING)[2], fingerprint(model)


def _shape(model: PreTrainedModel) -> dict[str, object]:
    """The numbers of the config that a recipe decides."""
    return {name: getattr(model.config, name) for name in _SHAPE}


@contextmanager
def training_progress(run: TextRun, visible: bool) -> Iterator[Callable[[TextRun], None]]:
    """A progress bar over the planned tokens; yields the function that moves it."""
    text = TextColumn("{task.description}  {task.completed:,.0f} of {task.total:,.0f} tokens  {task.fields[about]}")
    columns = (text, BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, disable=not visible, refresh_per_second=2) as bar:
        task = bar.add_task("pond-text", total=run.planned, completed=run.tokens, about="")

        def show(run: TextRun) -> None:
            line = run.log[-1]
            about = f"window {line.length:,}  loss {line.loss:.3f}  {run.tokens / run.time_s:,.0f} tokens/s"
            bar.update(task, completed=run.tokens, about=about)

        yield show


CHECKPOINT, LOG = "checkpoint.pt", "log.jsonl"
PRECISIONS = ("bf16", "fp32")
LOG_EVERY = 10  # steps
CHECKPOINT_EVERY_S = 180.0
PASS_TOKENS = 32_768  # in one forward pass at most; a step of more gathers gradients

Loss = Callable[[Tensor, Tensor], Tensor]


class _Step(NamedTuple):
    """What one step was like; the loss in nats per token."""

    length: int
    rate: float
    loss: float


def train_text(
    out_dir: str | Path,
    data: str | Path,
    recipe: TextRecipe,
    *,
    seed: int = 0,
    tokens: int | None = None,
    max_minutes: float | None = None,
    max_steps: int | None = None,
    threads: int | None = None,
    device: str | None = None,
    compiled: bool = False,
    precision: str = "bf16",
    start: str | Path | None = None,
    show_progress: bool = True,
) -> tuple[TextRun, TokenFile]:
    """Train `pond-text` into `out_dir`, continuing from its checkpoint if there is one.

    A run is one term of training: its own schedule, optimisers that begin again. A second term starts from the model
    that a first one saved.

    Args:
        out_dir: gets the model folder, `checkpoint.pt`, `log.jsonl`, and the documents as tokens.
        data: folder with `*.txt` and `gutenberg/*.txt`.
        recipe: its shape and its schedule.
        seed: weights and data; the same seed gives the same run.
        tokens: read in the whole run; None takes the recipe's number.
        max_minutes: stop this call after that many minutes; call again to continue.
        max_steps: stop at this step of the whole run; for tests.
        threads: CPU threads of torch; None leaves them as they are.
        device: None takes CUDA when there is one, else the CPU.
        compiled: let torch compile the forward pass: some minutes once for faster steps. Needs a C++ compiler.
        precision: `bf16` (autocast) or `fp32` of the passes; float32 is the faster one on a CPU without bf16 units.
        start: folder of the model that the run begins with; None begins with fresh weights.
        show_progress: draw a progress bar.

    Returns:
        The run as it stands, its model on `device`, and the tokens that it reads.

    Raises:
        DataError: no documents in `data`, `out_dir` holds the tokens of others, or `start` holds a model of another
            shape or vocabulary.
        OptionError: unknown precision, or `out_dir` holds a checkpoint of another seed, recipe, precision or start, or
            of a plan that cannot be changed.
    """
    if precision not in PRECISIONS:
        raise unknown("precision", precision, PRECISIONS)
    folder = Path(out_dir)
    begun = time.monotonic()
    text = open_tokens(Path(data), folder, recipe.vocab_size)
    with cpu_threads(threads):
        run = _new_run(recipe, seed, tokens or recipe.tokens, precision, device, text, start)
        if (folder / CHECKPOINT).exists():
            run.load(folder / CHECKPOINT)
        loss_of = _loss_of(run.model, compiled)
        mixer = Mixer(text.tokenizer)
        with training_progress(run, show_progress) as show:
            before_s, started = run.time_s, time.monotonic()
            saved = started
            done: list[_Step] = []
            while not run.finished and (max_steps is None or run.step < max_steps):
                done.append(_step(run, text, mixer, loss_of))
                run.time_s = before_s + time.monotonic() - started
                if run.step % LOG_EVERY and not run.finished:
                    continue
                run.log.append(_line(run, done))
                done = []
                show(run)
                if time.monotonic() - saved > CHECKPOINT_EVERY_S:
                    _keep(run, folder)
                    saved = time.monotonic()
                if max_minutes is not None and time.monotonic() - begun > 60 * max_minutes:
                    break
        _keep(run, folder)
        save_text_model(run.model, text.tokenizer, folder)
    return run, text


def _new_run(
    recipe: TextRecipe,
    seed: int,
    planned: int,
    precision: str,
    device: str | None,
    text: TokenFile,
    start: str | Path | None,
) -> TextRun:
    """A run before its first step."""
    model = build_text_model(recipe, text.tokenizer.get_vocab_size(), seed)
    history, origin = ("", "") if start is None else begin_with(model, text.tokenizer, Path(start))
    model.to(torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")))  # type: ignore[arg-type]
    optimizers = muon_and_adamw(
        model, muon_lr=recipe.muon_lr, adamw_lr=recipe.adamw_lr, betas=recipe.betas, weight_decay=recipe.weight_decay
    )
    return TextRun(model, optimizers, recipe, seed, planned, precision, history, origin)


def _step(run: TextRun, text: TokenFile, mixer: Mixer, loss_of: Loss) -> _Step:
    """One step of training."""
    recipe, device = run.recipe, run.model.device
    length = recipe.length_at(run.share)
    windows = max(1, recipe.tokens_per_step // length)
    inputs, targets = draw_batch(
        text,
        mixer,
        seed=run.seed,
        step=run.step,
        first=run.windows,
        windows=windows,
        length=length,
        tasks=recipe.tasks_at(run.share),
    )
    rate = recipe.rate_at(run.step, run.share)
    run.optimizers.set_rate(rate)
    size = max(1, PASS_TOKENS // length)
    total = 0.0
    for begin in range(0, windows, size):
        x, y = inputs[begin : begin + size], targets[begin : begin + size]
        with torch.autocast(device.type, torch.bfloat16, enabled=run.precision == "bf16"):
            loss = loss_of(x.to(device), y.to(device)) * (len(x) / windows)
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    torch.nn.utils.clip_grad_norm_(run.model.parameters(), recipe.clip)
    run.optimizers.step()
    run.step, run.tokens, run.windows = run.step + 1, run.tokens + windows * length, run.windows + windows
    return _Step(length, rate, total)


def _loss_of(model: LlamaForCausalLM, compiled: bool) -> Loss:
    """Mean negative log-likelihood of the targets in nats, in float32 from the logits on."""

    def loss(inputs: Tensor, targets: Tensor) -> Tensor:
        hidden = model.model(input_ids=inputs, use_cache=False).last_hidden_state  # (B, L, D)
        logits = model.lm_head(hidden).float()  # (B, L, vocab)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    if not compiled:
        return loss
    fast: Loss = torch.compile(loss, dynamic=False)
    return fast


def _line(run: TextRun, done: list[_Step]) -> TextLogLine:
    loss = sum(step.loss for step in done) / len(done)
    return TextLogLine(
        run.step, run.tokens, round(run.time_s, 1), done[-1].length, round(done[-1].rate, 4), round(loss, 4)
    )


def _keep(run: TextRun, folder: Path) -> None:
    """Write the checkpoint and the curve."""
    run.save(folder / CHECKPOINT)
    save_curve(run.log, folder / LOG)
