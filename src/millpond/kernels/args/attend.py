"""Arguments and result of `attend`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from millpond.errors import OptionError
from millpond.kernels.args.queries import OfQueries
from millpond.kernels.args.regions import PageRegions


class AttendOutput(NamedTuple):
    """What queries found in entries: attention over these alone."""

    out: Tensor  #: (S, Hq, value_dim), float32 or of the dtype of the queries
    lse: Tensor  #: (S, Hq) float32, -inf where there is no entry, and then out is 0


@dataclass(frozen=True, slots=True)
class AttendArgs(OfQueries):
    """Queries of S sequences, and entries that they share.

    Attributes:
        q: (S, Hq, key_dim), one query of each sequence.
        regions: the R = Hkv regions of the shared entries, only read.
        scale, softcap: see `AttentionShape`.
        members: (n,) int64, the sequences that share the entries and see every one, each once; None: all.
        found: what the queries found in other entries, both contiguous; changed in place and returned. None: nothing.

    Raises:
        OptionError: `found` is not contiguous, of these shapes and dtypes.
    """

    q: Tensor
    regions: PageRegions
    scale: float
    softcap: float = 0.0
    members: Tensor | None = None
    found: tuple[Tensor, Tensor] | None = None

    def __post_init__(self) -> None:
        if self.found is None:
            return
        shape = (*self.q.shape[:2], self.regions.pages.value_dim)
        _check(self.found[0], shape, (torch.float32, self.q.dtype))
        _check(self.found[1], shape[:2], (torch.float32,))


def _check(found: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    if found.shape != shape or found.dtype not in dtypes or not found.is_contiguous():
        raise OptionError(
            f"what queries found is contiguous float32 of shape {tuple(shape)}, not {found.dtype} of "
            f"{tuple(found.shape)} with strides {found.stride()}; make it .float().contiguous()"
        )
