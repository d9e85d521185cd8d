"""SimLayerKV: which layers are lazy, what they keep, where the rest goes, and exact totals."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import millpond as mp
from millpond.errors import OptionError
from millpond.methods import METHODS
from millpond.methods.simlayerkv import LazyLayers
from millpond.policy.layer_allocation import split_budget
from millpond.policy.policy import Policy
from millpond.policy.scores.attention import WindowAttention
from millpond.policy.view import View
from tests.helpers.matrix.models import llama, prompts

SETTINGS: dict[str, Any] = {"sinks": 2, "recent": 6, "score": "snapkv/window=4/kernel=3"}


def shares(model: LlamaForCausalLM, ids: torch.Tensor, window: int, sinks: int, recent: int) -> list[float]:
    """Of each layer, the attention of the last queries that stays near, from transformers' own attention."""
    eager = LlamaForCausalLM(deepcopy(model.config)).double().eval()
    eager.load_state_dict(model.state_dict())
    eager.set_attn_implementation("eager")
    n, found = ids.shape[1], []
    for p in eager(ids, output_attentions=True).attentions:
        last = p[0, :, -window:]
        found.append(float((last[..., :sinks].sum(-1) + last[..., n - recent :].sum(-1)).mean()))
    return found


def test_the_share_of_attention_that_stays_near() -> None:
    """Two heads, five entries; near are the first one and the last two."""
    signal = torch.tensor([[0.5, 0.1, 0.1, 0.2, 0.1], [0.2, 0.2, 0.2, 0.4, 9.0]])
    positions = torch.tensor([[0, 1, 2, 3, 4], [0, 1, 3, 4, -1]], dtype=torch.int32)
    near = LazyLayers(sinks=1, recent=2).measure(View(positions, signal, seen=5, layer=0))
    assert near == pytest.approx((0.5 + 0.2 + 0.1 + 0.2 + 0.2 + 0.4) / 2)


def test_what_lazy_layers_leave_goes_to_the_others() -> None:
    lazy = LazyLayers(threshold=0.9).decide([0.95, 0.2, 0.91, 0.9])
    assert split_budget(lazy, 20, 8, [100] * 4) == [8, 32, 8, 32]
    assert split_budget(lazy, 20, 8, [30] * 4) == [10, 30, 10, 30]  # what the others cannot use comes back
    everyone = LazyLayers(threshold=0.9).decide([0.95] * 3)
    assert split_budget(everyone, 20, 8, [100] * 3) == [20] * 3


@pytest.mark.parametrize("chunk", [None, 16])
def test_layers_hold_what_was_decided(chunk: int | None) -> None:
    model, (ids, mask) = llama(layers=4), prompts(3, length=60)
    own = [ids[s, mask[s].bool()][None] for s in range(3)]
    with torch.no_grad():
        found = [shares(model, row, 4, 2, 6) for row in own]
        threshold = sorted(x for row in found for x in row)[5]
        whole = {"between_chunks": chunk is None, "threshold": threshold}
        with mp.compress(model, "simlayerkv", 16, **whole, **SETTINGS) as cache:
            model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=2,
                do_sample=False,
                cache=cache,
                prefill_chunk_size=chunk,
            )
            kept = [[cache.positions(layer, s) for layer in range(4)] for s in range(3)]
    lazy = [[x > threshold for x in row] for row in found]
    assert len({tuple(row) for row in lazy}) > 1
    for s, row in enumerate(lazy):
        n = own[s].shape[1]
        total = 0
        for layer, is_lazy in enumerate(row):
            before = [[p for p in head if p < n] for head in kept[s][layer]]  # without what was decoded since
            total += len(before[0])
            if is_lazy and not all(row):
                assert before == [[0, 1, *range(n - 6, n)]] * 2
        assert total == 4 * 16


def test_a_budget_of_everything_equals_full() -> None:
    model, (ids, mask) = llama(layers=4), prompts(3)
    stock = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
    with torch.no_grad(), mp.compress(model, "simlayerkv", 80, threshold=0.0, **SETTINGS) as cache:
        out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=8, do_sample=False, cache=cache)
    assert out.tolist() == stock.tolist()


def test_each_turn_is_decided_and_a_reset_forgets() -> None:
    model, (ids, _) = llama(layers=3), prompts(1, length=50)
    with torch.no_grad(), mp.compress(model, "simlayerkv", 16, threshold=0.4, **SETTINGS) as cache:
        first = []
        for _ in range(2):
            cache.reset()
            for turn in (ids[:, :30], ids[:, 30:31], ids[:, 31:49], ids[:, 49:]):
                model(turn, cache=cache)
                if turn.shape[1] == 1:
                    assert sum(int(layer_cache.stored[0, 0]) - 1 for layer_cache in cache.layer_caches) == 3 * 16
            first.append([cache.positions(layer) for layer in range(3)])
        assert first[0] == first[1]
        cache.check_integrity()


@pytest.mark.parametrize("seed", range(3))
def test_assisted_generation_equals_plain_decoding(seed: int) -> None:
    """Drafts begin behind the prompt, so that all layers have read it when the first one decides."""
    model = llama()
    ids = torch.randint(3, 90, (1, 8), generator=torch.Generator().manual_seed(seed)).repeat(1, 6)
    found, lengths = [], []
    for drafts in ({}, {"prompt_lookup_num_tokens": 3}):
        with mp.compress(model, "simlayerkv", 16, **SETTINGS) as cache:
            hook = model.register_forward_pre_hook(
                lambda _, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
            )
            try:
                out = model.generate(input_ids=ids, max_new_tokens=24, do_sample=False, cache=cache, **drafts)
            finally:
                hook.remove()
            found.append(out.tolist())
    assert found[0] == found[1]
    assert 4 in lengths  # a draft of three was verified


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threshold": 1.5}, "threshold=1.5 must be 0 to 1"),
        ({"score": "window"}, "watches no attention"),
        ({"score": "h2o/prefill=greedy"}, "need a score that plans once at its end"),
        ({"score": "rkv"}, "need a score that plans once at its end"),
    ],
)
def test_what_cannot_be_decided_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        METHODS.get("simlayerkv")(**options)


def test_a_policy_says_that_it_waits() -> None:
    assert Policy(score=WindowAttention(), every_step=False, layers=LazyLayers()).needs_all_layers
    assert not Policy(score=WindowAttention(), every_step=False).needs_all_layers
