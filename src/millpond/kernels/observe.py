"""The attention that a few queries pay to every entry: the signal of observation windows."""

from __future__ import annotations

from torch import Tensor

from millpond.kernels.reference import reduce_group, soft_cap, softmax_with_sink, wide, with_masses
from millpond.kernels.rules import Reduce


def window_signal(
    q: Tensor,
    k: Tensor,
    q_pos: Tensor,
    k_pos: Tensor,
    *,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    sink_logits: Tensor | None = None,
    reduce: Reduce = Reduce.MEAN,
    log_masses: Tensor | None = None,
) -> Tensor:
    """sum_i reduce_h A[h, i, j] over a few queries i, each seeing every entry that is not newer than itself.

    Args:
        q: (Hq, w, key_dim). k: (Hkv, N, key_dim) in any order. q_pos: (w,) int32. k_pos: (Hkv, N) int32, -1 for none.
        scale, softcap, window, sink_logits: as in `ops.decode`.
        log_masses: (Hkv or 1, N) float32 or None, added to the logits of the entries.

    Returns:
        (Hkv, N) float32. Memory: Hq * w * N numbers.
    """
    n_kv_heads = k.shape[0]
    dtype = wide(q.dtype)
    rows = q.to(dtype).view(n_kv_heads, -1, *q.shape[1:])  # (Hkv, group, w, D)
    logits = soft_cap(rows @ k.to(dtype)[:, None].transpose(-1, -2) * scale, softcap)
    logits = with_masses(logits, log_masses)
    distance = q_pos[None, :, None] - k_pos[:, None, :]
    visible = (k_pos[:, None, :] >= 0) & (distance >= 0)
    if window:
        visible &= distance < window
    sink = sink_logits.to(dtype).view(n_kv_heads, -1, 1, 1) if sink_logits is not None else None
    p, _ = softmax_with_sink(logits, visible[:, None], sink)
    return reduce_group(p, reduce, 1).sum(1).float()
