"""Every feature of generate(): equal to stock where all is kept, and to itself without the feature where it is not."""

import pytest
import torch
from transformers import DynamicCache
from transformers.generation.streamers import BaseStreamer

import millpond as mp
from tests.helpers.hf.families import family, generate, left_padded, most_stored, one, shared_model, text

#: One of each way to store: per head; windows and a soft cap; latents.
MODELS = ["llama", "gemma2", "deepseek_v3"]
SMALL = [
    ("h2o", 12, {}),
    ("ada", 12, {"score": "h2o"}),
    ("snapkv", 12, {"window": 4}),
    ("tova", 9, {}),
    ("streaming", 12, {}),
    ("random", 12, {}),
    ("snapkv", 12, {"window": 4, "decode": "evict"}),
    ("h2o", 12, {"prefill": "greedy"}),
]


def rotates(name: str, method: str) -> bool:
    return method != "streaming" or not family(name).latents


class Collector(BaseStreamer):
    def __init__(self):
        self.tokens = []

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.ended = True


# ---------------------------------------------------------------------------------- all kept: equal to stock

FEATURES = {
    "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 20},
    "several sequences": {"do_sample": True, "num_return_sequences": 2},
    "beams": {"num_beams": 3},
    "sampled beams": {"num_beams": 2, "do_sample": True, "num_return_sequences": 2},
    "chunks": {"prefill_chunk_size": 7},
    "processors": {"repetition_penalty": 1.3, "min_new_tokens": 5},
}


@pytest.mark.covering
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("name", MODELS)
def test_features_with_everything_kept(name, feature):
    model, prompt = shared_model(name), left_padded([19, 26, 13])
    torch.manual_seed(5)
    expected = generate(model, prompt, 10, **FEATURES[feature])
    with mp.compress(model, "full", page_slots=8) as cache:
        torch.manual_seed(5)
        found = generate(model, prompt, 10, cache=cache, **FEATURES[feature])
        cache.check_integrity()
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", MODELS)
def test_turns_with_everything_kept(name):
    model, ids, mask = shared_model(name), *left_padded([9, 14]).values()
    stock = DynamicCache(config=model.config)
    with mp.compress(model, "full", page_slots=8) as cache:
        for turn in range(3):
            expected = generate(model, {"input_ids": ids, "attention_mask": mask}, 5, cache=stock)
            found = generate(model, {"input_ids": ids, "attention_mask": mask}, 5, cache=cache)
            assert torch.equal(found, expected)
            ids = torch.cat([found, text(2, 6, seed=turn)], 1)
            mask = torch.cat([mask, mask.new_ones(2, 11)], 1)
        assert cache.stats().seen == [9 + 2 * 11 + 4, 14 + 2 * 11 + 4]


def test_streamer():
    model, prompt, streamer = shared_model("llama"), one(12), Collector()
    with mp.compress(model, "h2o", 9) as cache:
        out = generate(model, prompt, 8, cache=cache, streamer=streamer)
    assert streamer.tokens == out[0].tolist()
    assert streamer.ended


# ---------------------------------------------------------------------------------- small budgets: equal to itself


@pytest.mark.covering
@pytest.mark.parametrize(("method", "budget", "options"), SMALL)
@pytest.mark.parametrize("name", MODELS)
def test_chunks_change_nothing_when_the_plan_waits(name, method, budget, options):
    if not rotates(name, method):
        pytest.skip("positions cannot be moved")
    model, prompt = shared_model(name), left_padded([19, 26, 13])
    with mp.compress(model, method, budget, between_chunks=False, page_slots=4, **options) as cache:
        whole = generate(model, prompt, 8, cache=cache)
        kept = [cache.positions(layer, s) for layer in range(len(cache.layers)) for s in range(3)]
        cache.reset()
        assert torch.equal(generate(model, prompt, 8, cache=cache, prefill_chunk_size=6), whole)
        assert [cache.positions(layer, s) for layer in range(len(cache.layers)) for s in range(3)] == kept


@pytest.mark.parametrize("name", MODELS)
def test_chunks_stay_inside_the_budget_when_planned_between(name):
    model, prompt = shared_model(name), left_padded([30, 41])
    with mp.compress(model, "h2o", 8, page_slots=4, memory_limit="64KiB") as cache:
        generate(model, prompt, 6, cache=cache, prefill_chunk_size=4)
        assert most_stored(cache) == 8


@pytest.mark.parametrize("name", MODELS)
def test_several_sequences_of_one_prompt(name):
    model, prompt = shared_model(name), left_padded([19, 13])
    with mp.compress(model, "h2o", 8, page_slots=4) as cache:
        single = generate(model, prompt, 8, cache=cache)
        cache.reset()
        settings = {"do_sample": True, "top_k": 1, "num_return_sequences": 2}
        several = generate(model, prompt, 8, cache=cache, **settings)
        assert torch.equal(several, single.repeat_interleave(2, 0))
        cache.reset()
        generate(model, prompt, 8, cache=cache, num_beams=3)
        cache.check_integrity()
        assert most_stored(cache) == 8


@pytest.mark.covering
@torch.no_grad()
@pytest.mark.parametrize(("method", "budget", "options"), SMALL)
@pytest.mark.parametrize("name", MODELS)
def test_a_chosen_batch_goes_on_like_a_batch_made_of_the_chosen(name, method, budget, options):
    if not rotates(name, method):
        pytest.skip("positions cannot be moved")
    model, prompt, more = shared_model(name), left_padded([19, 26, 13]), text(4, 6, seed=9)
    order, logits = [2, 0, 0, 1], []
    for chosen_first in (True, False):
        with mp.compress(model, method, budget, page_slots=4, **options) as cache:
            rows = torch.tensor(order if chosen_first else [0, 1, 2])
            ids, mask = prompt["input_ids"][rows], prompt["attention_mask"][rows]
            positions = (mask.cumsum(1) - 1).clamp(min=0)
            model(input_ids=ids, attention_mask=mask, position_ids=positions, cache=cache)
            if not chosen_first:
                cache.batch_repeat_interleave(2)  # a a b b c c
                cache.batch_select_indices(torch.tensor([True, True, False, True, True, False]))  # a a b c
                cache.reorder_cache(torch.tensor([3, 0, 1, 2]))  # c a a b
                mask = prompt["attention_mask"][torch.tensor(order)]
            cache.check_integrity()
            last = mask.sum(1)
            for column in range(6):
                mask = torch.cat([mask, mask.new_ones(4, 1)], 1)
                out = model(
                    input_ids=more[:, column : column + 1],
                    attention_mask=mask,
                    position_ids=(last + column)[:, None],
                    cache=cache,
                )
                logits.append(out.logits)
            cache.check_integrity()
    torch.testing.assert_close(torch.cat(logits[:6]), torch.cat(logits[6:]), atol=1e-5, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_turns_equal_an_own_loop(name):
    """Three turns of generate() and the same forwards by hand leave the same cache and the same tokens."""
    model, new = shared_model(name), [text(1, n, seed=n) for n in (15, 6, 7)]
    kept = []
    with mp.compress(model, "h2o", 10, page_slots=4) as cache:
        ids = new[0][:, :0]
        for part in new:
            ids = generate(model, {"input_ids": torch.cat([ids, part], 1)}, 4, cache=cache)
        kept.append([cache.positions(layer) for layer in range(len(cache.layers))])
        assert most_stored(cache) == 10
        cache.reset()

        mine, unread = new[0][:, :0], 0
        for part in new:
            mine = torch.cat([mine, part], 1)
            step = mine[:, -(part.shape[1] + unread) :]
            for _ in range(4):
                logits = model(step, cache=cache).logits
                step = logits[:, -1:].argmax(-1)
                mine = torch.cat([mine, step], 1)
            unread = 1
        kept.append([cache.positions(layer) for layer in range(len(cache.layers))])
    assert torch.equal(mine, ids)
    assert kept[0] == kept[1]


@pytest.mark.parametrize(("method", "budget", "options"), SMALL)
def test_a_prompt_after_reset_meets_a_fresh_cache(method, budget, options):
    model = shared_model("llama")
    with mp.compress(model, method, budget, page_slots=4, **options) as cache:
        expected = generate(model, left_padded([17, 22], seed=4), 8, cache=cache)
        kept = cache.positions(0), cache.positions(1, 1)
    with mp.compress(model, method, budget, page_slots=4, **options) as cache:
        generate(model, left_padded([30, 9, 12], seed=1), 8, cache=cache)
        cache.reset()
        assert cache.stats().reserved_bytes == 0
        assert torch.equal(generate(model, left_padded([17, 22], seed=4), 8, cache=cache), expected)
        assert (cache.positions(0), cache.positions(1, 1)) == kept
