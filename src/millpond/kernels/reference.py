"""The op set in plain torch: slow, short, and the truth that every other implementation is held to.

Shapes and meaning of every argument: see `ops`. Arithmetic runs in float32, in float64 where the pages are float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from millpond.kernels.decode_rules import DecodeRule, Evict, Reduce, Signal
from millpond.kernels.eviction import choose_evicted
from millpond.kernels.pages import PageArrays

INF = float("inf")
#: Rows of a matrix of cosines that are held at a time.
ROWS = 256


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a tensor of `dtype` is computed with."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# ---------------------------------------------------------------------------------------------- pages


def slot_ids(pages: PageArrays, table: Tensor, slots: Tensor) -> Tensor:
    """Flat slot ids, page * pages.slots + offset, of slots (R, n) of each region."""
    page = table.long().gather(1, slots // pages.slots)
    return page * pages.slots + slots % pages.slots


def gather(arenas: list[Tensor], ids: Tensor) -> Tensor:
    """Rows of flat slot ids (any shape) out of a list of arenas; result has shape ids.shape + row shape."""
    row_shape = arenas[0].shape[2:]
    per_arena = arenas[0].shape[0] * arenas[0].shape[1]
    out = arenas[0].new_empty(*ids.shape, *row_shape)
    for n, arena in enumerate(arenas):
        here = ids // per_arena == n
        out[here] = arena.reshape(-1, *row_shape)[ids[here] - n * per_arena]
    return out


def scatter(arenas: list[Tensor], ids: Tensor, rows: Tensor) -> None:
    """Write rows (n, ...) to flat slot ids (n,) of a list of arenas."""
    row_shape = arenas[0].shape[2:]
    per_arena = arenas[0].shape[0] * arenas[0].shape[1]
    for n, arena in enumerate(arenas):
        here = ids // per_arena == n
        arena.view(-1, *row_shape)[ids[here] - n * per_arena] = rows[here].to(arena.dtype)


def _occupied(pages: PageArrays, table: Tensor, lens: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Flat slot ids (R, width) and which of them hold an entry; ids of empty slots are 0."""
    slots = torch.arange(width, device=table.device).expand(table.shape[0], width)
    valid = slots < lens[:, None]
    ids = slot_ids(pages, table, torch.where(valid, slots, 0)) if table.shape[1] else slots * 0
    return torch.where(valid, ids, 0), valid


def read(
    pages: PageArrays, table: Tensor, lens: Tensor, width: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    n = table.shape[0]
    if width == 0 or pages.n_arenas == 0:
        dev = table.device
        return (
            torch.zeros(n, width, pages.key_dim, dtype=pages.dtype, device=dev),
            torch.zeros(n, width, pages.value_dim, dtype=pages.dtype, device=dev),
            torch.full((n, width), -1, dtype=torch.int32, device=dev),
            torch.zeros(n, width, device=dev),
            torch.zeros(n, width, device=dev) if pages.masses else None,
        )
    ids, valid = _occupied(pages, table, lens, width)
    keys = gather(pages.keys, ids) * valid[..., None]
    values = gather(pages.values, ids) * valid[..., None]
    # an empty slot may hold anything, NaN too: select, never multiply
    keys = torch.where(valid[..., None], keys, 0)
    values = torch.where(valid[..., None], values, 0)
    positions = torch.where(valid, gather(pages.positions, ids), -1)
    scores = torch.where(valid, gather(pages.scores, ids), 0.0)
    log_masses = torch.where(valid, gather(pages.log_masses, ids), 0.0) if pages.masses else None
    return keys, values, positions, scores, log_masses


def write(
    pages: PageArrays,
    table: Tensor,
    start: Tensor,
    count: Tensor,
    index: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    scores: Tensor | None = None,
    log_masses: Tensor | None = None,
) -> None:
    lane = torch.arange(index.shape[1], device=table.device).expand(index.shape)
    valid = lane < count[:, None]
    if not bool(valid.any()):
        return
    region = torch.arange(table.shape[0], device=table.device)[:, None].expand(index.shape)[valid]
    ids = slot_ids(pages, table, torch.where(valid, start[:, None].long() + lane, 0))[valid]
    row = index.long()[valid]
    scatter(pages.keys, ids, keys[region, row])
    scatter(pages.values, ids, values[region, row])
    scatter(pages.positions, ids, positions[region, row])
    side = [(pages.scores, scores), *([(pages.log_masses, log_masses)] if pages.masses else [])]
    for arenas, rows in side:
        scatter(arenas, ids, rows[region, row] if rows is not None else torch.zeros(len(row), device=table.device))


def copy_pages(pages: PageArrays, source: Tensor, target: Tensor) -> None:
    slots = torch.arange(pages.slots, device=source.device)
    from_ids, to_ids = ((ids[:, None] * pages.slots + slots).flatten() for ids in (source, target))
    for arenas in pages.arrays:
        scatter(arenas, to_ids, gather(arenas, from_ids))


# ---------------------------------------------------------------------------------------------- attention


def softmax_with_sink(logits: Tensor, visible: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """Probabilities and log-sum-exp over the last axis; `sink` (broadcastable, one column) enters the denominator."""
    logits = logits.masked_fill(~visible, -INF)
    columns = logits if sink is None else torch.cat([logits, sink.expand(*logits.shape[:-1], 1)], -1)
    lse = torch.logsumexp(columns, -1)
    return torch.exp(logits - lse.masked_fill(lse == -INF, 0.0)[..., None]), lse


def soft_cap(logits: Tensor, softcap: float) -> Tensor:
    return softcap * torch.tanh(logits / softcap) if softcap else logits


def with_masses(logits: Tensor, log_masses: Tensor | None) -> Tensor:
    """Logits (Hkv, group, Q, N) with the log masses (Hkv or 1, n) of the first n columns added."""
    if log_masses is None:
        return logits
    bias = log_masses.to(logits.dtype)[:, None, None]
    return logits + torch.nn.functional.pad(bias, (0, logits.shape[-1] - bias.shape[-1]))


def reduce_group(p: Tensor, how: Reduce, dim: int) -> Tensor:
    """The query heads of a group, on axis `dim`, as one number per entry."""
    if how is Reduce.MAX:
        return p.amax(dim)
    return p.mean(dim) if how is Reduce.MEAN else p.sum(dim)


def decode(
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    pages: PageArrays,
    table: Tensor,
    lens: Tensor,
    caps: Tensor,
    recent: Tensor,
    q_pos: Tensor,
    rule: DecodeRule,
    *,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    sink_logits: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    n_seq, n_heads, _ = q.shape
    n_kv_heads = k_new.shape[1]
    group, n_regions = n_heads // n_kv_heads, n_seq * n_kv_heads
    stored = int(lens.max()) if n_regions else 0
    keys, values, positions, scores, log_masses = read(pages, table, lens, stored)
    dtype = wide(pages.dtype)
    pos_r = q_pos.repeat_interleave(n_kv_heads)[:, None]  # (R, 1)
    active = pos_r >= 0

    # columns: the stored entries, then the new one (rounded to the storage dtype, as it will be read later)
    k_row, v_row = (t.to(pages.dtype).reshape(n_regions, 1, -1) for t in (k_new, v_new))
    keys, values = torch.cat([keys, k_row], 1).to(dtype), torch.cat([values, v_row], 1).to(dtype)
    positions = torch.cat([positions, pos_r.int()], 1)
    visible = (positions >= 0) & active
    if window:
        visible &= pos_r - positions < window

    logits = soft_cap(
        q.to(dtype).reshape(n_regions, group, -1) @ keys.transpose(1, 2) * scale, softcap
    )  # (R, group, T)
    if log_masses is not None:
        logits[..., :stored] += log_masses.to(dtype)[:, None]
    sink = None
    if sink_logits is not None:
        sink = (
            sink_logits.to(dtype).view(1, n_kv_heads, group, 1).expand(n_seq, -1, -1, -1).reshape(n_regions, group, 1)
        )
        sink = sink.masked_fill(~active[..., None], -INF)
    p, lse = softmax_with_sink(logits, visible[:, None], sink)
    out = p @ values

    # signal
    received = reduce_group(p, rule.reduce, 1).float()
    scores = torch.cat([scores, torch.zeros(n_regions, 1, device=scores.device)], 1)
    if rule.signal is Signal.SUM:
        scores = rule.decay * scores + received
    elif rule.signal is Signal.LAST:
        scores = received
    if rule.signal is not Signal.NONE and stored:
        ids, valid = _occupied(pages, table, lens, stored)
        valid &= active
        scatter(pages.scores, ids[valid], scores[:, :stored][valid])

    # the new entry: append, or take the victim's slot
    grows = active[:, 0] & ((lens < caps) | (rule.evict is Evict.NEVER))
    full = active[:, 0] & ~grows
    victim = choose_evicted(rule, scores, positions, pos_r, recent, window, n_kv_heads)
    slot = torch.where(grows, lens.long(), victim)
    stores = grows | (full & (victim < stored))
    evicted = torch.where(full, positions.gather(1, victim[:, None])[:, 0], -1)
    if bool(stores.any()):
        ids = slot_ids(pages, table[stores], slot[stores, None])[:, 0]
        scatter(pages.keys, ids, k_row[stores, 0])
        scatter(pages.values, ids, v_row[stores, 0])
        scatter(pages.positions, ids, pos_r[stores, 0])
        scatter(pages.scores, ids, scores[stores, -1] if rule.signal is not Signal.NONE else scores[stores, -1] * 0)
        if pages.masses:
            scatter(pages.log_masses, ids, torch.zeros(len(ids), device=ids.device))
    lens += grows.int()
    return out.reshape(n_seq, n_heads, -1).to(q.dtype), lse.reshape(n_seq, n_heads).float(), evicted.int()


def nothing_found(q: Tensor, value_dim: int) -> tuple[Tensor, Tensor]:
    """What queries q (S, Hq, key_dim) find where there are no entries: out and lse as `attend` returns them."""
    out = torch.zeros((*q.shape[:2], value_dim), dtype=torch.float32, device=q.device)
    return out, torch.full(q.shape[:2], -INF, dtype=torch.float32, device=q.device)


def attend(
    q: Tensor,
    pages: PageArrays,
    table: Tensor,
    lens: Tensor,
    *,
    scale: float,
    softcap: float = 0.0,
    members: Tensor | None = None,
    found: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    chosen: Tensor | slice = slice(None) if members is None else members
    n_kv_heads, dtype = len(table), wide(q.dtype)
    width = int(lens.max()) if n_kv_heads else 0
    keys, values, positions, _, log_masses = read(pages, table, lens, width)
    some = q[chosen].to(dtype)
    rows = some.transpose(0, 1).reshape(n_kv_heads, -1, len(some), q.shape[2])  # (Hkv, group, S, D)
    logits = soft_cap(rows @ keys.to(dtype)[:, None].transpose(-1, -2) * scale, softcap)
    logits = with_masses(logits, log_masses)
    p, shared_lse = softmax_with_sink(logits, (positions >= 0)[:, None, None], None)
    shared = (p @ values.to(dtype)[:, None]).flatten(0, 1).transpose(0, 1).float()
    out, lse = nothing_found(q, pages.value_dim) if found is None else found
    before, whole = out[chosen].float(), shared_lse.flatten(0, 1).T.float()
    merged, lse[chosen] = lse_merge(before, lse[chosen], shared, whole)
    out[chosen] = merged.to(out.dtype)
    return out, lse


def visible_columns(q_pos: Tensor, past_pos: Tensor | None, window: int, n_kv_heads: int) -> Tensor:
    """(Hkv, Q, n_past + Q) bool: what each query may see."""
    n = len(q_pos)
    new = q_pos.expand(n_kv_heads, n)
    past = past_pos.expand(n_kv_heads, -1) if past_pos is not None else new[:, :0]
    columns = torch.cat([past, new], 1)[:, None, :]
    rows = q_pos[None, :, None]
    visible = (columns >= 0) & (columns <= rows)
    return visible & (rows - columns < window) if window else visible


def query_weights(n: int, decay: float, like: Tensor) -> Tensor:
    """(n,) what the attention of each of n queries still counts for at the last one: decay**(n - 1 - i)."""
    later = torch.arange(n - 1, -1, -1, dtype=like.dtype, device=like.device)
    return torch.pow(decay, later)


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_pos: Tensor,
    past_pos: Tensor | None = None,
    *,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    sink_logits: Tensor | None = None,
    colsum: Reduce | None = None,
    decay: float = 1.0,
    past_log_masses: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    n_heads, n_kv_heads = q.shape[0], k.shape[0]
    dtype = wide(q.dtype)
    rows = q.to(dtype).reshape(n_kv_heads, n_heads // n_kv_heads, *q.shape[1:])  # (Hkv, group, Q, D)
    logits = soft_cap(rows @ k.to(dtype)[:, None].transpose(-1, -2) * scale, softcap)
    logits = with_masses(logits, past_log_masses)
    visible = visible_columns(q_pos, past_pos, window, n_kv_heads)
    sink = sink_logits.to(dtype).view(n_kv_heads, -1, 1, 1) if sink_logits is not None else None
    p, lse = softmax_with_sink(logits, visible[:, None], sink)
    out = (p @ v.to(dtype)[:, None]).reshape(n_heads, q.shape[1], -1).to(q.dtype)
    sums = None
    if colsum is not None:
        sums = (reduce_group(p, colsum, 1) * query_weights(q.shape[1], decay, p)[:, None]).sum(1).float()
    return out, lse.reshape(n_heads, -1).float(), sums


def lse_merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    lse = torch.logaddexp(lse_a, lse_b)
    finite = lse.masked_fill(lse == -INF, 0.0)
    weight_a, weight_b = torch.exp(lse_a - finite)[..., None], torch.exp(lse_b - finite)[..., None]
    return (out_a * weight_a + out_b * weight_b).to(out_a.dtype), lse


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
    lse: Tensor | None = None,
) -> Tensor:
    n_kv_heads = k.shape[0]
    dtype = wide(q.dtype)
    rows = q.to(dtype).view(n_kv_heads, -1, *q.shape[1:])  # (Hkv, group, w, D)
    logits = soft_cap(rows @ k.to(dtype)[:, None].transpose(-1, -2) * scale, softcap)
    logits = with_masses(logits, log_masses)
    distance = q_pos[None, :, None] - k_pos[:, None, :]
    visible = (k_pos[:, None, :] >= 0) & (distance >= 0)
    if window:
        visible &= distance < window
    if lse is not None:
        p = torch.exp(logits - lse.to(dtype).view(*rows.shape[:3], 1)).masked_fill(~visible[:, None], 0.0)
    else:
        sink = sink_logits.to(dtype).view(n_kv_heads, -1, 1, 1) if sink_logits is not None else None
        p, _ = softmax_with_sink(logits, visible[:, None], sink)
    return reduce_group(p, reduce, 1).sum(1).float()


# ---------------------------------------------------------------------------------------------- entries and others


def absolute_sums(x: Tensor, y: Tensor) -> Tensor:
    dtype, sets = wide(x.dtype), len(y) // max(len(x), 1)
    sums = [
        sum((own.to(dtype) @ other.to(dtype).T).abs().sum(-1) for other in y[h * sets : (h + 1) * sets])
        for h, own in enumerate(x)
    ]
    return torch.stack([torch.as_tensor(row) for row in sums]).float()


def newest_alike(keys: Tensor, lens: Tensor, threshold: float, most: int) -> tuple[Tensor, Tensor]:
    unit = torch.nn.functional.normalize(keys.to(wide(keys.dtype)), dim=-1)
    n = keys.shape[1]
    column = torch.arange(n, device=keys.device)
    there = column < lens[:, None]
    at = torch.full((*keys.shape[:2], most), -1, dtype=torch.int32, device=keys.device)
    cosines = torch.zeros(at.shape, dtype=unit.dtype, device=keys.device)
    for begin in range(0, n, ROWS):
        rows = slice(begin, begin + ROWS)
        cosine = unit[:, rows] @ unit.transpose(1, 2)
        alike = (cosine > threshold) & there[:, None] & there[:, rows, None] & (column != column[rows, None])
        last = torch.where(alike, column, -1).topk(min(most, n), -1).values
        found = cosine.gather(2, last.clamp(min=0))
        at[:, rows, :n], cosines[:, rows, :n] = last.int(), torch.where(last >= 0, found, 0)
    return at, cosines
