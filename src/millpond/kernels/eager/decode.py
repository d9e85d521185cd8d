"""One decoding step in plain torch: see `ops.decode`."""

from __future__ import annotations

import torch

from millpond.kernels.args import DecodeArgs, DecodeOutput
from millpond.kernels.decode_rules import Evict, Signal
from millpond.kernels.eager.pages import occupied, read, scatter, slot_ids
from millpond.kernels.eager.softmax import INF, reduce_group, soft_cap, softmax_with_sink, wide
from millpond.kernels.eviction import choose_evicted


def decode(args: DecodeArgs) -> DecodeOutput:
    """Over plain pages: what lies in packed ones is not read."""
    q, k_new, v_new, regions = args.q, args.k_new, args.v_new, args.regions
    (pages, table, lens), rule, shape = regions.plain.parts, regions.rule, regions.shape
    n_seq, n_heads, _ = q.shape
    n_kv_heads = k_new.shape[1]
    group, n_regions = n_heads // n_kv_heads, n_seq * n_kv_heads
    stored = int(lens.max()) if n_regions else 0
    keys, values, positions, scores, log_masses = read(regions.plain, stored)
    dtype = wide(pages.dtype)
    pos_r = regions.q_pos.repeat_interleave(n_kv_heads)[:, None]  # (R, 1)
    active = pos_r >= 0

    # columns: the stored entries, then the new one (rounded to the storage dtype, as it will be read later)
    k_row, v_row = (t.to(pages.dtype).reshape(n_regions, 1, -1) for t in (k_new, v_new))
    keys, values = torch.cat([keys, k_row], 1).to(dtype), torch.cat([values, v_row], 1).to(dtype)
    positions = torch.cat([positions, pos_r.int()], 1)
    visible = (positions >= 0) & active
    if shape.window:
        visible &= pos_r - positions < shape.window

    logits = soft_cap(
        q.to(dtype).reshape(n_regions, group, -1) @ keys.transpose(1, 2) * shape.scale, shape.softcap
    )  # (R, group, T)
    if log_masses is not None:
        logits[..., :stored] += log_masses.to(dtype)[:, None]
    sink = None
    if shape.sink_logits is not None:
        sink = shape.sink_logits.to(dtype).view(1, n_kv_heads, group, 1).expand(n_seq, -1, -1, -1)
        sink = sink.reshape(n_regions, group, 1)
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
        ids, valid = occupied(pages, table, lens, stored)
        valid &= active
        scatter(pages.scores, ids[valid], scores[:, :stored][valid])

    # the new entry: append, or take the victim's slot
    grows = active[:, 0] & ((lens < regions.caps) | (rule.evict is Evict.NEVER))
    full = active[:, 0] & ~grows
    spans = (regions.kept, regions.least)
    victim = choose_evicted(rule, scores, positions, pos_r, regions.recent, shape.window, n_kv_heads, *spans)
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
    heads = (n_seq, n_heads)
    return DecodeOutput(out.reshape(*heads, -1).to(q.dtype), lse.reshape(heads).float(), evicted.int())
