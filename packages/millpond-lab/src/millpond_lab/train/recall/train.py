"""Training recipe of `pond-recall`: `train_recall(folder)` from initial weights, on a CPU or a GPU.

Every step is a function of (seed, step, state), and the state lies in one checkpoint file, so a run that was
cut off and called again ends with the weights of a run that was not (same machine, same threads).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor
from transformers import LlamaForCausalLM

from millpond.errors import OptionError
from millpond_lab.train.common.network_run import Optimizers, cpu_threads, muon_and_adamw, save_curve, save_state
from millpond_lab.train.recall.model import build_model, save_bundle
from millpond_lab.train.recall.rows import LENGTHS, NO_WORD, Curriculum, TrainingBatch


@dataclass(frozen=True)
class Recipe:
    """The numbers of the recipe."""

    muon_lr: float = 4e-3
    adamw_lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.01
    clip: float = 1.0
    warmup_steps: int = 100
    tokens_per_step: int = 4096
    polish_steps: int = 4600
    checkpoint_steps: int = 200
    bf16: bool = True


class RecallLogLine(NamedTuple):
    """One point of the learning curve."""

    step: int
    time_s: float
    stage: int
    loss: float
    accuracy: list[float]  # running, per family


@dataclass
class RecallRun:
    """A training run between two steps: all that a checkpoint holds."""

    model: LlamaForCausalLM
    optimizers: Optimizers
    seed: int
    step: int = 0
    time_s: float = 0.0
    curriculum: Curriculum = field(default_factory=Curriculum)
    log: list[RecallLogLine] = field(default_factory=list)

    def save(self, file: Path) -> None:
        """Write the run to `file`; a crash while writing leaves the older file whole."""
        state: dict[str, Any] = {name: getattr(self, name) for name in ("seed", "step", "time_s")}
        state["curriculum"] = self.curriculum.state()
        state["log"] = [tuple(line) for line in self.log]
        state["model"] = self.model.state_dict()
        state["optimizers"] = self.optimizers.state_dict()
        save_state(state, file)

    def load(self, file: Path) -> None:
        """Continue where `file` stands.

        Raises:
            OptionError: when the checkpoint was begun with another seed.
        """
        state = torch.load(file, map_location=self.model.device, weights_only=True)
        if state["seed"] != self.seed:
            raise OptionError(f"{file} was begun with seed {state['seed']}, not {self.seed}; use another folder")
        self.model.load_state_dict(state["model"])
        self.optimizers.load_state_dict(state["optimizers"])
        self.step, self.time_s = state["step"], state["time_s"]
        self.curriculum = Curriculum(**state["curriculum"])
        self.log = [RecallLogLine(*line) for line in state["log"]]


@contextmanager
def training_progress(visible: bool, recipe: Recipe) -> Iterator[Callable[[RecallRun, RecallLogLine], None]]:
    """A progress bar over the stages and the polish; yields the function that moves it."""
    text = TextColumn("step {task.fields[step]}  {task.description}  loss {task.fields[loss]:.3f}")
    with Progress(text, BarColumn(), TimeElapsedColumn(), disable=not visible) as bar:
        task = bar.add_task("starting", total=len(LENGTHS) + 1, step=0, loss=0.0)

        def show(run: RecallRun, line: RecallLogLine) -> None:
            place = run.curriculum
            what = "polish" if place.polishing else f"{LENGTHS[place.stage]} words"
            done = place.stage + place.polished / max(1, recipe.polish_steps)
            about = f"{what}  right {place.mean:.3f}"
            bar.update(task, completed=done, description=about, step=run.step, loss=line.loss)

        yield show


CHECKPOINT = "checkpoint.pt"
LOG_EVERY = 25  # steps
SHORT_ROWS = 320  # tokens up to which plain attention trains faster than the blocked kind on a CPU (measured)


def train_recall(
    out_dir: str | Path,
    *,
    seed: int = 0,
    max_minutes: float | None = None,
    max_steps: int | None = None,
    threads: int | None = None,
    device: str | None = None,
    recipe: Recipe | None = None,
    show_progress: bool = True,
) -> RecallRun:
    """Train `pond-recall` into `out_dir`, continuing from its checkpoint if there is one.

    Args:
        out_dir: gets the model folder (at every checkpoint), `checkpoint.pt` and `log.jsonl`.
        seed: weights and data; the same seed gives the same run.
        max_minutes: stop this call after that many minutes; call again to continue.
        max_steps: stop at this step of the whole run; for tests.
        threads: CPU threads of torch; None leaves them as they are.
        device: None takes CUDA when there is one, else the CPU.
        recipe: the numbers of the recipe; None takes those of the bundled model.
        show_progress: draw a progress bar.

    Returns:
        The run as it stands, its model on `device`.

    Raises:
        OptionError: when `out_dir` holds a checkpoint of another seed.
    """
    folder, recipe = Path(out_dir), recipe or Recipe()
    folder.mkdir(parents=True, exist_ok=True)
    with cpu_threads(threads), training_progress(show_progress, recipe) as show:
        run = _start(folder, seed, device or ("cuda" if torch.cuda.is_available() else "cpu"), recipe)
        begun, before_s = time.monotonic(), run.time_s
        while not _finished(run, recipe, max_steps):
            line = _step(run, recipe)
            run.time_s = before_s + time.monotonic() - begun
            if run.step % LOG_EVERY == 0:
                run.log.append(line._replace(time_s=round(run.time_s, 1)))
            show(run, line)
            if run.step % recipe.checkpoint_steps == 0:
                _keep(run, folder)
            if max_minutes is not None and time.monotonic() - begun > 60 * max_minutes:
                break
    _keep(run, folder)
    return run


def _start(folder: Path, seed: int, device: str, recipe: Recipe) -> RecallRun:
    """A new run, or the one whose checkpoint lies in `folder`."""
    model = build_model(seed)
    model.to(torch.device(device))  # type: ignore[arg-type]
    optimizers = muon_and_adamw(
        model, muon_lr=recipe.muon_lr, adamw_lr=recipe.adamw_lr, betas=recipe.betas, weight_decay=recipe.weight_decay
    )
    run = RecallRun(model, optimizers, seed)
    if (folder / CHECKPOINT).exists():
        run.load(folder / CHECKPOINT)
    return run


def _finished(run: RecallRun, recipe: Recipe, max_steps: int | None) -> bool:
    """Whether the polish or the requested number of steps is done."""
    return run.curriculum.polished >= recipe.polish_steps or (max_steps is not None and run.step >= max_steps)


def _step(run: RecallRun, recipe: Recipe) -> RecallLogLine:
    """One step of training; `time_s` is left to the caller."""
    place = run.curriculum
    stage, warm_up, polishing = place.stage, place.is_warm_up(run.step), place.polishing
    batch = place.batch(seed=run.seed, step=run.step, tokens=recipe.tokens_per_step)
    run.optimizers.set_rate(_rate(run, recipe))
    loss, right = _learn(run, batch, recipe)
    run.step += 1
    place.polished += polishing
    if not warm_up:
        place.note(right)
    return RecallLogLine(run.step, 0.0, stage, round(loss, 4), [round(share, 4) for share in place.accuracy])


def _rate(run: RecallRun, recipe: Recipe) -> float:
    """Warm up linearly, hold, and fall linearly to zero over the polish."""
    rise = min(1.0, (run.step + 1) / recipe.warmup_steps)
    return rise * (1.0 - run.curriculum.polished / max(1, recipe.polish_steps))


def _learn(run: RecallRun, batch: TrainingBatch, recipe: Recipe) -> tuple[float, dict[int, float]]:
    """Forward, backward, update; returns the loss (nats) and the share of right words per family."""
    device = run.model.device
    batch = TrainingBatch(*(part.to(device) for part in batch))
    run.model.config._attn_implementation = "eager" if batch.tokens.shape[1] <= SHORT_ROWS else "sdpa"
    with torch.autocast(device.type, torch.bfloat16, enabled=recipe.bf16):
        logits = supervised_logits(run.model, batch)
    loss = accepted_loss(logits, batch.accepted)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(run.model.parameters(), recipe.clip)
    run.optimizers.step()
    right = (logits.argmax(dim=-1, keepdim=True) == batch.accepted).any(-1)
    return float(loss.detach()), _shares(batch.family[batch.supervised], right)


def _shares(family: Tensor, right: Tensor) -> dict[int, float]:
    """The share of right words of each family that there is."""
    return {kind: float(right[family == kind].float().mean()) for kind in set(family.tolist()) if kind >= 0}


def supervised_logits(model: LlamaForCausalLM, batch: TrainingBatch) -> Tensor:
    """Logits at the supervised places only: (places, vocab). The head never sees the rest.

    The mask of ones says that a jump of positions does not begin another sequence.
    """
    hidden = model.model(
        input_ids=batch.tokens,
        position_ids=batch.positions,
        attention_mask=torch.ones_like(batch.tokens),
        use_cache=False,
    ).last_hidden_state  # (B, L, D)
    logits: Tensor = model.lm_head(hidden[batch.supervised])
    return logits


def accepted_loss(logits: Tensor, accepted: Tensor) -> Tensor:
    """Minus the log of the probability of all accepted tokens together, mean over the places, in nats.

    Args:
        logits: (places, vocab). accepted: (places, K) tokens; NO_WORD fills up.
    """
    every = logits.float().log_softmax(-1).gather(-1, accepted.clamp(min=0))
    return -every.masked_fill(accepted == NO_WORD, -torch.inf).logsumexp(-1).mean()


def _keep(run: RecallRun, folder: Path) -> None:
    """Write the checkpoint, the model folder and the curve."""
    run.save(folder / CHECKPOINT)
    save_bundle(run.model, folder)
    save_curve(run.log, folder / "log.jsonl")
