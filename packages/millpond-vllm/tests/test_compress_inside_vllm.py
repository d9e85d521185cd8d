"""Kept positions and tokens inside vLLM are those of `mp.compress`: methods, lengths, chunks, prefix cache, batches."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from vllm_helpers.engines import Engine, need_vllm
from vllm_helpers.models import prompts

need_vllm()

from transformers import LlamaForCausalLM  # noqa: E402

import millpond as mp  # noqa: E402
from millpond.policy import policy as policies  # noqa: E402
from millpond_vllm.event_times import NEVER  # noqa: E402
from millpond_vllm.settings import RequestSettings  # noqa: E402

pytestmark = pytest.mark.slow
NEW = 16
LENGTHS = (40, 200, 700, 1500, 3000)
CHUNKS = (64, 512, 8192)
#: Those that would evict while decoding grow: their events there are compared with a plain reference elsewhere.
METHODS = {
    "snapkv": {},
    "h2o": {"decode": "grow"},
    "tova": {"decode": "grow"},
    "streaming": {"decode": "grow"},
    "keydiff": {},
    "knorm": {},
    "lagkv": {},
    "criticalkv": {},
}
#: Relative difference of scores below which two entries tie, and the share of entries that may be chosen by that.
TIE, MOST = 1e-6, 1e-3


@dataclass
class Expected:
    """What `mp.compress` makes of a prompt: kept positions and scores by layer, (Hkv, n), and tokens."""

    kept: list[Tensor]
    scores: list[Tensor]
    tokens: list[int]


@pytest.fixture(scope="module", params=[True, False], ids=["prefix cache", "no prefix cache"])
def engine(tiny_model, request):
    return Engine(
        tiny_model,
        {"method": "snapkv", "budget": "30%"},
        num_gpu_blocks_override=500,
        max_num_batched_tokens=CHUNKS[-1],
        enable_prefix_caching=request.param,
    )


@pytest.fixture(scope="module")
def model(tiny_model):
    return LlamaForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()


def texts():
    return [prompts(1, length, length, seed=length)[0] for length in LENGTHS]


def compressed(model, rules, ids, monkeypatch):
    """What `mp.compress` makes of a prompt under the events of the engine's rules."""
    times, given = rules.times(len(ids), RequestSettings()), torch.tensor([ids])
    if times.first() >= NEVER:
        policy, budget, tail = "full", None, len(ids)
    else:
        assert times.first() == len(ids), "one event, at the end of the prompt"
        tail = len(ids) - times.left(len(ids)) * rules.block
        policy = replace(rules.policy, protect=replace(rules.policy.protect, recent=tail, grace=0))
        budget = times.packed * rules.block + tail
    scores, keep_best = [], policies.keep_best

    def recorded(value, *args, **kwargs):
        scores.append(value)
        return keep_best(value, *args, **kwargs)

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(policies, "keep_best", recorded)
        with mp.compress(model, policy, budget) as cache:
            model(given, cache=cache)
            kept = [torch.tensor(cache.positions(layer)) for layer in range(model.config.num_hidden_layers)]
    with mp.compress(model, policy, budget), torch.no_grad():
        made = model.generate(given, max_new_tokens=NEW, do_sample=False, attention_mask=torch.ones_like(given))
    return Expected(kept, scores, made[0, len(ids) :].tolist())


def remembered(engine):
    """Positions that each event keeps from now on, newest tokens among them, by the tokens that were computed."""
    state, found = engine.worker._state, {}
    evict = state._evict

    def recorded(eviction):
        evict(eviction)
        packed = state._positions[eviction.request]
        first = engine.scheduler.manager.times[eviction.request].left(eviction.computed) * state.block
        newest = torch.arange(first, eviction.computed, dtype=packed.dtype)
        found[eviction.computed] = torch.cat([packed, newest.expand(*packed.shape[:2], -1)], 2)

    state._evict = recorded
    return found


def untied(ours, expected):
    """How many kept entries are others than those of `mp.compress`, and how many of them no tie decides."""
    others = clear = 0
    for layer, theirs in enumerate(expected.kept):
        for head, positions in enumerate(theirs.tolist()):
            here, there = set(ours[layer, head].tolist()), set(positions)
            assert len(here) == len(there)
            if here == there:
                continue
            value = expected.scores[layer][head]
            mine, other = (value[sorted(part)] for part in (here - there, there - here))
            far = (mine[:, None] - other).abs().amax(1) > TIE * other.abs().max()
            others, clear = others + len(mine), clear + int(far.sum())
    return others, clear


@pytest.mark.parametrize("method", METHODS)
def test_kept_positions_and_tokens_are_those_of_compress(engine, model, method, monkeypatch):
    """In each chunk size all prompts at once, and then one by one, where prefixes are found."""
    ids = texts()
    engine.use(CHUNKS[-1], method=method, budget="30%", **METHODS[method])
    rules = engine.scheduler.rules
    expected = {len(one): compressed(model, rules, one, monkeypatch) for one in ids}
    caches = engine.scheduler.kv_cache_manager.enable_caching
    entries = others = runs = 0
    for chunk in CHUNKS:
        engine.use(chunk, method=method, budget="30%", **METHODS[method])
        found = remembered(engine)
        for batch in (ids, *([one] for one in ids)):
            found.clear()
            outputs = engine.outputs(batch, NEW)
            assert found.keys() == {len(one) for one in batch} - {40}, "the shortest fills no block that competes"
            for length, ours in found.items():
                moved, clear = untied(ours, expected[length])
                assert not clear, f"{clear} of {moved} entries, {length} tokens in chunks of {chunk}"
                entries, others = entries + ours.numel(), others + moved
            for one, output in zip(batch, outputs, strict=True):
                assert list(output.outputs[0].token_ids) == expected[len(one)].tokens, (chunk, len(one), len(batch))
                hit = caches and len(batch) == 1 and (len(one) == 40 or not rules.policy.observes_all)
                assert (output.num_cached_tokens > 0) == hit
                runs += 1
    assert others <= MOST * entries
    print(f"{method}: {runs} requests, {entries} entries kept, {others} by a tie")
