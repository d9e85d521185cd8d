"""MInference: patterns against masks in plain loops, what is skipped is not computed, the search, and the matrix."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import millpond as mp
from millpond.cache.selective import SparsePrefill
from millpond.errors import BudgetError, CacheMismatchError, OptionError
from millpond.hf.offline import find_patterns
from millpond.kernels.args import AttentionShape, PrefillArgs
from millpond.methods import METHODS
from millpond.methods.minference import AShape, BlockSparse, SparsePrefillPolicy, VerticalSlash
from millpond.policy.needs import HeadPrompt, Pattern
from tests.helpers.hf.families import shared_model, text
from tests.helpers.matrix.checks import CHECKS
from tests.helpers.matrix.hidden import passes
from tests.helpers.matrix.models import llama, prompts
from tests.helpers.matrix.oracle import Oracle, Rule, running
from tests.matrix import test_invariance as matrix

PATTERNS: list[Pattern] = [
    VerticalSlash(8, 5, last=64, first=3, nearest=2),
    VerticalSlash(40, 1, last=7),
    VerticalSlash(1, 9, last=200),
    AShape(5, 33),
    AShape(1, 1),
    BlockSparse(2),
    BlockSparse(1),
]


def seen_by(pattern: Pattern, q: Tensor, k: Tensor, scale: float) -> Tensor:
    """(Q, N) bool, in plain words: what each of the last Q of N tokens looks at. q (Q, D), k (N, D)."""
    n, first = len(k), len(k) - len(q)
    seen = torch.zeros(len(q), n, dtype=torch.bool)
    blocks = [range(b, min(b + 64, n)) for b in range(first, n, 64)]
    if isinstance(pattern, AShape):
        for i in range(first, n):
            seen[i - first, [j for j in range(i + 1) if j < pattern.first or i - j < pattern.width]] = True
    elif isinstance(pattern, VerticalSlash):
        columns, distances = chosen(pattern, q, k, scale)
        for block in blocks:
            crossed = {i - o for i in block for o in distances}
            for i in block:
                seen[i - first, [j for j in range(i + 1) if j in columns or j in crossed]] = True
    else:
        assert isinstance(pattern, BlockSparse)
        means = [k[begin : begin + 64].mean(0) for begin in range(0, n, 64)]
        for block in blocks:
            mean = q[block[0] - first : block[-1] + 1 - first].mean(0)
            there = range(block[-1] // 64 + 1)
            own = {b for b in there if b >= block[0] // 64}
            others = sorted((b for b in there if b not in own), key=lambda b: (-float(means[b] @ mean), b))
            best = own | set(others[: max(pattern.blocks - len(own), 0)])
            for i in block:
                seen[i - first, [j for j in range(i + 1) if j // 64 in best]] = True
    return seen


def chosen(pattern: VerticalSlash, q: Tensor, k: Tensor, scale: float) -> tuple[set[int], set[int]]:
    n = len(k)
    by_column, by_distance = [0.0] * n, [0.0] * n
    for i in range(n - min(pattern.last, len(q)), n):
        for j, x in enumerate((k[: i + 1] @ q[i - n] * scale).softmax(0).tolist()):
            by_column[j] += x
            by_distance[i - j] += x
    columns = sorted(range(n), key=lambda j: (j >= pattern.first, j if j < pattern.first else -by_column[j], j))
    distances = sorted(range(n), key=lambda o: (o >= pattern.nearest, o if o < pattern.nearest else -by_distance[o], o))
    return set(columns[: pattern.vertical]), set(distances[: pattern.slash])


def masked(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
    return (q @ k.T * scale).masked_fill(~seen, -math.inf).softmax(1) @ v


def random(n_rows: int, n: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """4 query heads on 2 KV heads, attention that is neither flat nor sharp; and the positions of the queries."""
    make = torch.Generator().manual_seed(seed)
    shapes = ((4, n_rows, 8), (2, n, 8), (2, n, 8))
    q, k, v = (torch.randn(*shape, dtype=torch.float64, generator=make) * 1.5 for shape in shapes)
    return q, k, v, torch.arange(n - n_rows, n, dtype=torch.int32)


@pytest.mark.covering
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("n_rows", [200, 77, 2, 1])
def test_patterns_are_masks(pattern: Pattern, n_rows: int) -> None:
    """All queries of a text, its last ones alone, and a later turn."""
    for n in (200, 230):
        q, k, v, q_pos = random(min(n_rows, n), n)
        shape = AttentionShape(scale=0.4)
        out, lse = SparsePrefill(SparsePrefillPolicy(pattern=pattern), 0).attend(
            0, PrefillArgs(q, k, v, q_pos, shape), 0, None
        )
        for head in range(4):
            own = k[head // 2]
            seen = seen_by(pattern, q[head], own, 0.4)
            assert not seen.tril(n - len(q_pos)).equal(torch.ones_like(seen).tril(n - len(q_pos))) or n_rows <= 2
            assert torch.allclose(out[head], masked(q[head], own, v[head // 2], seen, 0.4), atol=1e-12)
            logits = (q[head] @ own.T * 0.4).masked_fill(~seen, -math.inf)
            assert torch.allclose(lse[head].double(), logits.logsumexp(1), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pattern", [PATTERNS[0], PATTERNS[3], PATTERNS[5]], ids=["vs", "a", "b"])
def test_kernels_of_other_precision(pattern: Pattern, dtype: torch.dtype) -> None:
    """What the native kernels make of numbers that both precisions can hold."""
    q, k, v, q_pos = (t.bfloat16().double() if t.is_floating_point() else t for t in random(200, 230))
    shape, skip = AttentionShape(scale=0.4), SparsePrefill(SparsePrefillPolicy(pattern=pattern), 0)
    expected, _ = skip.attend(0, PrefillArgs(q, k, v, q_pos, shape), 0, None)
    found, _ = skip.attend(0, PrefillArgs(q.to(dtype), k.to(dtype), v.to(dtype), q_pos, shape), 0, None)
    assert found.dtype is dtype
    error = (found.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert float(error.median()) < (1e-5 if dtype is torch.float32 else 1e-2)


@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_sink_logits_and_softcap(softcap: float) -> None:
    q, k, v, q_pos = random(100, 100)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    shape = AttentionShape(scale=0.4, softcap=softcap, sink_logits=sinks)
    out, _ = SparsePrefill(SparsePrefillPolicy(pattern=AShape(3, 20)), 0).attend(
        0, PrefillArgs(q, k, v, q_pos, shape), 0, None
    )
    for head in range(4):
        logits = q[head] @ k[head // 2].T * 0.4
        logits = softcap * (logits / softcap).tanh() if softcap else logits
        logits = logits.masked_fill(~seen_by(AShape(3, 20), q[head], k[head // 2], 0.4), -math.inf)
        p = torch.cat([logits, sinks[head].double().expand(100, 1)], 1).softmax(1)[:, :-1]
        assert torch.allclose(out[head], p @ v[head // 2], atol=1e-12)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_what_is_left_out_is_never_touched(pattern: Pattern) -> None:
    """Values that nobody looks at may be NaN: a masked computation over all of them would spread it."""
    q, k, v, q_pos = random(40, 300)
    touched = torch.stack([seen_by(pattern, q[head], k[head // 2], 0.4).any(0) for head in range(4)]).view(2, 2, -1)
    unused = ~touched.any(1)
    assert int(unused.sum()) > 200
    shape = AttentionShape(scale=0.4)
    skip = SparsePrefill(SparsePrefillPolicy(pattern=pattern), 0)
    expected, _ = skip.attend(0, PrefillArgs(q, k, v, q_pos, shape), 0, None)
    out, _ = skip.attend(0, PrefillArgs(q, k, v.masked_fill(unused[..., None], math.nan), q_pos, shape), 0, None)
    assert out.equal(expected)


def test_the_first_columns_and_the_nearest_diagonals_are_always_there() -> None:
    q, k, _, _ = random(400, 400)
    columns, distances = VerticalSlash(50, 120).choose(HeadPrompt(q[0], k[0], 0.4))
    assert columns[:30].all()
    assert distances[:100].all()
    assert (int(columns.sum()), int(distances.sum())) == (50, 120)
    columns, distances = VerticalSlash(10, 20).choose(HeadPrompt(q[0], k[0], 0.4))
    assert columns.nonzero()[:, 0].tolist() == list(range(10))
    assert distances.nonzero()[:, 0].tolist() == list(range(20))


def test_by_hand() -> None:
    """Keys of one number: the last query looks at columns 1 and 4, both queries at what lies three behind them."""
    k = torch.tensor([0.0, 9, 0, 8, 9, 0, 0, 0])[:, None].double()
    pattern = VerticalSlash(3, 2, last=2, first=1, nearest=1)
    columns, distances = pattern.choose(HeadPrompt(torch.ones(8, 1).double(), k, 1.0))
    # columns 0 (the first), 1 and 4; distances 0 (the nearest) and, by 9 + 9 of column 4, 2 or 3: the nearer one
    assert columns.nonzero()[:, 0].tolist() == [0, 1, 4]
    assert distances.nonzero()[:, 0].tolist() == [0, 3]
    look = pattern.look(HeadPrompt(torch.ones(8, 1).double(), k, 1.0))
    assert look(6, 8).tolist() == [0, 1, 3, 4, 6, 7]  # 6 and 7 themselves, 3 and 4 three behind them, 0, 1 and 4


class Looking(Oracle):
    """The full cache with the patterns of all heads as masks; single steps see everything."""

    def __init__(self, patterns: Callable[[int, int], Pattern]) -> None:
        super().__init__(Rule("newest", 0))
        self.patterns = patterns

    def _sequence(self, layer: int, b: int, q: Tensor, k: Tensor, v: Tensor, n_past: int, scale: float) -> Tensor:
        group, out = q.shape[0] // k.shape[0], torch.zeros_like(q)
        for h in range(len(q)):
            seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
            if q.shape[1] > 1 or not n_past:
                seen = seen_by(self.patterns(layer, h), q[h], k[h // group], scale)
            out[h] = masked(q[h], k[h // group], v[h // group], seen, scale)
        return out


def options_of(pattern: Pattern) -> dict[str, Any]:
    match pattern:
        case AShape(first, width):
            return {"pattern": "a_shape", "vertical": first, "slash": width}
        case VerticalSlash(vertical, slash, last):
            return {"vertical": vertical, "slash": slash, "last": last}
    assert isinstance(pattern, BlockSparse)
    return {"pattern": "block_sparse", "blocks": pattern.blocks}


@pytest.mark.covering
@pytest.mark.parametrize("heads", ["mha", "gqa"])
@pytest.mark.parametrize("pattern", [VerticalSlash(8, 5, last=16), AShape(3, 9), BlockSparse(1)], ids=["vs", "a", "b"])
def test_equals_a_mask_over_the_full_cache(pattern: Pattern, heads: str) -> None:
    """A padded batch, single steps, a second turn: outputs are those of a full cache and masks in plain loops."""
    model, (ids, mask) = llama(heads), prompts(3, length=140)
    later = torch.randint(2, 96, (3, 80), generator=torch.Generator().manual_seed(2))
    turns = [ids, *later[:, :3].split(1, 1), later[:, 3:77], *later[:, 77:].split(1, 1)]
    oracle = Looking(lambda layer, h: pattern)
    with torch.no_grad(), mp.compress(model, "minference", page_slots=4, **options_of(pattern)) as cache:
        for turn, (error, most) in enumerate(passes(model, cache, oracle, turns, mask)):
            assert error <= 1e-11 * most, f"pass {turn}"
        seen = mask.sum(1) + later.shape[1]
        assert cache.stats().stored == [[[int(n)] * 2 for n in seen]] * 2
        assert cache.stats().evicted == 0
        cache.check_integrity()


APPLY = ("batch", "pages", "reset", "bytes", "turn of one")


def in_matrix(pattern: Pattern, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(matrix.METHODS, "minference", options_of(pattern))
    monkeypatch.setattr(matrix, "budget_of", lambda method, budget=None: {})


@pytest.mark.covering
@pytest.mark.parametrize("check", APPLY)
@pytest.mark.parametrize("pattern", [VerticalSlash(8, 5, last=16), AShape(3, 9)], ids=["vs", "a"])
def test_matrix(pattern: Pattern, check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    in_matrix(pattern, monkeypatch)
    CHECKS[check]("minference")


@pytest.mark.parametrize("pattern", [VerticalSlash(), VerticalSlash(40, 1), AShape(1, 40), BlockSparse(1)])
def test_numbers_that_cover_everything_equal_full(pattern: Pattern, monkeypatch: pytest.MonkeyPatch) -> None:
    in_matrix(pattern, monkeypatch)
    matrix.test_budget_of_everything_equals_full("minference")
    matrix.test_chunks_without_eviction_between_them("minference", 7)


def test_drafts_can_be_cut_off() -> None:
    """Everything is stored, so any last tokens can be taken back, and drafting changes nothing."""
    model, (ids, _) = llama(), prompts(1, length=30)
    ids = torch.cat([ids, ids[:, :20]], 1)
    common = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False}
    found = []
    for drafting in ({}, {"prompt_lookup_num_tokens": 3}):
        with torch.no_grad(), mp.compress(model, "minference", pattern="a_shape", vertical=2, slash=60) as cache:
            found.append(model.generate(input_ids=ids, cache=cache, **common, **drafting).tolist())
            cache.crop(-3)
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["mistral", "gemma3", "gpt_oss", "deepseek_v3"])
def test_windows_and_latents(name: str) -> None:
    """Sliding layers and latents: numbers that cover everything give the model's own logits, smaller ones others."""
    model, ids = shared_model(name), text(1, 40)
    with torch.no_grad():
        expected = model(ids).logits
        for numbers in ((1, 40), (2, 3)):
            with mp.compress(model, "minference", pattern="a_shape", vertical=numbers[0], slash=numbers[1]) as cache:
                found = model(ids, cache=cache).logits
                windowed = all(layer_cache.attention.shape.window for layer_cache in cache.layer_caches)
                equal = torch.allclose(found, expected, atol=1e-4)
                assert equal == (numbers == (1, 40) or windowed)
                assert model(ids[:, :1], cache=cache).logits.isfinite().all()


def shares(model: Any, ids: Tensor, patterns: list[Pattern], after: int) -> list[list[list[float]]]:
    """[layer][head][pattern] from transformers' own attention; patterns as masks from the layer's own q and k."""
    found: list[list[list[float]]] = []

    def observe(layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Any, shape: AttentionShape) -> None:
        group, row = q.shape[1] // k.shape[1], []
        for h in range(q.shape[1]):
            own_q, own_k = q[0, h], k[0, h // group]
            hidden = torch.ones(len(own_q), len(own_k)).triu(1).bool()
            p = (own_q @ own_k.T * shape.scale).masked_fill(hidden, -math.inf).softmax(1)
            seen = [seen_by(pattern, own_q, own_k, shape.scale) for pattern in patterns]
            row.append([float((p * s)[after:].sum(1).mean()) for s in seen])
        found.append(row)

    with torch.no_grad(), mp.compress(model, "full") as cache:
        cache.watch(observe)
        model(ids, cache=cache)
    return found


def test_the_search_writes_what_keeps_most(tmp_path: Path) -> None:
    """Each head gets the best of the candidates, and attends by it: the kinds stay what they are."""
    model, ids = llama("gqa"), text(1, 150)
    kinds = (("a_shape", 4, 38), ("vertical_slash", 6, 4), ("block_sparse", 1, 1))
    patterns: list[Pattern] = [AShape(4, 38), VerticalSlash(6, 4), BlockSparse(1)]
    path = tmp_path / "patterns.json"
    find_patterns(model, ids, path, candidates=kinds, after=90)
    rows = json.loads(path.read_text(encoding="utf-8"))
    expected = shares(model, ids, patterns, 90)
    for layer in (0, 1):
        for h, kept in enumerate(expected[layer]):
            *found, share = rows[layer][str(h)]
            assert tuple(found) == kinds[kept.index(max(kept))]
            assert share == pytest.approx(max(kept), abs=1e-6)
    assert len({kind for row in rows for kind, *_ in row.values()}) > 1
    best = {(layer, h): patterns[kept.index(max(kept))] for layer in (0, 1) for h, kept in enumerate(expected[layer])}
    oracle, stock = Looking(lambda layer, h: best[layer, h]), DynamicCache(config=model.config)
    with torch.no_grad(), mp.compress(model, "minference", patterns=str(path)) as cache:
        ours = model(ids, cache=cache).logits
        with running(model, oracle):
            theirs = model(ids, cache=stock).logits
    assert torch.allclose(ours, theirs, atol=1e-9)


def test_the_search_wants_one_long_text(tmp_path: Path) -> None:
    for ids in (text(1, 40), text(2, 60)):
        with pytest.raises(OptionError, match="give one text of more than after=50 tokens"):
            find_patterns(llama(), ids, tmp_path / "none.json", after=50)


def test_options(tmp_path: Path) -> None:
    policy = METHODS.get("minference")(ratio=0.5)
    assert isinstance(policy, SparsePrefillPolicy)
    assert policy.pattern == VerticalSlash(500, 3048)
    table = tmp_path / "table.json"
    table.write_text(json.dumps([{"0": ["stream_llm", 100, 800, 0.9]}, {"1": ["vertical_and_slash", 30, 800]}]))
    policy = METHODS.get("minference")(patterns=str(table), vertical=512, slash=2048, ratio=2)
    assert policy.patterns(0, 2) == [AShape(200, 1600), VerticalSlash(1024, 4096)]
    assert policy.patterns(1, 2) == [VerticalSlash(1024, 4096), VerticalSlash(60, 1600)]
    with pytest.raises(CacheMismatchError, match="layer 1 has 1 query heads; the table of patterns names head 1"):
        policy.patterns(1, 1)
    with pytest.raises(BudgetError, match="keeps everything and takes no budget"):
        mp.compress(llama(), "minference", "20%")
    for option in ("vertical", "slash", "last"):
        with pytest.raises(OptionError, match=f"{option}=0 must be 1 to"):
            METHODS.get("minference")(**{option: 0})
    with pytest.raises(OptionError, match="blocks=0 must be 1 to 16,777,216"):
        METHODS.get("minference")(pattern="block_sparse", blocks=0)
    with pytest.raises(OptionError, match=r"ratio=0\.0 must be above 0"):
        METHODS.get("minference")(ratio=0.0)


@pytest.mark.parametrize(
    "rows", [{}, 3, [1], [{"0": ["dense", 1, 2]}], [{"a": ["a_shape", 1, 2]}], [{"0": ["a_shape"]}]]
)
def test_what_is_no_table_is_refused(rows: Any, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text(json.dumps(rows))
    with pytest.raises(OptionError, match="a list of layers, each a map from query head"):
        METHODS.get("minference")(patterns=str(path))
    with pytest.raises(OptionError, match="cannot be read as JSON"):
        METHODS.get("minference")(patterns=str(tmp_path / "none.json"))
