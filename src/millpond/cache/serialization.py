"""Cache of one layer for one text as named tensors, and back: the content of a file of a compressed text.

Entries keep their slots and quantized pages their bytes: a restored cache continues bit by bit as the saved one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from millpond.cache.layer.layer_cache import LayerCache
from millpond.cache.pages.quantized_store import QuantizedStore
from millpond.cache.pages.ref_counted_pool import RefCountedPool
from millpond.cache.state.gate_context import GateContext
from millpond.cache.swap import read_pages, write_pages
from millpond.errors import DataError
from millpond.kernels import ops
from millpond.kernels.args import AttentionShape, EntryRows
from millpond.policy.needs import HeadRule
from millpond.policy.scores.query_moments import QueryMoments

#: need(right, rule): refuse what does not follow a rule.
Need = Callable[[bool, str], None]
#: Tensors of the plain part, in the order of `PaddedEntries`.
ENTRIES = ("keys", "values", "positions", "scores", "log_masses")
#: Name in the file of each array with one number per head, and the table's attribute.
STORED_NAMES = {"lens": "lens", "capacities": "capacities", "recent": "recent", "head_rules": "head_rules"}
#: Name in the file of the parts of the layer's state that write tensors of their own, and their attribute.
STORED_PARTS = {"rolling": "rolling", "focus": "selective"}


def to_tensors(layer_cache: LayerCache, *, later_prompts: bool = True) -> dict[str, Tensor]:
    """Return all that the layer needs to continue its only sequence after its plan.

    Args:
        layer_cache: Cache of the layer.
        later_prompts: Whether more prompts may follow, whose plans look at the queries of this one. If only decoding
            follows, queries are stored only for policies that plan at each step.
    """
    table, sequence_state = layer_cache.table, layer_cache.sequence_state
    assert table is not None, "a text was read"
    width = int(table.lengths().max(initial=0))
    entries = ops.read(table.regions, width)
    out = {name: t.contiguous() for name, t in zip(ENTRIES, entries, strict=True) if t is not None}
    out |= {name: getattr(table, attribute).clone() for name, attribute in STORED_NAMES.items()}
    shape = layer_cache.attention.shape
    out["shape"] = torch.tensor([shape.scale, shape.softcap, shape.window], dtype=torch.float64)
    for number, part in enumerate(table.packed_parts):
        own = part_prefix(number)
        out |= {f"{own}{name}": t for name, t in part.numbers().items()}
        for i, array in enumerate(read_pages(part.pool, part.held())):
            out[f"{own}pages.{i}"] = array
    queries_follow = later_prompts or layer_cache.policy.plans_each_step
    if layer_cache.policy.window and queries_follow:
        out["queries"], out["queries.at"] = sequence_state.queries.last(0)
    moments = sequence_state.queries.moments(0)
    if moments is not None and queries_follow:
        out["moments.total"], out["moments.outer"] = moments.total, moments.outer
        out["moments.count"] = torch.tensor(moments.count)
    if 0 in sequence_state.origins:
        out["origins"] = sequence_state.origins[0]
    if 0 in sequence_state.memories:
        out["memory"] = sequence_state.memories[0]
    if 0 in sequence_state.prompts:
        out["prompts"] = torch.tensor(sequence_state.prompts[0])
    for prefix, attribute in STORED_PARTS.items():
        if (part := getattr(sequence_state, attribute)) is not None:
            out |= {f"{prefix}.{name}": t for name, t in part.tensors(0).items()}
    if (context := sequence_state.contexts.get(0)) is not None:
        out["gate.keys"], out["gate.values"] = context.keys, context.values
    if 0 in sequence_state.ceilings:
        out["gate.ceiling"] = torch.tensor(sequence_state.ceilings[0])
    return {name: t.cpu().contiguous() for name, t in out.items()}


def from_tensors(layer_cache: LayerCache, stored: dict[str, Tensor], n_tokens: int, device: torch.device) -> None:
    """Fill an empty layer with the tensors that `to_tensors` returned of a text of `n_tokens`.

    Raises:
        PoolFullError: there is no room.
        DataError: a tensor is missing, or has a shape, type or number that no layer gives; nothing was allocated.
    """
    try:
        _check(layer_cache.index, stored, n_tokens)
        _fill(layer_cache, {name: t.to(device) for name, t in stored.items()}, n_tokens)
    except KeyError as error:
        raise DataError(f"layer {layer_cache.index}: the file lacks {error.args[0]!r}; save the text again") from None


def _check(layer: int, stored: dict[str, Tensor], n_tokens: int) -> None:
    """Check that the tensors of a file fit together.

    Raises:
        DataError: they do not.
        KeyError: one is missing.
    """

    def need(right: bool, rule: str) -> None:
        if not right:
            raise DataError(f"layer {layer}: the file does not fit together ({rule}); save the text again")

    keys, values, lens = stored["keys"], stored["values"], stored["lens"]
    need(keys.ndim == 3 and values.ndim == 3, "keys and values are (heads, entries, channels)")
    heads, width = keys.shape[:2]
    need(values.shape[:2] == keys.shape[:2], "there is one value for each key")
    need(keys.is_floating_point() and values.dtype == keys.dtype, "keys and values are of one type")
    for name, dtype in (("positions", torch.int32), ("scores", torch.float32), ("log_masses", torch.float32)):
        if (tensor := stored[name] if name != "log_masses" else stored.get(name)) is not None:
            need(tensor.shape == (heads, width) and tensor.dtype == dtype, f"{name} are (heads, entries)")
    for name in STORED_NAMES:
        need(stored[name].shape == (heads,) and not stored[name].is_floating_point(), f"{name} has one number a head")
    need(bool(((lens >= 0) & (lens <= width)).all()), f"a head holds 0 to {width} entries")
    positions = stored["positions"]
    need(bool(((positions >= -1) & (positions < n_tokens)).all()), f"positions are -1 to {n_tokens - 1}")
    gate_keys = stored.get("gate.keys")
    if gate_keys is not None:
        gate_values = stored["gate.values"]
        need(gate_keys.ndim == 2 and len(gate_keys) == n_tokens, "a gate has read every token")
        need(gate_values.shape == gate_keys.shape and gate_keys.dtype == gate_values.dtype, "a gate's keys have values")
        need(bool(gate_keys.isfinite().all() and gate_values.isfinite().all()), "what a gate has read is finite")
    shape = stored["shape"]
    need(shape.shape == (3,) and bool(shape.isfinite().all()), "shape has three finite numbers")
    need(bool((stored["capacities"] >= 0).all()), "a head may hold 0 entries or more")
    rules = stored["head_rules"]
    need(bool(((rules >= 0) & (rules <= max(HeadRule))).all()), f"rules of heads are 0 to {int(max(HeadRule))}")
    _check_queries(stored, heads, keys.shape[2], n_tokens, need)
    _check_frames(stored, heads, keys.shape[2], n_tokens, need)


def _check_queries(stored: dict[str, Tensor], heads: int, dim: int, n_tokens: int, need: Need) -> None:
    """Check queries, sums over them, a merge's memory and prompts, if there are any."""
    if (q := stored.get("queries")) is not None:
        at = stored["queries.at"]
        need(q.ndim == 3 and len(q) % heads == 0 and q.shape[2] == dim, "queries are (query heads, n, channels)")
        need(q.is_floating_point() and at.shape == q.shape[1:2] and not at.is_floating_point(), "each has a position")
    if (total := stored.get("moments.total")) is not None:
        outer, count = stored["moments.outer"], stored["moments.count"]
        need(total.ndim == 2 and len(total) % heads == 0 and total.shape[1] == dim, "sums are (query heads, channels)")
        need(outer.shape == (*total.shape, dim), "products are (query heads, channels, channels)")
        need(count.numel() == 1 and 0 <= int(count) <= n_tokens, f"sums are over 0 to {n_tokens} queries")
    if (memory := stored.get("memory")) is not None:
        need(memory.numel() == 1 and memory.is_floating_point(), "a merge leaves one number")
    if (prompts := stored.get("prompts")) is not None:
        need(prompts.ndim == 2 and prompts.shape[1] == 2 and prompts.dtype == torch.int64, "prompts begin and end")
        places = torch.cat([prompts.new_zeros(1), prompts.flatten(), prompts.new_full((1,), n_tokens)])
        need(bool((places.diff() >= 0).all()), f"prompts are at 0 to {n_tokens}, one after the other")


def _check_frames(stored: dict[str, Tensor], heads: int, dim: int, n_tokens: int, need: Need) -> None:
    """Check positions inside the cache, and blocks that are looked up, if there are any."""
    if (base := stored.get("rolling.base")) is not None:
        need(base.numel() == 1 and 0 <= int(base) <= n_tokens, f"a frame begins at 0 to {n_tokens}")
    if (origins := stored.get("origins")) is not None:
        need(origins.ndim == 2 and len(origins) == heads, "entries of each head have places in the text")
        need(origins.dtype == torch.int32 and bool((origins >= -1).all()), "these places are -1 or more")
    if (sinks := stored.get("rolling.keys")) is not None:
        need(sinks.ndim == 3 and len(sinks) == heads and sinks.shape[2] == dim, "sinks are (heads, n, channels)")
        need(sinks.is_floating_point(), "sinks are numbers with a point")
    if (given := stored.get("rolling.positions")) is not None:
        places = stored["rolling.places"]
        need(given.ndim == 2 and len(given) == heads and given.shape[1] > 0, "closed gaps are (heads, entries)")
        need(places.shape == given.shape and given.dtype == places.dtype == torch.int64, "each has a place")
        need(bool(((places >= 0) & (places <= n_tokens)).all()), f"places are 0 to {n_tokens}")
    if (budget := stored.get("focus.budget")) is not None:
        means, scores = stored["focus.means"], stored["focus.scores"]
        need(budget.numel() == 1 and int(budget) > 0, "a query attends to an entry or more")
        need(means.ndim == 3 and means.shape[1] % heads == 0 and means.shape[2] == dim, "means are (blocks, heads, D)")
        need(len(means) <= n_tokens, f"there are at most {n_tokens} blocks")
        need(scores.ndim == 2 and len(scores) == means.shape[1], "each query head has scores")
        need(scores.shape[1] <= n_tokens, f"at most {n_tokens} entries have scores")
        need(means.is_floating_point() and scores.dtype == torch.float32, "means and scores are numbers with a point")
        outside = _outside(stored, heads, dim, n_tokens, need)
        need(bool((stored["lens"] == n_tokens - outside).all()), "a layer that looks up blocks holds every token")


def _outside(stored: dict[str, Tensor], heads: int, dim: int, n_tokens: int, need: Need) -> int:
    """Return the entries of blocks outside of the pool, once they are checked."""
    if (shape := stored.get("focus.far_shape")) is None:
        return 0
    need(shape.shape == (4,) and shape.dtype == torch.int64, "blocks outside have four numbers")
    n, size, key_dim, value_dim = shape.tolist()
    need(1 <= n <= len(stored["focus.means"]) and 1 <= size <= n_tokens, "they are blocks of entries that were read")
    need(key_dim == dim and value_dim == stored["values"].shape[2], "their entries are those of the layer")
    need(stored["focus.far_0"].shape[:2] == (n, heads), "each head has its own")
    return int(n * size)


def _fill(layer_cache: LayerCache, stored: dict[str, Tensor], n_tokens: int) -> None:
    keys, values = stored["keys"], stored["values"]
    scale, softcap, window = stored["shape"].tolist()
    shape = AttentionShape(scale, softcap, int(window))
    layer_cache.attention.shape = shape
    table = layer_cache.allocate(keys[None, :, :0], values[None, :, :0], shape, planned=True)
    lens = stored["lens"].cpu().numpy()
    table.reserve(0, lens)
    start, index = torch.zeros_like(stored["lens"]), torch.arange(keys.shape[1], dtype=torch.int32, device=keys.device)
    rows = EntryRows(
        start,
        stored["lens"],
        index.expand(len(keys), -1).contiguous(),
        keys,
        values,
        stored["positions"],
        stored["scores"],
        stored.get("log_masses"),
    )
    ops.write(table.regions, rows)
    table.set_lengths(0, lens)
    recent = stored["recent"].cpu().numpy()
    table.set_budget(0, stored["capacities"].cpu().numpy(), recent)
    table.set_head_rules(0, stored["head_rules"].cpu().numpy(), recent)
    for number, packed in enumerate(table.packed_parts):
        _fill_part(layer_cache.index, packed, part_prefix(number), stored, n_tokens, keys.shape[2])
    queries = layer_cache.sequence_state.queries
    if "queries" in stored:
        queries.adopt(0, (stored["queries"], stored["queries.at"]))
    if "moments.count" in stored:
        count, total, outer = (stored[f"moments.{name}"] for name in ("count", "total", "outer"))
        queries.adopt(0, QueryMoments(int(count), total, outer))
    if "origins" in stored:
        layer_cache.sequence_state.origins[0] = stored["origins"]
    if "memory" in stored:
        layer_cache.sequence_state.memories[0] = stored["memory"]
    if "prompts" in stored:
        layer_cache.sequence_state.prompts[0] = tuple((begin, end) for begin, end in stored["prompts"].tolist())
    for prefix, attribute in STORED_PARTS.items():
        if (state := getattr(layer_cache.sequence_state, attribute)) is not None:
            state.adopt({k.removeprefix(f"{prefix}."): t for k, t in stored.items() if k.startswith(f"{prefix}.")})
    if "gate.keys" in stored:
        layer_cache.sequence_state.contexts[0] = GateContext.of(stored["gate.keys"], stored["gate.values"])
    if "gate.ceiling" in stored:
        layer_cache.sequence_state.ceilings[0] = int(stored["gate.ceiling"])


def part_prefix(number: int) -> str:
    """Return the prefix of the names of a packed part's tensors; part 0 has the newest codes."""
    return f"sealed{number or ''}."


def _fill_part(layer: int, part: QuantizedStore, own: str, stored: dict[str, Tensor], n_tokens: int, dim: int) -> None:
    """Fill an empty packed part with the tensors whose names begin with `own`.

    dim: channels of a key.
    """
    numbers = {name.removeprefix(own): t for name, t in stored.items() if name.startswith(own) and "pages" not in name}
    n_arrays = sum(name.startswith(f"{own}pages.") for name in stored)
    content = tuple(stored[f"{own}pages.{i}"] for i in range(n_arrays))
    _check_counts(layer, part.n_kv_heads, part.slots, numbers, content)
    _check_channels(layer, numbers, part.numbers(), {"channels": dim, "value_channels": part.value_dim})
    if "reach" in numbers:
        numbers["reach"] = numbers["reach"].clamp(0, n_tokens)  # tables may have grown for longer texts there
    ids = part.adopt(numbers)
    _check_pages(layer, part.pool, content)
    write_pages(part.pool, ids, content)


def _check_channels(layer: int, numbers: dict[str, Tensor], own: dict[str, Tensor], dims: dict[str, int]) -> None:
    """Check the choice of channels, `dims` of them by name.

    Raises:
        DataError: this codec makes other choices; none was taken.
    """
    for name in (*dims, "balance", "reach"):
        stored, expected = numbers.get(name), own.get(name)
        right = (stored is None) == (expected is None)
        if stored is not None and expected is not None:
            right = stored.shape == expected.shape and stored.dtype == expected.dtype
            if right and name in dims:
                inside = bool(((stored >= 0) & (stored < dims[name])).all())
                right = inside and bool((stored[:, 1:] > stored[:, :-1]).all())
        if not right:
            raise DataError(f"layer {layer}: the file's {name} are not of this codec; save the text again")


def _check_counts(layer: int, heads: int, slots: int, numbers: dict[str, Tensor], content: tuple[Tensor, ...]) -> None:
    """Check the numbers of pages and entries.

    Raises:
        DataError: not as many pages, or entries in them, as the numbers say; none was taken.
    """
    owned, lens, dead = (numbers[name] for name in ("owned", "lens", "dead"))
    right = all(t.shape == (heads,) and not t.is_floating_point() for t in (owned, lens, dead))
    for low, high in ((0 * lens, dead), (dead, lens), (lens, owned * slots)):
        right = right and bool((low <= high).all())
    if not right or any(len(array) != int(owned.sum()) for array in content):
        raise DataError(f"layer {layer}: the file has other pages than it says; save the text again")


def _check_pages(layer: int, pool: RefCountedPool[Any], content: tuple[Tensor, ...]) -> None:
    """Check the content of pages. A pool without memory accepts any.

    Raises:
        DataError: pages that this pool cannot hold; nothing was written.
    """
    arrays = pool.arrays.arrays
    same = len(content) == len(arrays) and all(
        not arenas or (array.shape[1:], array.dtype) == (arenas[0].shape[1:], arenas[0].dtype)
        for array, arenas in zip(content, arrays, strict=True)
    )
    if not same:
        raise DataError(f"layer {layer}: the file's pages are not of this codec; save the text again")
