"""Bytes and work of one sequence's KV cache: by method, budget and number format, for a prompt and an answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from millpond.budget import Budget
from millpond.cache.pages.memory_limit import MemoryLimit
from millpond.cache.pages.pool import DEFAULT_SLOTS
from millpond.cache.pages.pool_set import PoolSet, pools_by_layer
from millpond.codec import CodecSpec, LayerCodecs, codecs_of, resolve
from millpond.engine.config import EngineConfig
from millpond.engine.memory_estimate import estimate, keeps_pages
from millpond.engine.offload.model_size import ModelSize
from millpond.errors import OptionError
from millpond.hf.cache_spec import bounded_policy, budget_of, policy_of
from millpond.kernels.decode_rules import Evict
from millpond.presets import AUTO, choose
from millpond.runner.cache_layout import CacheLayout, check_packable


@dataclass(frozen=True, kw_only=True)
class KVSize:
    """Cache of one sequence, all layers together.

    Bytes include positions and scores, in whole pages.

    Attributes:
        prompt: Tokens of the prompt.
        new: Tokens of the answer.
        reading: Bytes while the prompt is read.
        held: Most bytes while it decodes.
        mean: Bytes on average over the answer.
        far_reading: Bytes in memory of a sequence whose layers are all on a disk (positions, scores, a page
            of each head, two layers at a time), while the prompt is read.
        far_held: The same while it decodes.
        window_reading: Part of `far_reading` that is there however few layers are on a disk: two at a time.
        window_held: The same part of `far_held`.
        step_bytes: Bytes of keys and values that a decoding step reads on average.
        new_bytes: Bytes of keys and values that a token adds.
        prompt_bytes: Bytes of keys and values of a prompt that is being read.
        kept_bytes: Bytes of those that its plan keeps.
        settles: Whether the end of a prompt reads its pages and writes those that stay; else they are not touched.
        evicts: Whether less stays of a prompt that has ended than was read.
        overwrites: Whether entries replace others, so that pages on a disk are written again now and then.
        step_flops: FLOP of attention in a decoding step.
        prompt_flops: FLOP of attention while the prompt is read.
        group: Query heads that read one KV head.
        pools: Kinds of pages.
        arena_bytes: Grain in which pools take memory.
    """

    prompt: int
    new: int
    reading: int
    held: int
    mean: int
    far_reading: int
    far_held: int
    window_reading: int
    window_held: int
    step_bytes: float
    new_bytes: float
    prompt_bytes: float
    kept_bytes: float
    settles: bool
    evicts: bool
    overwrites: bool
    step_flops: float
    prompt_flops: float
    group: float
    pools: int
    arena_bytes: int

    @cached_property
    def most(self) -> int:
        """Most bytes at any time."""
        return max(self.reading, self.held)

    @cached_property
    def far_most(self) -> int:
        """Most bytes in memory at any time, of a sequence whose layers are all on a disk."""
        return max(self.far_reading, self.far_held)

    @cached_property
    def window_most(self) -> int:
        """Part of `far_most` that is there however few layers are on a disk."""
        return self.window_reading if self.far_reading >= self.far_held else self.window_held


def kv_size(
    model: ModelSize,
    prompt: int,
    new: int,
    *,
    method: str | None = None,
    options: Mapping[str, Any] | None = None,
    budget: Budget | str | int | float | None = None,
    codec: CodecSpec = AUTO,
    memory: int | None = None,
) -> KVSize:
    """Return the cache of a sequence of `prompt` tokens with an answer of `new` tokens.

    Args:
        model: Sizes of the model.
        prompt: Tokens of the prompt.
        new: Tokens of the answer.
        method: Method of the cache, see `compress`.
        options: Options of the method.
        budget: Entries that are kept, see `compress`.
        codec: Number format of the entries, see `compress`.
        memory: Bytes that pools share, which set the grain in which they take memory.

    Raises:
        OptionError, BudgetError: as `compress`, or the engine cannot run the method.
    """
    shapes = model.shapes
    dims = [(shape.key_dim, shape.value_dim) for shape in shapes]
    picked = choose(method, budget, codec, evicting=bool(options)).on(dims)
    layout = cache_layout(model, picked.method, options or {}, picked.budget, picked.codec)
    n = len(shapes)
    need = estimate(layout, prompt, new, 1)
    far = estimate(layout, prompt, new, 1, on_disk=frozenset(range(n)))
    one_far = estimate(layout, prompt, new, 1, on_disk=frozenset([0]))
    demands = layout.demands(prompt, new)
    heads = [layer.n_heads for layer in model.layers]
    flops = [2 * n * (shape.key_dim + shape.value_dim) for n, shape in zip(heads, shapes, strict=True)]
    return KVSize(
        prompt=prompt,
        new=new,
        reading=need.prefill,
        held=need.each,
        mean=estimate(layout, prompt, -(-new // 2), 1).each,
        far_reading=far.prefill,
        far_held=far.each,
        window_reading=_window(need.prefill, one_far.prefill, far.prefill, n),
        window_held=_window(need.each, one_far.each, far.each, n),
        step_bytes=sum(demand.layer.kv_bytes(demand.mean_entries) for demand in demands),
        new_bytes=sum(demand.layer.kv_bytes(1) for demand in demands),
        prompt_bytes=sum(demand.prompt_bytes for demand in demands),
        kept_bytes=sum(demand.layer.kv_bytes(demand.kept_entries) for demand in demands),
        settles=not keeps_pages(layout),
        evicts=need.each < need.prefill,
        overwrites=layout.policy.decode_rule(0).evict is not Evict.NEVER,
        step_flops=sum(each * demand.mean_entries for each, demand in zip(flops, demands, strict=True)),
        prompt_flops=sum(each * _pairs(prompt, shape.window) for each, shape in zip(flops, shapes, strict=True)),
        group=sum(heads) / sum(shape.n_kv_heads for shape in shapes),
        pools=len(layout.pools),
        arena_bytes=MemoryLimit(memory).arena_bytes,
    )


def _window(near: int, one_far: int, far: int, layers: int) -> int:
    """Return the bytes that are there however few layers are on a disk.

    They follow from the bytes with none, one and all of the layers there.
    """
    if layers == 1:
        return far
    each = (far - (one_far - near * (layers - 1) / layers)) / (layers - 1)
    return max(round(far - layers * each), 0)


def planned(config: EngineConfig) -> dict[str, Any]:
    """Return the arguments of `kv_size` by which an engine's caches are counted.

    Plain numbers stand in for a number format that needs a calibration; they take no less.
    """
    method, budget, codec, usual = config.choice
    if usual:  # as the model can store it, see `kv_size`
        return {}
    codec = AUTO if any(one.calibrated for one in codecs_of(resolve(codec))) else codec
    return {"method": method, "options": config.options, "budget": budget, "codec": codec}


def cache_layout(
    model: ModelSize,
    method: str,
    options: Mapping[str, Any],
    budget: Budget | str | int | float | None,
    codec: CodecSpec,
) -> CacheLayout:
    """Return the layout of a cache as the engine would have it.

    Raises:
        OptionError, BudgetError: as `compress`, or the engine cannot run the method.
    """
    policy = policy_of(method, dict(options))
    check_packable(method, policy.needs)
    kept = budget_of(method, budget, policy)
    policy = bounded_policy(policy, kept)
    stored = resolve(codec)
    if isinstance(stored, LayerCodecs):
        stored.check_layers(len(model.shapes))
    for one in codecs_of(stored):
        if one.calibrated:
            raise OptionError(
                f"codec {one.name!r} needs a calibration of the model, which plans do not read yet; use int4, int8 "
                "or kivi2"
            )
        policy.check_codec(one)
    memory_limit = MemoryLimit(None)
    pools = pools_by_layer(
        stored,
        len(model.shapes),
        lambda one: PoolSet(one or model.dtype, DEFAULT_SLOTS, memory_limit, masses=policy.mass_bias),
    )
    return CacheLayout(policy, kept, pools, model.shapes, model.dtype, torch.device("cpu"))


def _pairs(prompt: int, window: int) -> int:
    """Return the pairs of a token of the prompt and one that it sees."""
    seen = min(window or prompt, prompt)
    return seen * (seen + 1) // 2 + (prompt - seen) * seen
