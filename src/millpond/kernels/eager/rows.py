"""Copies of rows between tensors, by threads that do not compute: torch would split each over all cores.

Rows on a CPU are copied whole, by numpy: 200 KB take a tenth of what torch's indexing takes with one thread.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Rows = npt.NDArray[np.integer[Any]]
#: Widths in bytes of the numbers in which rows are copied, the widest first.
_WIDTHS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))


def take_rows(source: Tensor, rows: Rows) -> Tensor:
    """Rows (n,) of source (N, ...), on the CPU, as a copy (n, ...)."""
    if not source.is_cpu or not source.is_contiguous():
        return source[torch.from_numpy(rows).long().to(source.device)].cpu()
    found = torch.empty(len(rows), *source.shape[1:], dtype=source.dtype)
    if found.numel():
        whole, room = _whole(source, found)
        np.take(whole, rows, axis=0, out=room, mode="clip")
    return found


def put_rows(target: Tensor, rows: Rows, source: Tensor, places: Rows | None = None) -> None:
    """Let rows (n,) of target (N, ...) be source (n, ...), or its rows `places` (n,)."""
    if target.is_cpu and target.is_contiguous() and source.is_cpu and source.is_contiguous():
        if source.numel() and len(rows):
            whole, room = _whole(source, target)
            room[rows] = whole if places is None else whole[places]
        return
    own = source if places is None else source[torch.from_numpy(places).to(source.device)]
    target[torch.from_numpy(rows).long().to(target.device)] = own.to(target.device)


def _whole(*tensors: Tensor) -> list[npt.NDArray[Any]]:
    """The rows of tensors (N, ...), contiguous and of one size, as numbers as wide as fit them and their places."""
    flat = [x.detach().view(len(x), -1).view(torch.uint8) for x in tensors]
    numbers = [flat[0].shape[1], *(x.data_ptr() for x in tensors)]
    kind = next(kind for width, kind in _WIDTHS if not any(number % width for number in numbers))
    return [x.view(kind).numpy() for x in flat]
