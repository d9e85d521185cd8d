"""Rules of caches whose texts may be longer than the model's context."""

from __future__ import annotations

from collections.abc import Sequence

from millpond.cache.pages.page_table import PageTable
from millpond.codec import Codec, Format, LayerCodecs, before_rope
from millpond.errors import BudgetError
from millpond.runner.cache_layout import CacheLayout
from millpond.runner.packed_model import LayerShape

#: Share of the positions that stay free when gaps have closed, at least: each closing writes all that is held again.
FREE = 1 / 8


def formats_before_rope(stored: LayerCodecs | Format) -> LayerCodecs | Format:
    """The same formats with keys stored before RoPE; numbers as they are stay so.

    Raises:
        OptionError: a codec whose keys cannot be stored so.
    """

    def before(one: Format) -> Format:
        return before_rope(one) if isinstance(one, Codec) else one

    return stored.map(before) if isinstance(stored, LayerCodecs) else before(stored)


def check_room_to_roll(layout: CacheLayout, layers: Sequence[LayerShape], reach: int) -> None:
    """
    Raises:
        BudgetError: what a layer keeps leaves too few of `reach` positions free.
    """
    most = int(reach * (1 - FREE)) - layout.policy.protect.sinks
    for index, layer in enumerate(layers):
        kept = layout.entries(index, reach, PageTable(layout.pool(layer), 1, layer.n_kv_heads))
        kept = min(kept, layer.window) if layer.window else kept
        if kept > most:
            raise BudgetError(
                f"budget {layout.budget} keeps {kept:,} entries per KV head in layer {index}, and overflow='rolling' "
                f"needs at most {most:,} of the model's {reach:,} positions, so that text can follow them; lower the "
                "budget"
            )
