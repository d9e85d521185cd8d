"""The op set: signatures, checks and dispatch. One call per layer for a whole ragged batch.

Words: a *region* is one KV head of one sequence in one layer, region r = sequence * n_kv_heads + head. Its entries
lie in slots 0 .. lens[r]-1, spread over the pages table[r, 0], table[r, 1], ... in any order of positions.

Three implementations have the same functions with the same signatures: `reference` (plain torch, the truth, every
dtype), `native` (C++ on the CPU: float32, float16, bfloat16) and `gpu` (Triton). MILLPOND_KERNELS=reference|native|
gpu chooses one by force; by default the fastest that can take the tensors runs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from millpond.errors import OptionError
from millpond.kernels.backends import backend, dense_backend, native_for
from millpond.kernels.decode_rules import DecodeRule, Reduce
from millpond.kernels.merge.rules import MergeRule
from millpond.kernels.pages import PageArrays


class PaddedEntries(NamedTuple):
    """Entries read out of pages, padded to one width. Padding has position -1."""

    keys: Tensor  #: (R, width, key_dim)
    values: Tensor  #: (R, width, value_dim)
    positions: Tensor  #: (R, width) int32
    scores: Tensor  #: (R, width) float32
    log_masses: Tensor | None = None  #: (R, width) float32; None where the pages have no masses


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
    """One decoding step of one layer: attend, gather scores, choose the victim, store the new entry.

    Each query attends to the stored entries of its region and to the new one. A region that holds fewer entries than
    its cap (or whose rule never evicts) stores the new entry in slot lens[r]; a full one drops the entry of lowest
    value among the stored and the new one, and the new entry takes its slot (or is itself the one that leaves).
    Where the pages have masses, the log mass of a stored entry is added to its logit (after the softcap); the new
    entry has log mass 0.
    The caller guarantees a page for slot lens[r] wherever a region may grow. A region never holds more than its cap.

    Value of an entry: see `Evict`. Never chosen while another can be: position < rule.sinks, and the `recent[r]`
    newest positions (q_pos - position < recent[r]). Chosen first: what the sliding window hides from the next query.

    Args:
        q: (S, Hq, key_dim), query heads grouped by KV head: query head h reads KV head h // (Hq // Hkv).
        k_new, v_new: (S, Hkv, key_dim), (S, Hkv, value_dim).
        pages: the pool's memory; written.
        table: (R, n) int32 page ids, R = S * Hkv.
        lens: (R,) int32, written.
        caps: (R,) int32, most entries a region may hold; at least 1.
        recent: (R,) int32, how many of the newest positions are protected.
        q_pos: (S,) int32, the position of the new token in its own text; -1: this sequence takes no part (its output
            is zero, its lse -inf, nothing is stored).
        scale: factor on q.k. softcap: 0 or c, logits become c * tanh(logit / c).
        window: 0 or w: an entry is visible while q_pos - position < w.
        sink_logits: (Hq,) float32 or None: a logit per query head that only enters the denominator (gpt-oss).

    Returns:
        out (S, Hq, value_dim) in q's dtype; lse (S, Hq) float32, the log of the denominator (sink included);
        evicted (R,) int32: the position that left, -1 if none did.
    """
    impl = backend(pages.dtype, q.device)
    out: tuple[Tensor, Tensor, Tensor] = impl.decode(
        q, k_new, v_new, pages, table, lens, caps, recent, q_pos, rule,
        scale=scale, softcap=softcap, window=window, sink_logits=sink_logits,
    )  # fmt: skip
    return out


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
    """Causal attention of many new queries of one sequence, with the column sums of its probabilities.

    The columns are n_past = N - Q stored entries, all older than every query, then the Q new ones in order. No
    (Q, N) matrix is kept: the work runs in blocks of query rows.

    Args:
        q: (Hq, Q, key_dim). k: (Hkv, N, key_dim). v: (Hkv, N, value_dim), N = n_past + Q; any strides.
        q_pos: (Q,) int32, positions of the new tokens, ascending.
        past_pos: (Hkv, n_past) or (1, n_past) int32, positions of the stored entries, -1 where there is none (ragged
            heads).
        scale, softcap, window, sink_logits: as in `decode`.
        colsum: how to reduce the query heads of a group in the column sums; None: none are made.
        decay: factor on the column sums of all earlier queries at each query, above 0 to 1.
        past_log_masses: (Hkv or 1, n_past) float32, added to the logits of the stored entries after the softcap;
            None: all 0.

    Returns:
        out (Hq, Q, value_dim) in q's dtype; lse (Hq, Q) float32; colsum (Hkv, N) float32 or None:
        colsum[g, j] = sum_i decay**(Q - 1 - i) reduce_h A[h, i, j] over the queries i and the query heads h of KV
        head g.
    """
    impl = dense_backend(q)
    result: tuple[Tensor, Tensor, Tensor | None] = impl.prefill(
        q, k, v, q_pos, past_pos,
        scale=scale, softcap=softcap, window=window, sink_logits=sink_logits, colsum=colsum,
        decay=decay, past_log_masses=past_log_masses,
    )  # fmt: skip
    return result


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
    """Store chosen rows: row index[r, i] of region r goes to its slot start[r] + i, for i < count[r].

    Args:
        pages: written. table: (R, n) int32 page ids.
        start, count: (R,) int32. index: (R, width) int32, entries past count[r] are ignored.
        keys: (R, N, key_dim), values: (R, N, value_dim): any strides with contiguous rows; cast to the pages' dtype.
        positions: (R, N) int32 (may be expanded). scores: (R, N) float32, zero if None.
        log_masses: (R, N) float32, zero if None; only for pages with masses.

    Raises:
        OptionError: log masses for pages that have none.
    """
    if log_masses is not None and not pages.masses:
        raise OptionError(
            "log_masses were given for pages that keep no masses; make the pool with masses=True, or pass None"
        )
    impl = backend(pages.dtype, table.device)
    impl.write(pages, table, start, count, index, keys, values, positions, scores, log_masses)


def read(pages: PageArrays, table: Tensor, lens: Tensor, width: int) -> PaddedEntries:
    """Copy the entries of every region out of its pages, padded to `width` >= max(lens)."""
    return PaddedEntries(*backend(pages.dtype, table.device).read(pages, table, lens, width))


def merge_slots(
    pages: PageArrays,
    table: Tensor,
    lens: Tensor,
    caps: Tensor,
    recent: Tensor,
    q_pos: Tensor,
    memory: Tensor,
    leave: DecodeRule,
    rule: MergeRule,
    local: Tensor | None = None,
) -> None:
    """Bring regions back to their caps: the entries of lowest value leave, and are taken into those that stay.

    Behind a decoding step, over the same pages, table, lens, caps, recent and q_pos as `decode` has. Of region r
    lens[r] - caps[r] entries leave, none if that is not above 0. Value and protection are those of `decode`; of equal
    ones the oldest leaves. What the entries that stay take in: see `MergeRule`; they keep their positions. The last
    ones of a region move into the slots that were left.

    Args:
        pages, lens: written. q_pos: (S,) int32, the newest position of each sequence; -1: it takes no part.
        memory: (S,) float64, the threshold of each sequence that a rule moves, NaN for none; written.
        leave: what leaves. Its signal, reduce, decay and shared mean nothing here.
        rule: what becomes of it.
        local: (R, n) float32 or None, by slot: the attention of the latest queries. The value of an entry is then
            max(acc, local * sum acc / sum local), with the sums over the region, whatever `leave` says.
    """
    native = native_for(pages.dtype, table.device)
    if native is not None:
        native.merge_slots(pages, table, lens, caps, recent, q_pos, memory, leave, rule, local)
        return
    from millpond.kernels.merge import slots  # it stands on what this module chooses

    slots.merge_slots(pages, table, lens, caps, recent, q_pos, memory, leave, rule, local)


def admit(
    pages: PageArrays,
    table: Tensor,
    lens: Tensor,
    sequences: Tensor,
    ids: Tensor,
    classes: Tensor,
    kinds: Tensor,
    local: Tensor,
    seen: Tensor,
    quota: Tensor,
    most: Tensor,
    *,
    sinks: int,
    window: int,
) -> bool:
    """Let the entries leave that no nested rule keeps, and close the gaps: `NestedPolicy.leaving` after a step.

    Args:
        pages: written. table: (R, n) int32 page ids. lens: (R,) int32, written.
        sequences: (n,) int64, which to look at. ids: (S, width) int64, the token id at each position.
        classes: (c,) int8, the class of each token id, the last for all ids beyond.
        kinds: (R,) int64, the rule of each region. local: (R,) int32, newest positions that a local rule keeps.
        seen, quota, most: (n,) int64, of each sequence the tokens so far, the frequent entries of a head, and the
            entries of all heads together.
        sinks: positions below count as special. window: 0 or w: what is w behind the next query leaves.

    Returns:
        False where there is no native kernel for these pages: then nothing was done.
    """
    native = native_for(pages.dtype, lens.device)
    if native is None:
        return False
    native.admit(
        pages, table, lens, sequences, ids, classes, kinds, local, seen, quota, most, sinks=sinks, window=window
    )
    return True


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
    """Attention of many sequences' queries over entries that they share, which are read once for all of them.

    The first of the two phases of ChunkAttention (Ye et al., 2024, section 3.2). What `decode` finds in the entries of
    each sequence alone is given as `found`, and put together with it by the log-sum-exp, as `lse_merge` does.

    Args:
        q: (S, Hq, key_dim), one query of each sequence.
        pages: the pool's memory, only read. table: (Hkv, n) int32 page ids. lens: (Hkv,) int32.
        scale, softcap: as in `decode`.
        members: (n,) int64, the sequences that share the entries and see every one, each once; None: all.
        found: what queries found in other entries, out (S, Hq, value_dim) float32 or of the dtype of q, and lse (S, Hq)
            float32, both contiguous; changed in place and returned. None: nothing.

    Returns:
        out (S, Hq, value_dim), float32 or as `found` has it; lse (S, Hq) float32, -inf where there is no entry, and
        then out is 0.

    Raises:
        OptionError: `found` is not contiguous, of these shapes and dtypes.
    """
    shape = (*q.shape[:2], pages.value_dim)
    for x, wanted in () if found is None else ((found[0], shape), (found[1], shape[:2])):
        dtypes = (torch.float32, q.dtype) if wanted is shape else (torch.float32,)
        if x.shape != wanted or x.dtype not in dtypes or not x.is_contiguous():
            raise OptionError(
                f"what queries found is contiguous float32 of shape {tuple(wanted)}, not {x.dtype} of {tuple(x.shape)} "
                f"with strides {x.stride()}; make it .float().contiguous()"
            )
    result: tuple[Tensor, Tensor] = backend(pages.dtype, q.device).attend(
        q, pages, table, lens, scale=scale, softcap=softcap, members=members, found=found
    )
    return result


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
    """sum_i reduce_h A[h, i, j] over a few queries i, each seeing every entry that is not newer than itself.

    Args:
        q: (Hq, w, key_dim). k: (Hkv, N, key_dim) in any order. q_pos: (w,) int32. k_pos: (Hkv, N) int32, -1 for none.
        scale, softcap, window, sink_logits: as in `decode`.
        log_masses: (Hkv or 1, N) float32 or None, added to the logits of the entries.
        lse: (Hq, w) float32, the log of each denominator, if it is known, sink included; with it `window` hides entries
            and leaves the others what they had.

    Returns:
        (Hkv, N) float32; a query that sees nothing adds nothing.
    """
    signal: Tensor = dense_backend(q).window_signal(
        q, k, q_pos, k_pos, scale=scale, softcap=softcap, window=window, sink_logits=sink_logits, reduce=reduce,
        log_masses=log_masses, lse=lse,
    )  # fmt: skip
    return signal


def absolute_sums(x: Tensor, y: Tensor) -> Tensor:
    """sum_m |x_j . y_m| of each entry j with all vectors m of its head; none of the products is kept.

    Args:
        x: (H, N, dim). y: (H * sets, n, dim), the sets of head h are h * sets, h * sets + 1, ...

    Returns:
        (H, N) float32.
    """
    sums: Tensor = dense_backend(x).absolute_sums(x, y)
    return sums


def newest_alike(keys: Tensor, lens: Tensor, threshold: float, most: int) -> tuple[Tensor, Tensor]:
    """For each key the last other ones of its head whose cosine with it is above the threshold.

    Args:
        keys: (H, N, dim). lens: (H,) int32, the first lens[h] of head h are there. most: of them, for each key.

    Returns:
        their columns (H, N, most) int32, the last one first, -1 for none; their cosines (H, N, most) float32, 0 for
        none.
    """
    found: tuple[Tensor, Tensor] = dense_backend(keys).newest_alike(keys, lens, threshold, most)
    return found
