"""Attention-Gate by hand: flags, and the entries that stay, against thirty lines of plain Python on random gates."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache as once
from typing import Any

import pytest
import torch
from torch import Tensor

from millpond.cache.layer.layer_cache import LayerCache
from millpond.errors import BudgetError, CacheMismatchError, OptionError
from millpond.kernels.args import AttentionShape
from millpond.methods import METHODS
from millpond.methods.attention_gate import GatedHeads
from millpond.policy.policy import Policy
from millpond.policy.trained.networks import Gates, LayerGate
from tests.helpers.papers.fixture import make_layer_cache

attention_gate = METHODS.get("attention_gate")
Q, KV, DIM = 4, 2, 6
ALL = 1 << 20


def gates_of(seed: int = 0, n_heads: int = 2, width: int = 4, hidden: int = 8) -> Gates:
    draw, inputs = torch.Generator().manual_seed(seed), (Q + 2 * KV) * DIM
    shapes = (
        (n_heads * width, inputs),
        (width, inputs),
        (width, inputs),
        (hidden, inputs + n_heads * width),
        (hidden,),
        (KV, hidden),
        (KV,),
    )
    return Gates([LayerGate(*(torch.randn(*shape, generator=draw) / 2 for shape in shapes))], "mark", "random")


def text(n: int = 40, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, h, n, DIM, generator=draw, dtype=torch.float64) for h in (Q, KV, KV))
    return q, k, v


def policy_of(gates: Gates, **options: Any) -> Policy:
    return attention_gate(**{"sinks": 2, "window": 3, **options}).with_gates(lambda named: gates)


def read(cache: LayerCache, parts: tuple[Tensor, Tensor, Tensor], begin: int, end: int) -> None:
    q, k, v = (part[:, :, begin:end] for part in parts)
    cache.attend(q, k, v, None, AttentionShape(1.0))


def kept(cache: LayerCache, head: int) -> list[int]:
    return [p for p in cache.read(0).positions[head].tolist() if p >= 0]


def times(matrix: Tensor, x: list[float]) -> list[float]:
    return [sum(float(w) * a for w, a in zip(row, x, strict=True)) for row in matrix]


def plain_flags(gate: LayerGate, q: Tensor, k: Tensor, v: Tensor, prompt: int = 0) -> list[list[float]]:
    """[KV head][token], number by number: sigmoid(W2 SiLU(W1 [x; u] + b1) + b2).

    prompt: the first tokens of which each looks at all; the others look at those before them.
    """
    inputs = [[float(a) for part in (q, k, v) for head in part[0] for a in head[t].float()] for t in range(q.shape[2])]
    all_keys = [torch.tensor(times(gate.wk, x)).bfloat16().tolist() for x in inputs]
    all_values = [torch.tensor(times(gate.wv, x)).bfloat16().tolist() for x in inputs]
    found: list[list[float]] = [[] for _ in gate.b2]
    for t, x in enumerate(inputs):
        keys, values = (rows[: max(t + 1, prompt)] for rows in (all_keys, all_values))
        queries, u = times(gate.wq, x), []
        for begin in range(0, len(queries), gate.width):
            own = queries[begin : begin + gate.width]
            scores = [sum(a * b for a, b in zip(own, key, strict=True)) / math.sqrt(gate.width) for key in keys]
            weights = [math.exp(s - max(scores)) for s in scores]
            total = sum(weights)
            u += [sum(w * value[i] for w, value in zip(weights, values, strict=True)) / total for i in range(len(own))]
        hidden = [h + float(b) for h, b in zip(times(gate.w1, x + u), gate.b1, strict=True)]
        logits = times(gate.w2, [h / (1 + math.exp(-h)) for h in hidden])
        for head, (z, b) in enumerate(zip(logits, gate.b2, strict=True)):
            found[head].append(1 / (1 + math.exp(-z - float(b))))
    return found


@once
def plain_of(n: int, seed: int = 0) -> list[list[float]]:
    """`plain_flags` of random gates and a random text, for all tests that use them."""
    return plain_flags(gates_of(seed).layers[0], *text(n, seed))


def plain_kept(p: list[float], held: list[int], seen: int, sinks: int = 2, window: int = 3) -> list[int]:
    """Of the positions held of a text of `seen` tokens, those that a look at the flags leaves."""
    return [j for j in held if p[j] > 0.5 or j < sinks or j >= seen - window]


# ---------------------------------------------------------------------- flags


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("passes", [[40], [1, 39], [7, 20, 13]])
def test_scores_are_those_of_the_formula_and_lie_with_the_entries(passes: list[int], seed: int) -> None:
    gates, parts = gates_of(seed), text(seed=seed)
    cache, begin = make_layer_cache(policy_of(gates, window=40), ALL), 0
    for n in passes:
        read(cache, parts, begin, begin + n)
        begin += n
    plain = torch.tensor(plain_of(40, seed))
    assert torch.allclose(cache.read(0).scores, plain, atol=2e-3)
    assert 0.2 < float((plain > 0.5).float().mean()) < 0.8


def test_flags_of_a_prefix_stay_when_text_follows() -> None:
    gates, parts = gates_of(), text(60)
    scores = []
    for n in (25, 60):
        cache = make_layer_cache(policy_of(gates, window=60), ALL)
        read(cache, parts, 0, n)
        scores.append(cache.read(0).scores[:, :25])
    assert torch.equal(scores[0], scores[1])


@pytest.mark.parametrize("passes", [[40], [30, 10], [30, 1, 9]])
def test_a_global_gate_sees_the_whole_prompt_and_what_follows_looks_back(passes: list[int]) -> None:
    gates, parts = whole_gates(), text()
    cache, begin = make_layer_cache(policy_of(gates, window=40), ALL), 0
    for n in passes:
        read(cache, parts, begin, begin + n)
        begin += n
    plain = torch.tensor(plain_flags(gates.layers[0], *parts, prompt=passes[0]))
    assert torch.allclose(cache.read(0).scores, plain, atol=2e-3)
    assert not torch.allclose(plain, torch.tensor(plain_of(40)), atol=0.05)


def test_a_long_prompt_is_one_pass_for_a_global_gate() -> None:
    """Also where its rotation is undone a part at a time."""
    gates, parts = whole_gates(), text()
    cache = make_layer_cache(policy_of(gates, window=40), ALL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("millpond.cache.layer.entry_scores.BLOCK", 7)
        read(cache, parts, 0, 40)
    plain = torch.tensor(plain_flags(gates.layers[0], *parts, prompt=40))
    assert torch.allclose(cache.read(0).scores, plain, atol=2e-3)


def test_only_a_global_gate_needs_the_whole_prompt() -> None:
    assert [policy_of(gates).needs.whole_prompt for gates in (gates_of(), whole_gates())] == [False, True]


def whole_gates() -> Gates:
    return Gates([replace(layer, causal=False) for layer in gates_of().layers], "mark", "random")


# ---------------------------------------------------------------------- what stays


@pytest.mark.parametrize("seed", range(2))
def test_keep_sets_are_those_of_a_plain_computation(seed: int) -> None:
    """After the prompt, at each decoded token (every=1), and every four of them."""
    gates, parts = gates_of(seed), text(seed=seed)
    plain = plain_of(40, seed)
    for every in (1, 4):
        cache = make_layer_cache(policy_of(gates, every=every), ALL, slots=2)
        read(cache, parts, 0, 30)
        held = [plain_kept(p, list(range(30)), 30) for p in plain]
        since = 0
        for t in range(30, 40):
            assert [kept(cache, h) for h in range(KV)] == held
            read(cache, parts, t, t + 1)
            held, since = [[*positions, t] for positions in held], since + 1
            if since == every:
                held, since = [plain_kept(p, h, t + 1) for p, h in zip(plain, held, strict=True)], 0
        assert [kept(cache, h) for h in range(KV)] == held
        assert len({len(h) for h in held}) > 1 or seed != 0, "heads keep different numbers"


def test_it_grows_while_decoding_and_looks_again_at_the_next_turn() -> None:
    gates, parts = gates_of(), text(110)
    plain = plain_of(110)
    cache = make_layer_cache(policy_of(gates, decode="grow"), ALL)
    read(cache, parts, 0, 25)
    first = [plain_kept(p, list(range(25)), 25) for p in plain]
    for t in range(25, 30):
        read(cache, parts, t, t + 1)
    assert [kept(cache, h) for h in range(KV)] == [[*h, *range(25, 30)] for h in first]
    read(cache, parts, 30, 110)
    assert [kept(cache, h) for h in range(KV)] == [
        plain_kept(p, [*h, *range(25, 110)], 110) for p, h in zip(plain, first, strict=True)
    ]


@pytest.mark.parametrize("decode", ["evict", "grow"])
def test_a_short_later_turn_stays_whole(decode: str) -> None:
    gates, parts = gates_of(), text(60)
    cache = make_layer_cache(policy_of(gates, decode=decode, every=2), ALL)
    read(cache, parts, 0, 30)
    read(cache, parts, 30, 50)
    for t in range(50, 60):
        read(cache, parts, t, t + 1)
    for head in range(KV):
        assert kept(cache, head)[-30:] == list(range(30, 60))


def test_a_budget_is_the_most_and_the_highest_of_all_heads_stay() -> None:
    gates, parts = gates_of(), text()
    plain = plain_of(40)
    free = [plain_kept(p, list(range(40)), 40) for p in plain]
    budget = 8
    assert sum(map(len, free)) > KV * budget
    cache = make_layer_cache(policy_of(gates), budget)
    read(cache, parts, 0, 40)
    pinned = [*range(2), *range(37, 40)]
    others = sorted(((plain[h][j], h, j) for h in range(KV) for j in free[h] if j not in pinned), reverse=True)
    chosen = others[: KV * budget - KV * len(pinned)]
    expected = [sorted([*pinned, *(j for _, head, j in chosen if head == h)]) for h in range(KV)]
    assert [kept(cache, h) for h in range(KV)] == expected


def test_a_budget_holds_while_decoding_too() -> None:
    gates, parts = gates_of(), text(80)
    cache = make_layer_cache(policy_of(gates, every=1), 8)
    read(cache, parts, 0, 40)
    for t in range(40, 80):
        read(cache, parts, t, t + 1)
        assert int(cache.stored.sum()) <= KV * 8
    assert len(kept(cache, 0)) != len(kept(cache, 1))


@pytest.mark.parametrize(("floor", "least"), [(11, 11), (0.5, 20), (0, 5)])
def test_the_floor_is_the_least_that_a_head_keeps(floor: float, least: int) -> None:
    """Of a gate that flags nothing the highest stay."""
    gates, parts = gates_of(), text()
    plain = plain_of(40)
    cache = make_layer_cache(policy_of(gates, threshold=1.0, floor=floor), ALL)
    read(cache, parts, 0, 40)
    pinned = [*range(2), *range(37, 40)]
    for head in range(KV):
        others = sorted(set(range(40)) - set(pinned), key=lambda j: -plain[head][j])
        assert kept(cache, head) == sorted([*pinned, *others[: least - len(pinned)]])


def test_counts_by_hand() -> None:
    value = torch.tensor([[0.9, 0.6, 0.4, 0.1], [0.2, 0.1, 0.3, 0.0]])
    valid, pinned = torch.ones(2, 4, dtype=torch.bool), torch.tensor([[False] * 3 + [True]] * 2)
    assert GatedHeads(0.5).keep_counts(value, valid, pinned, 9).tolist() == [3, 1]
    assert GatedHeads(0.5, 2).keep_counts(value, valid, pinned, 9).tolist() == [3, 2]
    assert GatedHeads(0.25).keep_counts(value, valid, pinned, 2).tolist() == [3, 1]  # 6 flagged or pinned, 4 may stay


# ---------------------------------------------------------------------- what a gate has read


def test_what_it_has_read_is_shared_until_one_goes_on() -> None:
    """Copies write behind the end of one memory in turn, and neither sees what the other wrote."""
    gates, parts = gates_of(), text(60)
    cache = make_layer_cache(policy_of(gates, window=60), ALL)
    read(cache, parts, 0, 30)
    read(cache, parts, 30, 31)  # a copy with room behind it
    before = cache.sequence_state.contexts[0]
    state = cache.fork()
    other = text(60, seed=5)
    seen = cache.tracker.seen.copy()
    read(cache, other, 31, 32)
    assert cache.sequence_state.contexts[0].buffer is before.buffer
    cache.restore(state)
    cache.tracker.rewind(31, seen)
    read(cache, parts, 31, 32)
    assert cache.sequence_state.contexts[0].buffer is not before.buffer
    whole = make_layer_cache(policy_of(gates, window=60), ALL)
    read(whole, parts, 0, 32)
    assert torch.allclose(cache.read(0).scores, whole.read(0).scores, atol=1e-3)
    assert not torch.allclose(cache.sequence_state.contexts[0].keys[31], before.buffer.rows[0, 31])


def test_bytes_of_what_it_has_read() -> None:
    gates, parts = gates_of(), text(60)
    cache = make_layer_cache(policy_of(gates), ALL)
    read(cache, parts, 0, 40)
    assert cache.sequence_state.context_bytes == 40 * 2 * 4 * 2  # a key and a value of 4 numbers in 2 bytes
    cache.select([0, 0])
    assert cache.sequence_state.context_bytes == 40 * 2 * 4 * 2
    cache.reset()
    assert cache.sequence_state.context_bytes == 0


# ---------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"threshold": 1.5}, OptionError, "threshold=1.5 must be 0 to 1"),
        ({"floor": 1.5}, OptionError, "floor=1.5 must be 0 to 16,777,216 or 0 to 1"),
        ({"floor": -1}, OptionError, "floor=-1 must be 0 to 16,777,216 or 0 to 1"),
        ({"every": 0}, OptionError, "every=0 must be 1 to 16,777,216"),
        ({"window": -1}, OptionError, "window=-1 must be 0 to 16,777,216"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        attention_gate(**options)


def test_a_budget_below_what_is_protected() -> None:
    with pytest.raises(BudgetError, match="smaller than sinks 2 \\+ recent 3"):
        policy_of(gates_of()).check_budget(4)


@pytest.mark.parametrize("method", ["ada", "dms", "pyramidkv", "duo_attention"])
def test_it_is_no_score_of_another_method(method: str) -> None:
    with pytest.raises(OptionError):
        METHODS.get(method)(score="attention_gate")


def test_gates_of_another_shape() -> None:
    cache = make_layer_cache(policy_of(gates_of()), ALL)
    q, k, v = torch.randn(3, 1, KV, 9, DIM).unbind()
    with pytest.raises(CacheMismatchError, match="this gate takes 48 and decides for 2"):
        cache.attend(q, k, v, None, AttentionShape(1.0))
