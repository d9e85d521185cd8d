"""A training run of retaining heads as data: its settings, its state, and its checkpoint."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from millpond.errors import OptionError
from millpond.train.common.checkpoint import save_state
from millpond.train.retain.features import HeadSizes
from millpond.train.retain.labels import Label
from millpond.train.retain.objective import TrainedHeads


@dataclass(frozen=True)
class RetainSettings:
    """The numbers of the recipe.

    Attributes:
        label: see `labels_of`. steps: of the whole run, one text each. width: of the networks. lr: the highest rate.
        budget, chunk: entries per KV head and tokens, where texts are read with eviction; 0: with full attention.
        check_texts: texts behind the quantiles and the overlap.
    """

    seed: int = 0
    label: Label = "log_prob"
    steps: int = 1200
    width: int = 1024
    lr: float = 5e-4
    betas: tuple[float, float] = (0.9, 0.95)
    warmup: float = 0.05
    clip: float = 0.5
    budget: int = 0
    chunk: int = 0
    check_texts: int = 16
    checkpoint_steps: int = 100

    def rate(self, step: int) -> float:
        """The learning rate of a step as a share of the highest: it rises, and falls to zero."""
        rise = max(1, round(self.warmup * self.steps))
        return min((step + 1) / rise, (self.steps - step) / max(1, self.steps - rise))


class RetainLogLine(NamedTuple):
    """One point of the learning curve."""

    step: int
    time_s: float
    loss: float
    overlap: float  # of the text's best tenth, mean over heads


@dataclass
class RetainRun:
    """A training run between two steps: all that a checkpoint holds."""

    settings: RetainSettings
    mark: str
    data: str
    heads: nn.ModuleList
    optimizer: torch.optim.Optimizer
    step: int = 0
    time_s: float = 0.0
    log: list[RetainLogLine] = field(default_factory=list)

    @classmethod
    def new(
        cls, settings: RetainSettings, mark: str, data: str, sizes: list[HeadSizes], device: torch.device
    ) -> RetainRun:
        """A run that begins. Equal seeds give equal weights; the caller's random state is kept."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            heads = nn.ModuleList([TrainedHeads(s.inputs, settings.width, s.n_kv_heads) for s in sizes])
        heads.to(device)
        optimizer = torch.optim.AdamW(heads.parameters(), lr=settings.lr, betas=settings.betas, weight_decay=0.0)
        return cls(settings, mark, data, heads, optimizer)

    def save(self, file: Path) -> None:
        """Write the run to `file`; a crash while writing leaves the older file whole."""
        state: dict[str, Any] = {"settings": asdict(self.settings), "mark": self.mark, "data": self.data}
        state |= {"step": self.step, "time_s": self.time_s, "log": [tuple(line) for line in self.log]}
        state |= {"heads": self.heads.state_dict(), "optimizer": self.optimizer.state_dict()}
        save_state(state, file)

    def load(self, file: Path) -> None:
        """Continue where `file` stands.

        Raises:
            OptionError: it was begun with another model, data or settings.
        """
        state = torch.load(file, map_location="cpu", weights_only=True)
        begun = {"the model": (state["mark"], self.mark), "data": (state["data"], self.data)}
        begun |= {name: (state["settings"][name], value) for name, value in asdict(self.settings).items()}
        for name, (before, now) in begun.items():
            if before != now:
                told = "another model" if name == "the model" else f"{name} {before!r}, not {now!r}"
                raise OptionError(f"{file} was begun with {told}; give the same, or another --out")
        self.heads.load_state_dict(state["heads"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.time_s = state["step"], state["time_s"]
        self.log = [RetainLogLine(*line) for line in state["log"]]
