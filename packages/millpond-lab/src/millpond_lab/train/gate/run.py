"""Settings and learning curve of a training run of gates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import nn

from millpond.errors import CacheMismatchError, OptionError
from millpond.policy.trained.networks import SINKS, WINDOW, RetainingHeads
from millpond_lab.train.common.network_run import NetworkRun, RunSettings
from millpond_lab.train.gate.objective import Teacher, TrainedGate
from millpond_lab.train.retain.features import HeadSizes


@dataclass(frozen=True)
class GateSettings(RunSettings):
    """The numbers of the recipe.

    Attributes:
        target: share of a prompt's entries that is to be kept, pinned ones included. alpha: weight of its loss.
        teacher: see `prediction_loss`. hidden: width of the networks. n_heads, width: of their narrow attention.
        sinks, window: first and newest entries of a prompt that stay. clip: of the norm of all gradients.
        start: digest of the retaining heads that the gates begin with; empty: none.
        attention: what a token of a prompt looks at: causal, those before it; global, the whole prompt.
    """

    target: float = 0.2
    alpha: float = 5.0
    teacher: Teacher = "self"
    hidden: int = 1024
    n_heads: int = 4
    width: int = 16
    sinks: int = SINKS
    window: int = WINDOW
    clip: float = 1.0
    start: str = ""
    attention: Literal["causal", "global"] = "causal"

    def __post_init__(self) -> None:
        if not 0 < self.target < 1:
            raise OptionError(f"target={self.target} is a share of the entries, between 0 and 1, such as 0.1 or 10%")
        if self.teacher not in ("self", "text"):
            raise OptionError(f"teacher={self.teacher!r} must be self or text")
        if self.attention not in ("causal", "global"):
            raise OptionError(f"attention={self.attention!r} must be causal or global")


class GateLogLine(NamedTuple):
    """One point of the learning curve."""

    step: int
    time_s: float
    loss: float
    predicted: float  # of it, how far predictions are from the teacher's
    kept: float  # share of the text's entries

    @property
    def said(self) -> str:
        return f"kept {self.kept:.1%}"

    def timed(self, time_s: float) -> GateLogLine:
        return self._replace(time_s=time_s)


GateRun = NetworkRun[GateSettings, GateLogLine]


def new_run(
    settings: GateSettings,
    mark: str,
    data: str,
    sizes: Sequence[HeadSizes],
    device: torch.device,
    start: RetainingHeads | None = None,
) -> GateRun:
    """A run that begins. Equal seeds give equal weights; the caller's random state is kept.

    Raises:
        CacheMismatchError: the retaining heads to start from are of another model or width.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        gates = [
            TrainedGate(
                s.inputs,
                settings.hidden,
                s.n_kv_heads,
                settings.n_heads,
                settings.width,
                settings.attention == "causal",
            )
            for s in sizes
        ]
    if start is not None:
        if start.model != mark or len(start.layers) != len(gates):
            raise CacheMismatchError(
                f"the retaining heads to start from were trained for another model ({start.name}): take those of this "
                "model"
            )
        for gate, heads in zip(gates, start.layers, strict=True):
            if len(heads.b1) != settings.hidden:
                raise CacheMismatchError(
                    f"the retaining heads to start from are {len(heads.b1)} wide and these gates {settings.hidden}: "
                    f"give --hidden {len(heads.b1)}"
                )
            gate.start_from(heads.to(torch.device("cpu")), settings.target)
    return GateRun(settings, mark, data, nn.ModuleList(gates).to(device), GateLogLine)
