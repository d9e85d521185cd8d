"""Events of a worker on caches that a test fills: sinks of the attention, and entries of 8 bits."""

from types import SimpleNamespace

import pytest
import torch

from millpond.plugins import AttentionShape
from millpond_vllm.cache_layout import StridedLayout
from millpond_vllm.messages import Eviction, Observation, StepOrders
from millpond_vllm.settings import EngineSettings
from millpond_vllm.worker_state import EvictingLayer, WorkerState

HEADS, GROUP, BLOCK, DIM, LAYERS = 2, 2, 8, 16, 2
TOKENS, WINDOW = 64, 32  # 4 blocks compete, and the newest 4 stay


class Filled:
    """A worker's state over caches of 20 blocks, in which one request fills blocks 1 to 8.

    Args:
        sinks: Logits (layers, Hq) beside those of entries; None for none.
        dtype: Name of the cache's dtype.
        scale: Factor of keys and values of 8 bits.
    """

    def __init__(self, sinks=None, dtype="auto", scale=1.0):
        draw = torch.Generator().manual_seed(5)
        self.numbers = torch.randn(LAYERS, 20, HEADS, BLOCK, 2 * DIM, generator=draw)
        self.queries = 2 * torch.randn(LAYERS, TOKENS, HEADS * GROUP, DIM, generator=draw)
        policy = EngineSettings.parse({"method": "snapkv", "budget": 48}).policy()
        self.layers = []
        for index in range(LAYERS):
            cache = self.numbers[index].clone()
            if dtype != "auto":
                cache = (cache / scale).to(torch.float8_e4m3fn).view(torch.uint8)
            factor = torch.tensor(scale)
            module = SimpleNamespace(
                kv_cache=cache, kv_cache_dtype=dtype, _k_scale=factor, _v_scale=factor, dtype=torch.float32
            )
            shape = AttentionShape(DIM**-0.5, sink_logits=None if sinks is None else sinks[index])
            self.layers.append(EvictingLayer(index, module, HEADS * GROUP, HEADS, index, shape, lambda: torch.empty(0)))
        self.state = WorkerState(policy, self.layers, StridedLayout(DIM), BLOCK)

    def evict(self):
        """Show the queries, evict, and return the positions (L, H, n) that stay."""
        slots = torch.arange(BLOCK, BLOCK + TOKENS)
        seen = Observation("r", TOKENS - WINDOW, slots[-WINDOW:].tolist())
        self.state.begin(StepOrders([], [seen]))
        rows = self.state.queries.rows(slots)
        for layer in self.layers:
            self.state.queries.remember(layer.index, self.queries[layer.index], rows)
        source, tail = [1, 2, 3, 4], [5, 6, 7, 8]
        self.state.begin(StepOrders([Eviction("r", source, [10, 11], tail, TOKENS, 0, [10, 11, 0, 0, *tail])]))
        return self.state._positions["r"]


def scores(queries, keys, sinks):
    """Return (H, n): what the last queries (T, Hq, D) of a layer pay to keys (H, n, D), before any pooling."""
    q = queries[-WINDOW:].transpose(0, 1)
    logits = q @ keys.repeat_interleave(GROUP, 0).transpose(1, 2) * DIM**-0.5
    at = torch.arange(TOKENS - WINDOW, TOKENS)
    logits = logits.masked_fill(torch.arange(TOKENS)[None] > at[:, None], -torch.inf)
    beside = sinks.view(-1, 1, 1).expand(-1, WINDOW, 1)
    attention = torch.cat([logits, beside], 2).softmax(2)[..., :-1]
    return attention.sum(1).view(HEADS, GROUP, -1).sum(1)


def test_attention_to_sinks_counts_in_every_layer():
    """One query head of a group gives nearly all to its sink, another one in each layer: its entries lose."""
    sinks = torch.tensor([[20.0, -20.0, -20.0, 20.0], [-20.0, 20.0, 20.0, -20.0]])
    with_sinks, without = Filled(sinks).evict(), Filled().evict()
    assert with_sinks.shape == (LAYERS, HEADS, 2 * BLOCK)
    assert not torch.equal(with_sinks, without)
    for layer in range(LAYERS):
        alone = Filled(sinks)
        alone.state._together = False  # each layer by itself, with its own sinks
        assert torch.equal(alone.evict()[layer], with_sinks[layer])
    filled = Filled(sinks)
    kept = filled.evict()
    for layer in range(LAYERS):
        keys = filled.numbers[layer, 1:9].transpose(0, 1).flatten(1, 2)[..., :DIM]
        paid = scores(filled.queries[layer], keys, sinks[layer])[:, :32]
        mean = paid.gather(1, kept[layer].long()).mean(1)
        assert (mean > paid.mean(1)).all(), "kept entries are those that the open head looks at"


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_entries_of_eight_bits_move_as_they_are(scale):
    """The choice is that of the same numbers in float32, and the bytes are copied."""
    stored = Filled(dtype="fp8", scale=scale)
    plain = Filled()
    for one, two in zip(plain.layers, stored.layers, strict=True):
        one.module.kv_cache.copy_(two.module.kv_cache.view(torch.float8_e4m3fn).float() * scale)
    before = [layer.cache.clone() for layer in stored.layers]
    kept = stored.evict()
    assert torch.equal(kept, plain.evict())
    layout = StridedLayout(DIM)
    for layer, old in zip(stored.layers, before, strict=True):
        assert layer.cache.dtype == torch.uint8
        keys, values = layout.read(layer.cache, torch.tensor([10, 11]))
        source = torch.tensor([1, 2, 3, 4])
        index = kept[layer.index].long()[..., None].expand(-1, -1, DIM)
        for got, was in zip((keys, values), layout.read(old, source), strict=True):
            assert torch.equal(got, was.gather(1, index))
