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
    """The cache of one sequence, all layers together; bytes include positions and scores, in whole pages.

    Attributes:
        prompt, new: tokens.
        prefill: bytes while the prompt is read. held: at most while it decodes. mean: on average over the answer.
        far_reading, far_held: bytes in memory of a sequence whose layers all lie on a disk (positions, scores, a page
            of each head, two layers at a time): while the prompt is read, and while it decodes.
        window_reading, window_held: parts of these that are there however few layers lie on a disk: two at a time.
        step_bytes: of keys and values that a decoding step reads on average. new_bytes: of those that a token adds.
        evicts: of a prompt that has ended less stays than was read.
        prompt_bytes: of keys and values of a prompt that is being read. kept_bytes: of those that its plan keeps.
        settles: the end of a prompt reads its pages and writes those that stay; else they stay as they are.
        overwrites: entries take the places of others, so that pages on a disk are written again now and then.
        step_flops, prompt_flops: of attention in a decoding step, and while the prompt is read.
        group: query heads that read one KV head. pools: kinds of pages. arena_bytes: grain in which pools take memory.
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
        """At any time."""
        return max(self.reading, self.held)

    @cached_property
    def far_most(self) -> int:
        """In memory at any time, of a sequence whose layers all lie on a disk."""
        return max(self.far_reading, self.far_held)

    @cached_property
    def window_most(self) -> int:
        """The part of `far_most` that is there however few layers lie on a disk."""
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
    """The cache of a sequence of `prompt` tokens with an answer of `new` tokens.

    Args:
        memory: that pools share, which sets the grain in which they take memory.

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
    """What is there however few layers lie on a disk, out of bytes with none, one and all of them there."""
    if layers == 1:
        return far
    each = (far - (one_far - near * (layers - 1) / layers)) / (layers - 1)
    return max(round(far - layers * each), 0)


def planned(config: EngineConfig) -> dict[str, Any]:
    """The arguments of `kv_size` by which an engine's caches are counted: in place of a number format that needs a
    calibration plain numbers, which take no less."""
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
    """Where entries would lie, as the engine would have it.

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
    """Pairs of a token of the prompt and one that it sees."""
    seen = min(window or prompt, prompt)
    return seen * (seen + 1) // 2 + (prompt - seen) * seen
