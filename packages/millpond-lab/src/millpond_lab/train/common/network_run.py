"""A training run of networks on a frozen model as data: its settings, its state, its checkpoint, and its loop."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from millpond.errors import NumericsError, OptionError


def save_state(state: dict[str, Any], file: Path) -> None:
    """Write a checkpoint; a crash while writing leaves the older file whole."""
    fresh = file.with_suffix(".new")
    torch.save(state, fresh)
    fresh.replace(file)


def save_curve(log: Iterable[NamedTuple], file: Path) -> None:
    """Write the learning curve, one JSON line a point."""
    file.write_text("".join(json.dumps(line._asdict()) + "\n" for line in log), encoding="utf-8")


@contextmanager
def cpu_threads(count: int | None) -> Iterator[None]:
    """Hold torch to `count` CPU threads inside; None leaves them as they are."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


#: Steps between two points of the learning curve.
LOG_EVERY = 10


@dataclass(frozen=True)
class RunSettings:
    """The numbers that every recipe has.

    Attributes:
        steps: of the whole run, one text each. lr: the highest rate. betas: of AdamW. warmup: share of the steps in
            which the rate rises. check_texts: held-out texts that the result is measured on.
    """

    seed: int = 0
    steps: int = 1200
    lr: float = 5e-4
    betas: tuple[float, float] = (0.9, 0.95)
    warmup: float = 0.05
    check_texts: int = 16
    checkpoint_steps: int = 100

    def rate(self, step: int) -> float:
        """The learning rate of a step as a share of the highest: it rises, and falls to zero."""
        rise = max(1, round(self.warmup * self.steps))
        return min((step + 1) / rise, (self.steps - step) / max(1, self.steps - rise))


class CurvePoint(Protocol):
    """One point of a learning curve, a NamedTuple."""

    @property
    def step(self) -> int:
        """Steps that were made."""
        ...

    @property
    def loss(self) -> float:
        """Of the last one."""
        ...

    @property
    def said(self) -> str:
        """What the progress display says after the loss."""
        ...

    def timed(self, time_s: float) -> Self:
        """The same at another time."""
        ...

    def __iter__(self) -> Iterator[Any]:
        """Its values."""
        ...


S = TypeVar("S", bound=RunSettings)
Line = TypeVar("Line", bound=CurvePoint)


class StopLimits(NamedTuple):
    """Where a call stops before the run's end: after minutes, or at a step of the whole run; None: nowhere."""

    max_minutes: float | None = None
    max_steps: int | None = None


@dataclass
class NetworkRun(Generic[S, Line]):
    """A training run between two steps: all that a checkpoint holds.

    Attributes:
        settings: of the recipe. mark: of the model. data: what the texts are called. networks: one per layer.
        line: makes a point of the curve of the values in a checkpoint.
    """

    settings: S
    mark: str
    data: str
    networks: nn.ModuleList
    line: Callable[..., Line]
    optimizer: torch.optim.Optimizer = field(init=False)
    step: int = 0
    time_s: float = 0.0
    log: list[Line] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(
            self.networks.parameters(), lr=self.settings.lr, betas=self.settings.betas, weight_decay=0.0
        )

    def save(self, file: Path) -> None:
        """Write the run to `file`; a crash while writing leaves the older file whole."""
        state: dict[str, Any] = {"settings": asdict(self.settings), "mark": self.mark, "data": self.data}
        state |= {"step": self.step, "time_s": self.time_s, "log": [tuple(line) for line in self.log]}
        state |= {"heads": self.networks.state_dict(), "optimizer": self.optimizer.state_dict()}
        save_state(state, file)

    def load(self, file: Path) -> None:
        """Continue where `file` stands.

        Raises:
            OptionError: it was begun with another model, data or settings.
        """
        state = torch.load(file, map_location="cpu", weights_only=True)
        begun = {"the model": (state["mark"], self.mark), "data": (state["data"], self.data)}
        begun |= {name: (state["settings"].get(name), value) for name, value in asdict(self.settings).items()}
        for name, (before, now) in begun.items():
            if before != now:
                told = "another model" if name == "the model" else f"{name} {before!r}, not {now!r}"
                raise OptionError(f"{file} was begun with {told}; give the same, or another --out")
        self.networks.load_state_dict(state["heads"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.time_s = state["step"], state["time_s"]
        self.log = [self.line(*line) for line in state["log"]]

    def descend(self, loss: Tensor, clip: Callable[[nn.ModuleList], object], checkpoint: Path) -> float:
        """One update along the gradient of `loss`, which `clip` bounds; returns the loss.

        Raises:
            NumericsError: the loss is not finite; nothing was changed.
        """
        value = float(loss.detach())
        if not bool(torch.isfinite(loss)):
            at = f"; {checkpoint} has the last good one" if checkpoint.exists() else ""
            raise NumericsError(
                f"the loss of step {self.step} is {value}{at}: lower the learning rate, or load the model in f32 or "
                "bf16"
            )
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.lr * self.settings.rate(self.step)
        loss.backward()  # type: ignore[no-untyped-call]
        clip(self.networks)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return value

    def go(
        self, step: Callable[[Path], Line], out: Path, limits: StopLimits, show: Callable[[CurvePoint], None]
    ) -> None:
        """Make the steps that are left, each by `step`, with a checkpoint now and then and one at the end.

        A run that was cut off goes on from `out`.checkpoint by `load`, which the caller has called.
        """
        checkpoint = checkpoint_of(out)
        begun, before_s = time.monotonic(), self.time_s
        last = self.settings.steps if limits.max_steps is None else min(limits.max_steps, self.settings.steps)
        while self.step < last:
            line = step(checkpoint)
            self.time_s = before_s + time.monotonic() - begun
            if self.step % LOG_EVERY == 0:
                self.log.append(line.timed(round(self.time_s, 1)))
            show(line)
            if self.step % self.settings.checkpoint_steps == 0:
                self.save(checkpoint)
            if limits.max_minutes is not None and time.monotonic() - begun > 60 * limits.max_minutes:
                break
        self.save(checkpoint)
        save_curve(self.log, out.with_name(out.name + ".log.jsonl"))  # type: ignore[arg-type]


def checkpoint_of(out: Path) -> Path:
    """Where the checkpoint of a run into `out` lies."""
    return out.with_name(out.name + ".checkpoint")


class Optimizers:
    """Several optimisers as one, with learning rates relative to their own base."""

    def __init__(self, parts: list[torch.optim.Optimizer]) -> None:
        self.parts = parts
        self._base = [[group["lr"] for group in part.param_groups] for part in parts]

    def set_rate(self, share: float) -> None:
        """Every learning rate as a share of its base, 0 to 1."""
        for part, bases in zip(self.parts, self._base, strict=True):
            for group, base in zip(part.param_groups, bases, strict=True):
                group["lr"] = share * base

    def step(self) -> None:
        """One update, and no gradients afterwards."""
        for part in self.parts:
            part.step()
            part.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict[str, Any]]:
        """For a checkpoint."""
        return [part.state_dict() for part in self.parts]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """From a checkpoint."""
        for part, state in zip(self.parts, states, strict=True):
            part.load_state_dict(state)


def muon_and_adamw(
    model: nn.Module, *, muon_lr: float, adamw_lr: float, betas: tuple[float, float], weight_decay: float
) -> Optimizers:
    """Muon (Jordan et al., 2024) on hidden matrices, scaled to AdamW's update size; AdamW on embeddings and norms."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    hidden = [p for name, p in named if p.ndim == 2 and "embed" not in name and "lm_head" not in name]
    chosen = {id(p) for p in hidden}
    rest = [p for _, p in named if id(p) not in chosen]
    return Optimizers(
        [
            torch.optim.Muon(hidden, lr=muon_lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(rest, lr=adamw_lr, betas=betas, weight_decay=0.0),
        ]
    )


def greedy(max_new_tokens: int, bos: int, eos: int, pad: int) -> GenerationConfig:
    """Greedy decoding that ends at `eos`; the last three are token ids."""
    return GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=max_new_tokens, do_sample=False, bos_token_id=bos, eos_token_id=eos, pad_token_id=pad
    )
