"""The recipe of the bundled model: `train_bundled(folder)` grows it from nothing, on a CPU or a GPU.

Every step is a function of (seed, step, state), and the state lies in one checkpoint file, so a run that was
cut off and called again ends with the weights of a run that was not (same machine, same threads).
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaForCausalLM

from millpond.train.bundled_model import build_model, save_bundle
from millpond.train.curriculum import draw_batch, is_copy_step
from millpond.train.progress import training_progress
from millpond.train.recall_data import Batch
from millpond.train.run import LogLine, Recipe, Run

CHECKPOINT = "checkpoint.pt"
LOG_EVERY = 25  # steps


def train_bundled(
    out_dir: str | Path,
    *,
    seed: int = 0,
    max_minutes: float | None = None,
    max_steps: int | None = None,
    threads: int | None = None,
    device: str | None = None,
    recipe: Recipe | None = None,
    show_progress: bool = True,
) -> Run:
    """Train the bundled model into `out_dir`, going on from its checkpoint if there is one.

    Args:
        out_dir: gets the model folder (at every checkpoint), `checkpoint.pt` and `log.jsonl`.
        seed: weights and data; the same seed gives the same run.
        max_minutes: stop after so many minutes of this call; call again to go on.
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
    with _threads(threads), training_progress(show_progress, recipe) as show:
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


def _start(folder: Path, seed: int, device: str, recipe: Recipe) -> Run:
    """A new run, or the one whose checkpoint lies in `folder`."""
    model = build_model(seed)
    model.to(torch.device(device))  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.lr, betas=recipe.betas, weight_decay=recipe.weight_decay
    )
    run = Run(model, optimizer, seed)
    if (folder / CHECKPOINT).exists():
        run.load(folder / CHECKPOINT)
    return run


def _finished(run: Run, recipe: Recipe, max_steps: int | None) -> bool:
    """Whether the polish is done or the asked number of steps."""
    return run.curriculum.polished >= recipe.polish_steps or (max_steps is not None and run.step >= max_steps)


def _step(run: Run, recipe: Recipe) -> LogLine:
    """One step of training; `time_s` is left to the caller."""
    place = run.curriculum
    copying = is_copy_step(place, run.step)
    batch = draw_batch(place, seed=run.seed, step=run.step, tokens=recipe.tokens_per_step)
    _set_lr(run, recipe)
    loss, recall = _learn(run, batch, recipe)
    line = LogLine(run.step + 1, 0.0, place.stage, round(loss, 4), round(recall, 4))
    run.step += 1
    place.polished += place.polishing
    if not copying:
        place.note(recall)
    return line


def _set_lr(run: Run, recipe: Recipe) -> None:
    """Warm up linearly, hold, and fall linearly to zero over the polish."""
    rise = min(1.0, (run.step + 1) / recipe.warmup_steps)
    fall = 1.0 - run.curriculum.polished / max(1, recipe.polish_steps)
    for group in run.optimizer.param_groups:
        group["lr"] = recipe.lr * rise * fall


def _learn(run: Run, batch: Batch, recipe: Recipe) -> tuple[float, float]:
    """Forward, backward, update; returns the loss (nats) and the share of right answers."""
    device = run.model.device
    targets = batch.targets.to(device)
    with torch.autocast(device.type, torch.bfloat16, enabled=recipe.bf16):
        logits = supervised_logits(run.model, batch.tokens.to(device), batch.supervised.to(device))
    loss = F.cross_entropy(logits.float(), targets)
    run.optimizer.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(run.model.parameters(), recipe.clip)
    run.optimizer.step()
    return float(loss.detach()), float((logits.argmax(dim=-1) == targets).float().mean())


def supervised_logits(model: LlamaForCausalLM, tokens: Tensor, supervised: Tensor) -> Tensor:
    """Logits at the supervised places only: (n_supervised, vocab). The head never sees the rest."""
    hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state  # (B, L, D)
    logits: Tensor = model.lm_head(hidden[supervised])
    return logits


def _keep(run: Run, folder: Path) -> None:
    """Write the checkpoint, the model folder and the curve."""
    run.save(folder / CHECKPOINT)
    save_bundle(run.model, folder)
    lines = [json.dumps(line._asdict()) + "\n" for line in run.log]
    (folder / "log.jsonl").write_text("".join(lines), encoding="utf-8")


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Hold torch to `count` CPU threads inside."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
