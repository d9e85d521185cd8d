"""The cache of one layer for one text as named tensors, and back: what a file of a compressed text is made of.

Entries keep their slots and sealed pages their bytes, so that what comes back goes on bit by bit as what was put away.
"""

from __future__ import annotations

import torch
from torch import Tensor

from millpond.cache.layer import LayerCache
from millpond.cache.parts import AttentionShape
from millpond.cache.swap import read_pages, write_pages
from millpond.errors import DataError, OptionError
from millpond.kernels import ops
from millpond.policy.moments import QueryMoments

#: Tensors of the plain part, in the order of `ops.Dense`.
ENTRIES = ("keys", "values", "positions", "scores", "log_masses")


def put_away(core: LayerCache) -> dict[str, Tensor]:
    """All that the layer needs to go on with the one sequence that it holds.

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
    found = ops.read(table.pool.arrays, table.pages, table.lens, width)
    out = {name: t.contiguous() for name, t in zip(ENTRIES, found, strict=True) if t is not None}
    out |= {name: getattr(table, name).clone() for name in ("lens", "caps", "recent", "kinds")}
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
    return {name: t.cpu().contiguous() for name, t in out.items()}


def take_up(core: LayerCache, stored: dict[str, Tensor], device: torch.device) -> None:
    """Fill an empty layer with what `put_away` gave.

    Raises:
        PoolFullError: there is no room.
        DataError: a tensor is missing.
    """
    try:
        _fill(core, {name: t.to(device) for name, t in stored.items()})
    except KeyError as error:
        raise DataError(f"layer {core.index}: the file lacks {error.args[0]!r}; save the text again") from None


def _fill(core: LayerCache, stored: dict[str, Tensor]) -> None:
    keys, values = stored["keys"], stored["values"]
    scale, softcap, window = stored["shape"].tolist()
    shape = AttentionShape(scale, softcap, int(window))
    table = core.open(keys[None, :, :0], values[None, :, :0], shape, planned=True)
    lens = stored["lens"].cpu().numpy()
    table.reserve(0, lens)
    start, index = torch.zeros_like(stored["lens"]), torch.arange(keys.shape[1], dtype=torch.int32, device=keys.device)
    ops.write(
        table.pool.arrays, table.pages, start, stored["lens"], index.expand(len(keys), -1).contiguous(), keys, values,
        stored["positions"], stored["scores"], stored.get("log_masses"),
    )  # fmt: skip
    table.set_lengths(0, lens)
    recent = stored["recent"].cpu().numpy()
    table.set_budget(0, stored["caps"].cpu().numpy(), recent)
    table.set_kinds(0, stored["kinds"].cpu().numpy(), recent)
    if table.sealed is not None:
        numbers = {name[7:]: t for name, t in stored.items() if name.startswith("sealed.") and "pages" not in name}
        n_arrays = sum(name.startswith("sealed.pages.") for name in stored)
        ids = table.sealed.adopt(numbers)
        write_pages(table.sealed.pool, ids, tuple(stored[f"sealed.pages.{i}"] for i in range(n_arrays)))
    queries = core.companions.queries
    if "queries" in stored:
        queries.adopt(0, (stored["queries"], stored["queries.at"]))
    if "moments.count" in stored:
        count, total, outer = (stored[f"moments.{name}"] for name in ("count", "total", "outer"))
        queries.adopt(0, QueryMoments(int(count), total, outer))
    if "memory" in stored:
        core.companions.memories[0] = stored["memory"]
