"""What left a cache is gone, and all that stayed is attended to: equal to stock attention that hides what left.

The oracle is a stock cache that keeps everything, under an attention function that shows each query head of each
sequence only the positions which the compressed cache held before that step, and the new token.
"""

from contextlib import contextmanager

import pytest
import torch
from transformers import AttentionInterface, DynamicCache
from transformers.masking_utils import AttentionMaskInterface

import millpond as mp
from millpond.hf.stock_attention import plain
from tests.helpers.hf.families import NAMES, left_padded, shared_model, text

LENGTHS, STEPS = [19, 26, 13], 8
METHODS = [
    ("h2o", 9, {}),
    ("tova", 7, {}),
    ("random", 7, {}),
    ("ada", 9, {"score": "h2o"}),
    ("snapkv", 9, {"window": 3}),
]


class Oracle:
    """Attention over everything, with a mask made of positions."""

    def __init__(self):
        self.kept = None  # [layer][sequence][KV head] -> positions; None: all

    def __call__(self, module, query, key, value, attention_mask, scaling, **kwargs):
        mask = self.mask(module.layer_idx, query.shape, key.shape, kwargs.get("sliding_window"))
        return plain(query, key, value, mask, scaling, kwargs.get("softcap"), kwargs.get("s_aux")), None

    def mask(self, layer, query_shape, key_shape, window):
        n_seq, n_heads, n_new, _ = query_shape
        n = key_shape[2]
        pads = torch.tensor([max(LENGTHS) - length for length in LENGTHS])
        positions = (torch.arange(n) - pads[:, None])[:, None, None, :]
        rows = positions[..., -n_new:].transpose(-1, -2)
        visible = (positions >= 0) & (positions <= rows)
        if window:
            visible = visible & (rows - positions < window)
        visible = visible.expand(n_seq, n_heads, n_new, n).clone()
        for sequence, heads in enumerate(self.kept[layer] if self.kept else []):
            group = n_heads // len(heads)
            for head, kept in enumerate(heads):
                shown = torch.zeros(n, dtype=torch.bool)
                shown[torch.tensor(kept) + pads[sequence]] = True
                shown[-1] = True
                visible[sequence, head * group : (head + 1) * group] &= shown
        visible[~visible.any(-1)] = True  # rows of pads: any number will do
        return visible


@contextmanager
def attending_through(model, oracle):
    before = model.config._attn_implementation
    AttentionInterface.register("oracle", oracle)
    AttentionMaskInterface.register("oracle", lambda *args, **kwargs: None)
    model.config._attn_implementation = "oracle"
    yield
    model.config._attn_implementation = before
    del AttentionInterface._global_mapping["oracle"], AttentionMaskInterface._global_mapping["oracle"]


@pytest.mark.covering
@torch.no_grad()
@pytest.mark.parametrize(("method", "budget", "options"), METHODS, ids=[m for m, _, _ in METHODS])
@pytest.mark.parametrize("name", NAMES)
def test_equals_stock_that_hides_what_left(name, method, budget, options):
    model, prompt, new = shared_model(name), left_padded(LENGTHS), text(3, STEPS, seed=8)
    ids, mask = prompt["input_ids"], prompt["attention_mask"]
    at = (mask.cumsum(1) - 1).clamp(min=0)
    inputs = [(ids, mask, at)]
    for column in range(STEPS):
        mask, at = torch.cat([mask, mask.new_ones(3, 1)], 1), at[:, -1:] + 1
        inputs.append((new[:, column : column + 1], mask, at))

    mine, kept = [], [None]
    with mp.compress(model, method, budget, page_slots=4, **options) as cache:
        for ids, mask, at in inputs:
            out = model(input_ids=ids, attention_mask=mask, position_ids=at, cache=cache)
            mine.append(out.logits[:, -1])
            kept.append([[cache.positions(layer, s) for s in range(3)] for layer in range(len(cache.layers))])
    assert kept[-1][-1] != [[list(range(n + STEPS))] * len(kept[-1][-1][0]) for n in LENGTHS], "something left"

    everything, oracle = DynamicCache(), Oracle()
    with attending_through(model, oracle):
        for (ids, mask, at), oracle.kept, found in zip(inputs, kept, mine, strict=False):
            out = model(input_ids=ids, attention_mask=mask, position_ids=at, cache=everything)
            torch.testing.assert_close(found, out.logits[:, -1], atol=2e-5, rtol=0)


def test_the_oracle_shows_what_it_is_told():
    oracle = Oracle()
    shape = torch.Size([3, 4, 1, 8]), torch.Size([3, 2, 30, 8])
    oracle.kept = [[[[0, 1, 2, 12], [0, 1]]] * 3]
    visible = oracle.mask(0, *shape, None)
    assert visible.sum(-1)[:, :, 0].tolist() == [[5, 5, 3, 3]] * 3
    assert visible[0, 0, 0, 7 + 12]
