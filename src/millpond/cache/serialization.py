"""Cache of one layer for one text as named tensors, and back: the content of a file of a compressed text.

Entries keep their slots and sealed pages their bytes, so that a restored cache continues bit by bit as the saved one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from millpond.cache.layer.layer_cache import LayerCache
from millpond.cache.pages.ref_counted_pool import RefCountedPool
from millpond.cache.state.gate_context import GateContext
from millpond.cache.swap.pages import read_pages, write_pages
from millpond.errors import DataError, OptionError
from millpond.kernels import ops
from millpond.kernels.args import AttentionShape, EntryRows
from millpond.policy.scores.query_moments import QueryMoments

#: Tensors of the plain part, in the order of `PaddedEntries`.
ENTRIES = ("keys", "values", "positions", "scores", "log_masses")


def to_tensors(core: LayerCache) -> dict[str, Tensor]:
    """All that the layer needs to continue with the one sequence that it holds.

    Raises:
        OptionError: the method remembers something besides entries that has no place here.
    """
    table, companions = core.table, core.companions
    assert table is not None, "a text was read"
    if companions.rolling is not None or companions.focus is not None:
        raise OptionError(
            "this method turns keys to new positions or looks only at some of them as it goes on, which a file does "
            "not hold; give positions='absolute', or use another method"
        )
    width = int(table.lengths().max(initial=0))
    found = ops.read(table.regions, width)
    out = {name: t.contiguous() for name, t in zip(ENTRIES, found, strict=True) if t is not None}
    out |= {name: getattr(table, name).clone() for name in ("lens", "capacities", "recent", "head_rules")}
    shape = core.attention.shape
    out["shape"] = torch.tensor([shape.scale, shape.softcap, shape.window], dtype=torch.float64)
    if table.sealed is not None:
        out |= {f"sealed.{name}": t for name, t in table.sealed.numbers().items()}
        for i, array in enumerate(read_pages(table.sealed.pool, table.sealed.held())):
            out[f"sealed.pages.{i}"] = array
    if core.policy.window:
        out["queries"], out["queries.at"] = companions.queries.last(0)
    moments = companions.queries.moments(0)
    if moments is not None:
        out["moments.total"], out["moments.outer"] = moments.total, moments.outer
        out["moments.count"] = torch.tensor(moments.count)
    if 0 in companions.memories:
        out["memory"] = companions.memories[0]
    if (context := companions.contexts.get(0)) is not None:
        out["gate.keys"], out["gate.values"] = context.keys, context.values
    if 0 in companions.ceilings:
        out["gate.ceiling"] = torch.tensor(companions.ceilings[0])
    return {name: t.cpu().contiguous() for name, t in out.items()}


def from_tensors(core: LayerCache, stored: dict[str, Tensor], n_tokens: int, device: torch.device) -> None:
    """Fill an empty layer with what `put_away` gave of a text of `n_tokens`.

    Raises:
        PoolFullError: there is no room.
        DataError: a tensor is missing, or has a shape, type or number that no layer gives; nothing was allocated.
    """
    try:
        _check(core.index, stored, n_tokens)
        _fill(core, {name: t.to(device) for name, t in stored.items()})
    except KeyError as error:
        raise DataError(f"layer {core.index}: the file lacks {error.args[0]!r}; save the text again") from None


def _check(layer: int, stored: dict[str, Tensor], n_tokens: int) -> None:
    """
    Raises:
        DataError: tensors that do not fit together. KeyError: one that is missing.
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
        if (found := stored[name] if name != "log_masses" else stored.get(name)) is not None:
            need(found.shape == (heads, width) and found.dtype == dtype, f"{name} are (heads, entries)")
    for name in ("lens", "capacities", "recent", "head_rules"):
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


def _fill(core: LayerCache, stored: dict[str, Tensor]) -> None:
    keys, values = stored["keys"], stored["values"]
    scale, softcap, window = stored["shape"].tolist()
    shape = AttentionShape(scale, softcap, int(window))
    table = core.allocate(keys[None, :, :0], values[None, :, :0], shape, planned=True)
    lens = stored["lens"].cpu().numpy()
    table.reserve(0, lens)
    start, index = torch.zeros_like(stored["lens"]), torch.arange(keys.shape[1], dtype=torch.int32, device=keys.device)
    rows = EntryRows(
        start, stored["lens"], index.expand(len(keys), -1).contiguous(), keys, values, stored["positions"],
        stored["scores"], stored.get("log_masses"),
    )  # fmt: skip
    ops.write(table.regions, rows)
    table.set_lengths(0, lens)
    recent = stored["recent"].cpu().numpy()
    table.set_budget(0, stored["capacities"].cpu().numpy(), recent)
    table.set_head_rules(0, stored["head_rules"].cpu().numpy(), recent)
    if table.sealed is not None:
        numbers = {name[7:]: t for name, t in stored.items() if name.startswith("sealed.") and "pages" not in name}
        n_arrays = sum(name.startswith("sealed.pages.") for name in stored)
        content = tuple(stored[f"sealed.pages.{i}"] for i in range(n_arrays))
        _check_counts(core.index, len(keys), table.sealed.slots, numbers, content)
        ids = table.sealed.adopt(numbers)
        _check_pages(core.index, table.sealed.pool, content)
        write_pages(table.sealed.pool, ids, content)
    queries = core.companions.queries
    if "queries" in stored:
        queries.adopt(0, (stored["queries"], stored["queries.at"]))
    if "moments.count" in stored:
        count, total, outer = (stored[f"moments.{name}"] for name in ("count", "total", "outer"))
        queries.adopt(0, QueryMoments(int(count), total, outer))
    if "memory" in stored:
        core.companions.memories[0] = stored["memory"]
    if "gate.keys" in stored:
        core.companions.contexts[0] = GateContext.of(stored["gate.keys"], stored["gate.values"])
    if "gate.ceiling" in stored:
        core.companions.ceilings[0] = int(stored["gate.ceiling"])


def _check_counts(layer: int, heads: int, slots: int, numbers: dict[str, Tensor], content: tuple[Tensor, ...]) -> None:
    """
    Raises:
        DataError: not as many pages, or entries in them, as the numbers say; none was taken.
    """
    owned, lens, dead = (numbers[name] for name in ("owned", "lens", "dead"))
    right = all(t.shape == (heads,) and not t.is_floating_point() for t in (owned, lens, dead))
    for low, high in ((0 * lens, dead), (dead, lens), (lens, owned * slots)):
        right = right and bool((low <= high).all())
    if not right or any(len(found) != int(owned.sum()) for found in content):
        raise DataError(f"layer {layer}: the file has other pages than it says; save the text again")


def _check_pages(layer: int, pool: RefCountedPool[Any], content: tuple[Tensor, ...]) -> None:
    """
    Raises:
        DataError: pages that this pool cannot hold; nothing was written. A pool without memory holds none.
    """
    arrays = pool.arrays.arrays
    same = len(content) == len(arrays) and all(
        not arenas or (found.shape[1:], found.dtype) == (arenas[0].shape[1:], arenas[0].dtype)
        for found, arenas in zip(content, arrays, strict=True)
    )
    if not same:
        raise DataError(f"layer {layer}: the file's pages are not of this codec; save the text again")
