"""Settings and learning curve of a training run of retaining heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from millpond_lab.train.common.network_run import NetworkRun, RunSettings
from millpond_lab.train.retain.features import HeadSizes
from millpond_lab.train.retain.labels import Label
from millpond_lab.train.retain.objective import TrainedHeads


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
