"""Safetensors in memory: tensors and texts as one buffer, checked before use, and caches of a sequence in it."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from safetensors.torch import save
from torch import Tensor

from millpond.cache.batch_cache import BatchCache, Pages
from millpond.cache.pages.ref_counted_pool import Pool
from millpond.cache.serialization import ENTRIES, from_tensors, part_prefix, to_tensors
from millpond.errors import DataError
from millpond.hf.document import PREFIX, digest_of, restore_states, state_tensors
from millpond.hf.state_layers import States
from millpond.runner.cache_factory import CacheFactory
from millpond.runner.packed_model import LayerShape

#: Limits of a header in bytes, of the tensors that it names, and of the axes of one.
MAX_HEADER, MAX_TENSORS, MAX_AXES = 2**26, 2**20, 8
#: Element types of tensors, by the names of the safetensors format.
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
_CHECKSUM = "checksum"


def pack(texts: Mapping[str, str], tensors: Mapping[str, Tensor]) -> bytes:
    """Return one buffer of texts and of tensors on the host, any shapes.

    A SHA-256 of both is added to the texts.
    """
    return save(dict(tensors), {**texts, _CHECKSUM: digest_of(texts, tensors)})


def unpack(data: bytes | bytearray | memoryview) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return the texts and the tensors of a buffer of `pack`.

    The tensors share one copy of the buffer.

    Raises:
        DataError: the buffer is cut off, is no such buffer, or does not match its checksum. No more memory was taken
            than the buffer has.
    """
    view = memoryview(data).cast("B")
    entries, begin = _header(view)
    texts = entries.pop("__metadata__", None)
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        raise _broken("its header has no texts")
    if len(entries) > MAX_TENSORS:
        raise _broken(f"it names {len(entries):,} tensors, and may name {MAX_TENSORS:,}")
    payload = bytearray(view[begin:])
    tensors = {name: _tensor(name, entry, payload) for name, entry in entries.items()}
    if sum(tensor.nbytes for tensor in tensors.values()) != len(payload):
        raise _broken(f"it has {len(payload):,} bytes of tensors, and they do not fill them")
    checksum = texts.pop(_CHECKSUM, None)
    if checksum != digest_of(texts, tensors):
        raise _broken("its checksum differs, so it is not as it was written")
    return texts, tensors


def _header(view: memoryview) -> tuple[dict[str, Any], int]:
    """Return the header, and the offset at which the tensors begin."""
    n = int.from_bytes(view[:8], "little")
    if len(view) < 8 or not 2 <= n <= min(MAX_HEADER, len(view) - 8):
        raise _broken(f"it has {len(view):,} bytes, and a header of {n:,} does not fit")
    written = bytes(view[8 : 8 + n])
    try:
        header = json.loads(written)
        rewritten = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        raise _broken("its header is no JSON") from None
    if not isinstance(header, dict):
        raise _broken("its header is no object")
    if rewritten.ljust(n) != written:  # so that the checksum covers each byte of it
        raise _broken("its header is not as `pack` writes it")
    return header, 8 + n


def _tensor(name: str, entry: Any, payload: bytearray) -> Tensor:
    """Return one tensor as a view of the payload."""
    try:
        dtype, shape, (begin, end) = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        offsets_and_shape = [begin, end, *shape]
    except (KeyError, TypeError, ValueError):
        raise _broken(f"tensor {name[:80]!r} has no type, shape and place") from None
    if len(shape) > MAX_AXES or not all(type(number) is int and number >= 0 for number in offsets_and_shape):
        raise _broken(f"tensor {name[:80]!r} has the shape {str(shape)[:80]}")
    n, size = math.prod(shape), dtype.itemsize
    if not begin <= end <= len(payload) or begin % size or n * size != end - begin:
        raise _broken(f"tensor {name[:80]!r} of shape {str(shape)[:80]} does not lie in {end - begin:,} of its bytes")
    if not n:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(payload, dtype=dtype, count=n, offset=begin).view(shape)


def _broken(why: str) -> DataError:
    return DataError(f"the buffer of a request cannot be read: {why}; send the request once more")


def cache_tensors(batch_cache: BatchCache, *, later_prompts: bool = False) -> dict[str, Tensor]:
    """Return the tensors that continue the one sequence of a batch cache, on the host.

    Its prompt was planned.

    Args:
        batch_cache: The cache.
        later_prompts: See `to_tensors`.
    """
    tensors = {
        f"{layer_cache.index}.{name}": tensor
        for layer_cache in batch_cache.layers
        for name, tensor in without_free_slots(to_tensors(layer_cache, later_prompts=later_prompts)).items()
    }
    tensors["closed"] = torch.tensor(int(batch_cache.tracker.closed[0]))
    return tensors | (state_tensors(batch_cache.states) if isinstance(batch_cache.states, States) else {})


def sequence_tensors(
    cache_factory: CacheFactory, batch_cache: BatchCache, sequence: int, *, later_prompts: bool = False
) -> dict[str, Tensor]:
    """Return `cache_tensors` of one sequence of a batch cache, which stays there."""
    single_cache = cache_factory.make_cache()
    try:
        batch_cache.copy_to([sequence], single_cache)
        return cache_tensors(single_cache, later_prompts=later_prompts)
    finally:
        single_cache.clear()


def pages_of(
    cache_factory: CacheFactory, layers: Sequence[LayerShape], caches: Sequence[Mapping[str, Tensor]], n: int
) -> Pages:
    """Return the pages that stored sequences take, and slots of states for `n` answers.

    The numbers are not checked yet.
    """
    need: Counter[Pool] = Counter()
    for cache in caches:
        for index, layer in enumerate(layers):
            pool = cache_factory.pool(layer)
            lens = cache.get(f"{index}.lens", torch.zeros(1)).long().clamp(min=0)
            need[pool] += int((-(-lens // pool.slots)).sum())
            for number, packed in enumerate(cache_factory.packed_pools(layer)):
                owned = cache.get(f"{index}.{part_prefix(number)}owned", torch.zeros(1))
                need[packed] += int(owned.long().clamp(min=0).sum())
    if cache_factory.slots is not None:
        need[cast(Pool, cache_factory.slots)] += n
    return dict(need)


def fill_cache(
    batch_cache: BatchCache,
    cache_factory: CacheFactory,
    layers: list[LayerShape],
    n_heads: int,
    stored: Mapping[str, Tensor],
    ids: Tensor,
) -> None:
    """Fill an empty batch cache with the sequence of `cache_tensors`.

    Args:
        batch_cache: The empty cache.
        cache_factory: Factory of the batch cache.
        layers: Shapes of the model's layers.
        n_heads: Query heads; 0 where the model names no number.
        stored: Tensors of the sequence.
        ids: Tokens that it has read, (n,).

    Raises:
        DataError: tensors of other layers, or that do not fit together. The caller clears the batch cache then.
        PoolFullError: no memory is free. The caller clears the batch cache then.
    """
    closed = _closed(stored, cache_factory, len(ids))
    text, ids = ids, ids[closed:]
    for layer_cache, layer in zip(batch_cache.layers, layers, strict=True):
        prefix = f"{layer_cache.index}."
        part = {name.removeprefix(prefix): tensor for name, tensor in stored.items() if name.startswith(prefix)}
        dtype = cache_factory.pool(layer).arrays.dtype
        part = _padded(layer_cache.index, layer, dtype, n_heads, part)
        if closed and "origins" not in part:
            raise DataError(f"layer {layer_cache.index}: the request's cache lacks where its entries stood in the text")
        from_tensors(layer_cache, part, len(ids), ids.device)
    states: Any = batch_cache.states
    if isinstance(states, States):
        restore_states(states, {name: tensor for name, tensor in stored.items() if name.startswith(PREFIX)}, ids.device)
    batch_cache.tracker.adopt(ids[None])
    batch_cache.tracker.closed[0] = len(text) - len(ids)
    for layer_cache in batch_cache.layers:
        layer_cache.columns = len(ids)


def _closed(stored: Mapping[str, Tensor], cache_factory: CacheFactory, n_tokens: int) -> int:
    """Return the positions that closed gaps took away of a text of `n_tokens`.

    Raises:
        DataError: more than the text has, or where gaps do not close, or fewer than the context needs.
    """
    stored_closed = stored.get("closed", torch.tensor(0))
    closed = int(stored_closed) if stored_closed.numel() == 1 and stored_closed.dtype == torch.int64 else -1
    max_closed = 0 if cache_factory.reach is None else n_tokens
    if not 0 <= closed <= max_closed or cache_factory.within_context(n_tokens - closed) < n_tokens - closed:
        raise DataError(f"the request's cache has lost {closed} positions of {n_tokens} tokens; send the request again")
    return closed


def without_free_slots(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a layer with entries (heads, width, ...) as (entries, ...)."""
    is_entry = _held(tensors["lens"], tensors["positions"].shape[1])
    return {name: tensor[is_entry] if name in ENTRIES else tensor for name, tensor in tensors.items()}


def _padded(
    index: int, layer: LayerShape, dtype: torch.dtype, n_heads: int, part: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return the tensors that `without_free_slots` was given.

    Raises:
        DataError: entries of another number, shape or type than this layer holds; nothing was allocated.
    """

    def require(holds: bool, rule: str) -> None:
        if not holds:
            raise DataError(f"layer {index}: the request's cache does not fit ({rule}); send the request once more")

    for name in ("keys", "values", "positions", "scores", "lens"):
        require(name in part, f"it has {name}")
    lens, n = part["lens"], len(part["positions"]) if part["positions"].ndim == 1 else -1
    require(lens.shape == (layer.n_kv_heads,) and lens.dtype == torch.int32, f"it has {layer.n_kv_heads} KV heads")
    require(bool((lens >= 0).all()) and int(lens.long().sum()) == n, f"its heads hold {n} entries together")
    require(part["keys"].shape == (n, layer.key_dim), f"a key has {layer.key_dim} numbers")
    require(part["values"].shape == (n, layer.value_dim), f"a value has {layer.value_dim} numbers")
    require(part["keys"].dtype == part["values"].dtype == dtype, f"entries are {dtype}")
    for name in ("queries", "moments.total"):
        require(
            not n_heads or name not in part or part[name].shape[:1] == (n_heads,), f"there are {n_heads} query heads"
        )
    means = part.get("focus.means")
    require(not n_heads or means is None or means.shape[1:2] == (n_heads,), f"there are {n_heads} query heads")
    width = int(lens.max()) if len(lens) else 0
    is_entry = _held(lens, width)
    padded = dict(part)
    for name in ENTRIES:
        if (entries := part.get(name)) is not None:
            require(len(entries) == n, f"there are {n} {name}")
            slots = entries.new_full((len(lens), width, *entries.shape[1:]), -1 if name == "positions" else 0)
            slots[is_entry] = entries
            padded[name] = slots
    return padded


def _held(lens: Tensor, width: int) -> Tensor:
    """Return whether each slot holds an entry, (heads, width)."""
    return torch.arange(width) < lens.cpu()[:, None]
