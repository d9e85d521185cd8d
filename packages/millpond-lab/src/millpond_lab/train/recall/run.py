"""A training run of `pond-recall` as data: its settings, its state, and its file."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import LlamaForCausalLM

from millpond.errors import OptionError
from millpond_lab.train.common.checkpoint import save_state
from millpond_lab.train.common.optimizer import Optimizers
from millpond_lab.train.recall.curriculum import Curriculum


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
