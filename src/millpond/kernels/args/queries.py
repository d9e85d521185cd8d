"""Common arguments of the attention ops."""

from __future__ import annotations

import torch
from torch import Tensor


class OfQueries:
    """Arguments of what is computed on the device of its queries."""

    __slots__ = ()
    q: Tensor

    @property
    def device(self) -> torch.device:
        return self.q.device
