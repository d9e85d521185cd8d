"""Page pools of caches of one kind, and those of all layers, each with its own number format."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from typing import Any

import torch

from millpond.cache.pages.aged_store import AgedStore, QuantizedPart
from millpond.cache.pages.channel_statistics import kept_dim
from millpond.cache.pages.memory_limit import MemoryLimit
from millpond.cache.pages.pool import PagePool, QuantizedPool
from millpond.cache.pages.quantized_store import QuantizedStore
from millpond.cache.pages.ref_counted_pool import RefCountedPool
from millpond.cache.pages.rope_tables import RopeTables
from millpond.codec import Codec, Format, LayerCodecs
from millpond.codec.channels import MULTIPLE
from millpond.errors import OptionError
from millpond.kernels.packed.layout import Side


class PoolSet:
    """Pools that are made when a layer first needs them.

    Args:
        storage: Format of all entries: a dtype, a codec, or None for the dtype of the model.
        slots: Entries per plain page.
        memory_limit: Limit of all pools together.
        masses: Whether entries carry a mass.
        ropes: Rotations of the layers, for a codec that stores keys before RoPE.
        shared: Set whose pools of the same kind this set uses too, so that ever new sizes of tiers make no new pools.

    Attributes:
        codec: Codec of the entries; None if they stay plain.
    """

    def __init__(
        self,
        storage: torch.dtype | Codec | None,
        slots: int,
        memory_limit: MemoryLimit,
        *,
        masses: bool,
        ropes: RopeTables | None = None,
        shared: PoolSet | None = None,
    ) -> None:
        self.codec = storage if isinstance(storage, Codec) else None
        self._dtype = storage if isinstance(storage, torch.dtype) else None
        self._slots, self._memory_limit, self._masses = slots, memory_limit, masses
        self._plain: dict[tuple[int, int, torch.dtype, torch.device], PagePool] = (
            {} if shared is None else shared._plain
        )
        self._ropes = ropes
        self._packed: dict[tuple[str, int, int, int, torch.device], QuantizedPool] = (
            {} if shared is None else shared._packed
        )

    @property
    def format(self) -> str | torch.dtype | None:
        """Name of the format of entries: equal formats store the same tokens alike."""
        return self._dtype if self.codec is None else self.codec.name

    @property
    def make_quantized(self) -> Callable[..., QuantizedPart] | None:
        """Function `quantized` if entries become codes, else None."""
        return None if self.codec is None else self.quantized

    @property
    def limited(self) -> bool:
        """Whether all pools together have a limit of bytes."""
        return self._memory_limit.limit_bytes is not None

    def __iter__(self) -> Iterator[RefCountedPool[Any]]:
        return iter([*self._plain.values(), *self._packed.values()])

    def __len__(self) -> int:
        return len(self._plain) + len(self._packed)

    def plain(self, key_dim: int, value_dim: int, dtype: torch.dtype, device: torch.device) -> PagePool:
        """Return the pool of plain pages of one shape.

        It has 16 bits per number if a quantized pool is used too.
        """
        return self._of(key_dim, value_dim, self._stored(dtype), device, until_plan=False)

    def reading(self, key_dim: int, value_dim: int, dtype: torch.dtype, device: torch.device) -> PagePool:
        """Return the pool of the plain pages of a prompt until its plan, with numbers in `dtype`.

        It is that of `plain` if such a page holds the model's numbers exactly.
        """
        stored = self._stored(dtype)
        exact = torch.promote_types(stored, dtype) == stored
        return self._of(key_dim, value_dim, stored if exact else dtype, device, until_plan=not exact)

    def _stored(self, dtype: torch.dtype) -> torch.dtype:
        if self._dtype is not None or self.codec is None:
            return self._dtype or dtype
        return dtype if dtype is torch.float16 else torch.bfloat16

    def _of(
        self, key_dim: int, value_dim: int, dtype: torch.dtype, device: torch.device, *, until_plan: bool
    ) -> PagePool:
        key = (key_dim, value_dim, dtype, device)
        if key not in self._plain:
            self._plain[key] = PagePool(
                *key, slots=self._slots, masses=self._masses, memory_limit=self._memory_limit, until_plan=until_plan
            )
        return self._plain[key]

    def quantized(
        self, layer: int, n_seq: int, n_kv_heads: int, key_dim: int, value_dim: int, device: torch.device
    ) -> QuantizedPart:
        """Return the quantized part of the table of one layer.

        It is an `AgedStore` if the codec has several tiers by age.

        Raises:
            OptionError: see `packed`.
        """
        assert self.codec is not None, "only a codec has packed pages"
        calibration, key_scales = self.codec.calibration, self.codec.key_scales
        parts = [
            QuantizedStore(
                tier,
                pool,
                n_seq,
                n_kv_heads,
                key_dim,
                value_dim,
                fixed=None if calibration is None else calibration.key_range(layer),
                rope=None if self._ropes is None else self._ropes.of(layer, key_dim, device),
                key_scales=None if key_scales is None else key_scales.of(layer, device),
            )
            for tier, pool in zip(self.codec.tiers, self.packed(layer, key_dim, value_dim, device), strict=True)
        ]
        return parts[0] if len(parts) == 1 else AgedStore(self.codec, parts)

    def packed(self, layer: int, key_dim: int, value_dim: int, device: torch.device) -> list[QuantizedPool]:
        """Return the pools of packed pages of one shape, one per tier.

        They belong to one layer if layers have tables of their own.

        Raises:
            OptionError: a head_dim that the format's groups do not divide.
        """
        assert self.codec is not None, "only a codec has packed pages"
        return [self._packed_pool(tier, layer, key_dim, value_dim, device) for tier in self.codec.tiers]

    def _packed_pool(
        self, codec: Codec, layer: int, key_dim: int, value_dim: int, device: torch.device
    ) -> QuantizedPool:
        tables = None if codec.calibration is None else codec.calibration.tables(layer, codec)
        key = (codec.name, 0 if tables is None else layer, key_dim, value_dim, device)
        if key not in self._packed:
            if codec.prune_values and device.type != "cpu":
                raise OptionError(
                    f"codec {codec.name!r} drops value channels, which is for the CPU alone; on {device.type} write "
                    f"'{codec.name.rpartition(':')[0]}', which drops key channels"
                )
            kept_keys = _kept(codec, codec.prune, key_dim, codec.key, "key")
            kept_values = _kept(codec, codec.prune_values, value_dim, codec.value, "value")
            layout = codec.layout(kept_keys, kept_values, tables=tables)
            self._packed[key] = QuantizedPool(layout, device, masses=self._masses, memory_limit=self._memory_limit)
        return self._packed[key]


def _kept(codec: Codec, ratio: float, dim: int, stored: Side, side: str) -> int:
    """Return how many of `dim` channels are stored.

    Raises:
        OptionError: a ratio that drops none of them, or leaves channels that the format's groups do not divide.
    """
    kept = kept_dim(ratio, dim)
    if ratio and kept == dim:
        raise OptionError(
            f"codec {codec.name!r} drops {side} channels in multiples of {MULTIPLE}, and {ratio:.0%} of "
            f"head_dim={dim} is less; give the ratio {MULTIPLE / dim:g} or more, as in 'think:0.5'"
            if dim > MULTIPLE
            else f"codec {codec.name!r} drops {side} channels in multiples of {MULTIPLE}, and head_dim={dim} has no "
            "more; use a codec that drops none"
        )
    if ratio and stored.group and not stored.by_channel and kept % stored.group:
        raise OptionError(
            f"codec {codec.name!r} leaves {kept} of {dim} {side} channels, which do not fall into its groups of "
            f"{stored.group}; give a ratio that leaves a multiple of {stored.group}, or drop no {side} channels"
        )
    return kept


class LayerPools:
    """Pools of each layer; layers of one format share theirs.

    Args:
        sets: Set of each layer, or a single one for all.
    """

    def __init__(self, sets: Sequence[PoolSet]) -> None:
        self._sets = list(sets)
        self._distinct = list(dict.fromkeys(sets))

    def of(self, layer: int) -> PoolSet:
        """Return the pools of a layer."""
        return self._sets[layer if len(self._sets) > 1 else 0]

    def by_layer(self, n_layers: int) -> list[PoolSet]:
        """Return the pools of each of `n_layers` layers."""
        return [self.of(layer) for layer in range(n_layers)]

    @property
    def format(self) -> Hashable:
        """Format of entries, see `PoolSet.format`; one per layer if they differ."""
        formats = tuple(pool_set.format for pool_set in self._sets)
        return formats[0] if len(set(formats)) == 1 else formats

    @property
    def codecs(self) -> list[Codec]:
        """Codecs of all layers, each once."""
        return [pool_set.codec for pool_set in self._distinct if pool_set.codec is not None]

    @property
    def limited(self) -> bool:
        """Whether all pools together have a limit of bytes."""
        return self._sets[0].limited

    def __iter__(self) -> Iterator[RefCountedPool[Any]]:
        return (pool for pool_set in self._distinct for pool in pool_set)

    def __len__(self) -> int:
        return sum(len(pool_set) for pool_set in self._distinct)


def pools_by_layer(
    stored: LayerCodecs | Format,
    n_layers: int,
    make: Callable[[Format], PoolSet],
    on_host: Collection[int] = (),
    make_on_host: Callable[[Format], PoolSet] | None = None,
) -> LayerPools:
    """Return the pools of `n_layers` layers.

    Layers of one format share what `make` returns; those `on_host` what `make_on_host` returns.
    """
    if not isinstance(stored, LayerCodecs) and not on_host:
        return LayerPools([make(stored)])
    formats = [stored.of(layer) if isinstance(stored, LayerCodecs) else stored for layer in range(n_layers)]
    keys = [(storage, layer in on_host) for layer, storage in enumerate(formats)]
    makers = {False: make, True: make_on_host or make}
    pool_sets = {key: makers[key[1]](key[0]) for key in dict.fromkeys(keys)}
    return LayerPools([pool_sets[key] for key in keys])
