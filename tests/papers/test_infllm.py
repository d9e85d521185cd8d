"""InfLLM: a hand-worked lookup, an independent simulation over the full cache, and the checks of the matrix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import millpond as mp
from millpond.cache.selective import BlockRetrieval
from millpond.errors import BudgetError, CacheMismatchError, OptionError, UnsupportedModelError
from millpond.kernels.args import AttentionShape, PrefillArgs
from millpond.methods import METHODS
from millpond.methods.infllm import AlwaysAttended, BlockRetrievalPolicy
from tests.helpers.hf.families import shared_model, text
from tests.helpers.matrix.hidden import passes
from tests.helpers.matrix.models import llama, prompts
from tests.helpers.matrix.oracle import Oracle, Rule
from tests.matrix import test_invariance as matrix

BUDGET = 14
SMALL: dict[str, Any] = {"sinks": 1, "local": 4, "block": 3, "representatives": 2, "together": 1}  # 2 blocks of 3 fit


def test_by_hand() -> None:
    """One head, keys of one number, blocks of 2 whose best key stands for them; values tell what is attended to.

    Budget 8 = sink 1 + local 3 + a block of 2 that fills + one of 2 that is looked up.
    """
    policy = BlockRetrievalPolicy(protect=AlwaysAttended(sinks=1, recent=3, block=2), representatives=1, together=1)
    recall = BlockRetrieval(policy)
    keys = torch.tensor([0.0, 1, 5, -6, 2, 0, 0, 0, 0, 0], dtype=torch.float64).view(1, -1, 1)
    values = (10.0 ** torch.arange(10, dtype=torch.float64)).view(1, -1, 1)
    shape = AttentionShape(scale=1.0)

    def ask(t: int, query: float) -> float:
        q = torch.tensor([[[query]]], dtype=torch.float64)
        at = torch.tensor([t], dtype=torch.int32)
        return float(recall.attend(0, PrefillArgs(q, keys[:, : t + 1], values[:, : t + 1], at, shape), 8, None)[0])

    for t in range(8):  # the first eight tokens fit into the budget: everything is attended to, evenly
        assert ask(t, 0.0) == pytest.approx((10.0 ** (t + 1) - 1) / 9 / (t + 1))
    # Behind the sink two blocks have left the window of 3, in front of 5: (1, 2) and (3, 4). Every entry has received
    # 1/(j+1) + 1/(j+2) + 1/(j+3), the older one of a block more: keys 1 and -6 stand for them.
    assert recall._known[0].means.flatten().tolist() == [1, -6]
    # A query of 0 likes both alike and takes the older one: sink, (1, 2), 5 that fills no block, local 6 to 8.
    assert ask(8, 0.0) == pytest.approx(111_100_111 / 7)
    # The next query, of either sign, wants another block; (5, 6) is none before it has gone by.
    sums = {1.0: (1, 2), -1.0: (3, 4)}
    for sign, found in sums.items():
        copy = recall.copy()
        seen = [0, *found, 5, 6, 7, 8, 9]
        weights = torch.tensor([float(keys[0, j]) * sign for j in seen]).double().softmax(0)
        q = torch.tensor([[[sign]]], dtype=torch.float64)
        out, lse = copy.attend(0, PrefillArgs(q, keys, values, torch.tensor([9], dtype=torch.int32), shape), 8, None)
        assert float(out) == pytest.approx(sum(float(w) * 10.0**j for w, j in zip(weights, seen, strict=True)))
        assert float(lse) == pytest.approx(
            float(torch.tensor([float(keys[0, j]) * sign for j in seen]).double().logsumexp(0)), abs=1e-6
        )
        assert copy._known[0].means.flatten().tolist() == [1, -6, 0]


@dataclass
class Told:
    """One sequence of one layer, in plain words."""

    budget: int = 0
    received: dict[tuple[int, int], float] = field(default_factory=dict)  # of (query head, position)
    blocks: list[list[int]] = field(default_factory=list)
    means: list[list[Tensor]] = field(default_factory=list)


class Recalling(Oracle):
    """The full cache, what is not looked up hidden, far keys turned back: loops over queries and heads in float64."""

    def __init__(self, budget: float, local: float, sinks: int, block: int, few: int, together: int, far: str) -> None:
        super().__init__(Rule("newest", 0))
        self.budget, self.local, self.sinks, self.block = budget, local, sinks, block
        self.few, self.together, self.far = few, together, far
        self.told: dict[tuple[int, int], Told] = {}
        self.most_attended = 0

    def _sequence(self, layer: int, b: int, q: Tensor, k: Tensor, v: Tensor, n_past: int, scale: float) -> Tensor:
        told = self.told.setdefault((layer, b), Told())
        n, n_new, group = k.shape[1], q.shape[1], q.shape[0] // k.shape[0]
        if n_new > 1 or not n_past:
            told.budget = int(self.budget * n + 0.5) if isinstance(self.budget, float) else self.budget
        local = int(self.local * told.budget) if isinstance(self.local, float) else int(self.local)
        most = (told.budget - self.sinks - local - self.block) // self.block
        raw = torch.stack([turn(k[:, j], -j) for j in range(n)], 1)
        out = torch.zeros_like(q)
        for begin in range(0, n_new, self.together):
            rows = range(begin, min(begin + self.together, n_new))
            turned = {i: turn(q[:, i], local - 1 - (n_past + i)) for i in rows}
            mean = sum(turned.values(), torch.zeros_like(q[:, 0])) / len(rows)
            worth = [sum(float(mean[h] @ m[h]) for h in range(len(q))) for m in told.means]
            chosen = sorted(range(len(worth)), key=lambda i: (-worth[i], i))[:most]
            home = {j: i for i, block in enumerate(told.blocks) for j in block}
            for i in rows:
                t = n_past + i
                whole = t < told.budget
                near = [j for j in range(t + 1) if whole or t - j < local]
                distant = [j for j in range(t + 1) if j not in near]
                distant = [j for j in distant if j < self.sinks or j not in home or home[j] in chosen]
                if n_new == 1:
                    self.most_attended = max(self.most_attended, len(near) + len(distant))
                for h in range(len(q)):
                    g = h // group
                    behind = raw[g][distant] @ turned[i][h] if self.far == "one_distance" else k[g][distant] @ q[h, i]
                    p = (torch.cat([behind, k[g][near] @ q[h, i]]) * scale).softmax(0)
                    out[h, i] = p @ v[g][distant + near]
                    for j, x in zip(near, p[len(distant) :].tolist(), strict=True):
                        if t - j < local:
                            told.received[h, j] = told.received.get((h, j), 0.0) + x
            self._fill(told, raw, group, n_past + rows[-1] + 1 - local, len(q))
        return out

    def _fill(self, told: Told, raw: Tensor, group: int, end: int, n_heads: int) -> None:
        while (start := self.sinks + len(told.blocks) * self.block) + self.block <= end:
            block = list(range(start, start + self.block))
            best = [sorted(block, key=lambda j: (-told.received[h, j], j))[: self.few] for h in range(n_heads)]
            told.blocks.append(block)
            told.means.append([raw[h // group][best[h]].mean(0) for h in range(n_heads)])


def turn(x: Tensor, angle: int) -> Tensor:
    """Rotary embedding of rows (heads, 8) by `angle` positions, as Llama lays out its pairs."""
    half = x.shape[-1] // 2
    rates = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    cos, sin = (angle * rates).cos(), (angle * rates).sin()
    a, b = x[:, :half], x[:, half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], 1)


def plain(budget: float, local: float = 4, together: int = 1, far: str = "one_distance") -> Recalling:
    return Recalling(budget, local, SMALL["sinks"], SMALL["block"], SMALL["representatives"], together, far)


@pytest.mark.covering
@pytest.mark.parametrize("far", ["one_distance", "true"])
@pytest.mark.parametrize(
    ("heads", "budget", "local", "together"),
    [("gqa", 14, 4, 1), ("mha", 14, 4, 16), ("mha", 20, 0.3, 5), ("gqa", 20, 0.3, 70), ("gqa", 0.5, 0.3, 70)],
)
def test_equals_a_mask_over_the_full_cache(far: str, heads: str, budget: float, local: float, together: int) -> None:
    """A padded batch, single steps and a second turn; angles are float32, so distances agree to about 1e-6."""
    options = {**SMALL, "local": local, "together": together, "far": far}
    model, (ids, mask) = llama(heads), prompts(3)
    later = torch.randint(2, 96, (3, 24), generator=torch.Generator().manual_seed(2))
    turns = [ids, *later[:, :6].split(1, 1), later[:, 6:18], *later[:, 18:].split(1, 1)]
    oracle = plain(budget, local, together, far)
    with torch.no_grad(), mp.compress(model, "infllm", budget, page_slots=4, **options) as cache:
        for turn_, (error, most) in enumerate(passes(model, cache, oracle, turns, mask)):
            assert error <= (1e-11 if far == "true" else 1e-4) * most, f"pass {turn_}"
        seen = mask.sum(1) + later.shape[1]
        assert cache.stats().stored == [[[int(n)] * 2 for n in seen]] * 2
        assert all(len(told.blocks) >= 6 for told in oracle.told.values())
        assert oracle.most_attended <= max(told.budget for told in oracle.told.values())
        cache.check_integrity()


def test_what_is_looked_up_changes_the_answer() -> None:
    """The blocks are not those of another query: with none of them, or the oldest, logits are others."""
    model, (ids, _) = llama(), prompts(1, length=60)
    found = [
        mp_logits(model, ids, budget, **{**SMALL, "sinks": sinks, "local": 4})
        for budget, sinks in ((14, 1), (11, 1), (60, 1))
    ]
    assert not torch.allclose(found[0], found[1], atol=1e-2)
    assert not torch.allclose(found[0], found[2], atol=1e-2)


def mp_logits(model: Any, ids: Tensor, budget: Any, **options: Any) -> Tensor:
    with torch.no_grad(), mp.compress(model, "infllm", budget, **options) as cache:
        logits: Tensor = model(ids, cache=cache).logits
    return logits


CHECKS: dict[str, Callable[[str], None]] = {
    "batch": matrix.test_batch_and_padding,
    "pages": lambda method: matrix.test_page_size(method, 4),
    "chunks of 7": lambda method: matrix.test_chunks_without_eviction_between_them(method, 7),
    "chunks of 16": lambda method: matrix.test_chunks_without_eviction_between_them(method, 16),
    "reset": matrix.test_a_second_prompt_equals_a_fresh_cache,
    "bytes": matrix.test_bytes_are_real_and_freed,
    "turn of one": lambda method: matrix.test_a_turn_of_one_token_beside_a_longer_one(method, False),
    "everything": matrix.test_budget_of_everything_equals_full,
}


@pytest.mark.covering
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("far", ["one_distance", "true"])
def test_matrix(far: str, check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    block = 2 if check == "turn of one" else 3  # whose budget is 9
    monkeypatch.setitem(matrix.METHODS, "infllm", {**SMALL, "far": far, "block": block})
    CHECKS[check]("infllm")


def test_chunks_of_whole_lookups() -> None:
    """Chunks that hold whole multiples of `together` give what one pass gives."""
    model, (ids, _) = llama(), prompts(1, length=64)
    whole = mp_logits(model, ids, 14, **{**SMALL, "together": 8})
    with torch.no_grad(), mp.compress(model, "infllm", 14, **{**SMALL, "together": 8}) as cache:
        parts = [model(part, cache=cache).logits for part in ids.split(16, 1)]
    assert torch.allclose(torch.cat(parts, 1), whole, atol=1e-10)


@pytest.mark.parametrize("far", ["one_distance", "true"])
def test_a_second_turn_goes_the_same_in_a_batch_as_alone(far: str) -> None:
    model, (ids, mask) = llama(), prompts(2)
    more = torch.randint(2, 96, (2, 20), generator=torch.Generator().manual_seed(9))

    def turns(rows: list[int]) -> list[list[int]]:
        with torch.no_grad(), mp.compress(model, "infllm", "40%", **{**SMALL, "together": 6, "far": far}) as cache:
            common = {"max_new_tokens": 5, "do_sample": False, "cache": cache}
            own = mask[rows].any(0)
            first = model.generate(input_ids=ids[rows][:, own], attention_mask=mask[rows][:, own], **common)
            whole = torch.cat([first, more[rows]], 1)
            seen = torch.cat([mask[rows][:, own], torch.ones(len(rows), 25, dtype=mask.dtype)], 1)
            second = model.generate(input_ids=whole, attention_mask=seen, **common)
            assert cache.stats().evicted == 0
            return second[:, whole.shape[1] - 20 :].tolist()

    together = turns([0, 1])
    assert together == [*turns([0]), *turns([1])]
    assert together == turns([0, 1])


def test_beams_and_drafts_carry_their_blocks() -> None:
    """Copies of a sequence go on alone, and drafts that are taken back leave nothing behind."""
    model, (ids, mask) = llama(), prompts(1, length=30)
    ids = torch.cat([ids, ids[:, :20]], 1)  # so that drafts are found
    common = {"max_new_tokens": 24, "do_sample": False}
    mask = torch.ones_like(ids)
    with torch.no_grad(), mp.compress(model, "infllm", 14, **SMALL) as cache:
        plainly = model.generate(input_ids=ids, attention_mask=mask, cache=cache, **common)
        cache.reset()
        drafted = model.generate(input_ids=ids, attention_mask=mask, cache=cache, prompt_lookup_num_tokens=3, **common)
        assert drafted.tolist() == plainly.tolist()
        cache.reset()
        model(ids[:, :40], cache=cache)
        cache.batch_repeat_interleave(2)
        tokens = torch.stack([ids[0, 40:], ids[0, 40:].flip(0)])
        both = [model(step, cache=cache).logits for step in tokens.split(1, 1)]
        for row in (0, 1):
            cache.reset()
            model(ids[:, :40], cache=cache)
            for step, expected in zip(tokens[row : row + 1].split(1, 1), both, strict=True):
                assert torch.allclose(model(step, cache=cache).logits[0], expected[row], atol=1e-12)
        with pytest.raises(CacheMismatchError, match="cannot take back 1 tokens"):
            cache.crop(-1)


@pytest.mark.parametrize("name", ["mistral", "gemma3", "gpt_oss"])
def test_sliding_layers_attend_as_ever(name: str) -> None:
    """Full layers of random models look up; a budget of everything gives the model's own logits."""
    model, ids = shared_model(name), text(1, 40)
    with torch.no_grad():
        expected = model(ids).logits
        for budget in (60, 14):
            with mp.compress(model, "infllm", budget, **SMALL) as cache:
                found = torch.cat([model(part, cache=cache).logits for part in (ids[:, :30], ids[:, 30:])], 1)
                assert found.isfinite().all()
                if budget == 60 or all(layer_cache.attention.shape.window for layer_cache in cache.layer_caches):
                    assert torch.allclose(found, expected, atol=1e-4)


def test_bfloat16_and_native_kernels() -> None:
    """A model in half precision goes as in float32, up to its rounding."""
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        model, (ids, mask) = llama(dtype=dtype), prompts(2)
        places = (mask.cumsum(1) - 1).clamp(min=0)
        with torch.no_grad(), mp.compress(model, "infllm", 60, **SMALL) as cache:
            found[dtype] = model(ids, attention_mask=mask, position_ids=places, cache=cache).logits[:, -1]
    assert found[torch.bfloat16].dtype is torch.bfloat16
    ratio = (found[torch.bfloat16].float() - found[torch.float32]).norm() / found[torch.float32].norm()
    assert float(ratio) < 0.2


def test_the_paper_s_setting() -> None:
    policy = METHODS.get("infllm")(local=4096, sinks=128, block=128)
    assert isinstance(policy, BlockRetrievalPolicy)
    assert policy.protect.blocks(6400) == 16
    assert policy.protect.local(6400) == 4096
    assert policy.keeps_all
    assert policy.takes_budget


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"local": 1.0}, "below 1"),
        ({"local": 0}, "local=0 must be 1 to 16,777,216 or above 0 and at most 1"),
        ({"block": 0}, "block=0 must be 1 to 16,777,216"),
        ({"representatives": 40}, "representatives=40 of a block of 32"),
        ({"together": 0}, "together=0 must be 1 to 16,777,216"),
        ({"sinks": -1}, "sinks=-1 must be 0 to 16,777,216"),
    ],
)
def test_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        METHODS.get("infllm")(**options)


def test_budgets() -> None:
    model = llama()
    for local in (4, 0.3, 0.9):
        least = AlwaysAttended(sinks=1, recent=local, block=3).minimum()
        assert [AlwaysAttended(sinks=1, recent=local, block=3).blocks(n) for n in (least - 1, least)] == [0, 1]
    with pytest.raises(BudgetError, match="budget 10 is smaller than 11"):
        mp.compress(model, "infllm", 10, **SMALL)
    with pytest.raises(BudgetError, match="what is attended to; give tokens or a share"):
        mp.compress(model, "infllm", "64MiB", **SMALL)
    with pytest.raises(UnsupportedModelError, match="stores latents"):
        mp.compress(shared_model("deepseek_v3"), "infllm", 14, **SMALL)
