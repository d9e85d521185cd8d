"""State of a `pond-text` run between two steps: the content of its checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import LlamaForCausalLM

from millpond.errors import OptionError
from millpond_lab.train.common.checkpoint import save_state
from millpond_lab.train.common.optimizer import Optimizers
from millpond_lab.train.text.recipe import TextRecipe


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
