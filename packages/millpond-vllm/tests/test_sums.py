"""What a worker gathers about attention and queries, against sums over whole texts; no vLLM is needed."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from fed_state import BLOCK, DIM, HEADS, KV_HEADS, turned

from millpond.plugins import AttentionShape, QueryMoments, make_policy
from millpond_vllm.attention_sums import AttentionSums
from millpond_vllm.cache_layout import HeadMajorLayout
from millpond_vllm.messages import StepPart
from millpond_vllm.query_sums import GATHERED, QuerySums
from millpond_vllm.worker_state import EvictingLayer

LENGTH = 150


def layer_of(cache):
    module = SimpleNamespace(kv_cache=cache, head_size=DIM)
    return EvictingLayer(0, module, HEADS, KV_HEADS, 0, AttentionShape(DIM**-0.5), lambda: torch.empty(0))


def given(starts, lengths, table, slots):
    return SimpleNamespace(
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        query_start_loc_cpu=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        block_table_tensor=torch.tensor(table, dtype=torch.int32),
        slot_mapping=torch.tensor(slots),
        num_actual_tokens=len(slots),
        max_query_len=max(b - a for a, b in pairwise(starts)),
    )


class Texts:
    """Three texts of one layer, in blocks that lie in no order."""

    def __init__(self, **options):
        draw = torch.Generator().manual_seed(3)
        self.q = torch.randn(3, LENGTH, HEADS, DIM, generator=draw)
        self.k = torch.randn(3, LENGTH, KV_HEADS, DIM, generator=draw)
        self.blocks = (torch.randperm(15, generator=draw) + 1).view(3, 5).tolist()
        layout = HeadMajorLayout(turned(BLOCK, DIM), turned(BLOCK, DIM), BLOCK)
        cache = torch.zeros(16, KV_HEADS, BLOCK, 2 * DIM)
        for row in range(3):
            keys = torch.nn.functional.pad(self.k[row].transpose(0, 1), (0, 0, 0, 160 - LENGTH))
            layout.write(cache, torch.tensor(self.blocks[row]), keys, keys)
        self.layer = layer_of(cache)
        self.policy = make_policy("h2o", options)
        self.sums = AttentionSums([self.layer], layout, BLOCK, self.policy)

    def slot(self, row, at):
        return self.blocks[row][at // BLOCK] * BLOCK + at % BLOCK

    def step(self, parts, expected, padding=0):
        """Read tokens (row, begin, end) in one step; sums are expected of some rows."""
        starts, lengths, slots, queries = [0], [], [], []
        for row, begin, end in parts:
            starts.append(starts[-1] + end - begin)
            lengths.append(end)
            slots += [self.slot(row, at) for at in range(begin, end)]
            queries.append(self.q[row, begin:end])
        table = [self.blocks[row] for row, _, _ in parts] + [[0] * 5] * padding
        starts += starts[-1:] * padding
        wanted = [StepPart(str(row), b, e - b, self.slot(row, b)) for row, b, e in parts if row in expected]
        self.sums.expect(wanted)
        plan = self.sums.plan(given(starts, lengths + [0] * padding, table, slots))
        if plan is not None:
            self.sums.gather(self.layer, torch.cat(queries), plan)

    def found(self, row, n):
        return self.sums.of([self.layer], torch.tensor(self.blocks[row]))[:, :n]

    def wanted(self, row, n, decay=1.0):
        q = self.q[row, :n].transpose(0, 1).view(KV_HEADS, -1, n, DIM)
        k = self.k[row, :n].transpose(0, 1)[:, None]
        logits = (q @ k.transpose(2, 3)) * DIM**-0.5
        seen = torch.ones(n, n, dtype=torch.bool).tril()
        p = logits.masked_fill(~seen, -torch.inf).softmax(-1).mean(1)
        return (p * decay ** torch.arange(n - 1, -1, -1)[:, None]).sum(1)


@pytest.mark.parametrize("decay", [1.0, 0.9])
def test_sums_of_chunks_and_of_steps_are_those_of_whole_texts(decay):
    texts = Texts(decay=decay)
    texts.sums.at(texts.layer).fill_(7)  # what blocks held before does not count
    texts.step([(0, 0, 70), (1, 0, 33)], {0, 1})
    texts.step([(1, 33, 34), (0, 70, 140), (2, 0, 1)], {0, 1, 2})
    for at in range(8):
        texts.step([(0, 140 + at, 141 + at), (2, 1 + at, 2 + at), (1, 34 + at, 35 + at)], {0, 1, 2}, padding=at % 3)
    for row, n in ((0, 148), (1, 42), (2, 9)):
        torch.testing.assert_close(texts.found(row, n), texts.wanted(row, n, decay), rtol=1e-4, atol=1e-5)


def test_nothing_is_summed_for_requests_without_an_event_ahead():
    texts = Texts()
    texts.step([(0, 0, 40), (1, 0, 40)], {0})
    texts.step([(0, 40, 41), (1, 40, 41), (2, 0, 1)], {0})
    torch.testing.assert_close(texts.found(0, 41), texts.wanted(0, 41), rtol=1e-4, atol=1e-5)
    assert not texts.found(1, 41).any()
    assert not texts.found(2, 1).any()


def test_a_step_without_expected_requests_makes_no_plan():
    texts = Texts()
    texts.sums.expect([])
    assert texts.sums.plan(given([0, 1], [1], [[1]], [32])) is None


def query_sums(**options):
    cache = torch.zeros(16, KV_HEADS, BLOCK, 2 * DIM)
    layer = layer_of(cache)
    return QuerySums([layer], make_policy("qfilters", options)), layer


def feed(sums, layer, queries, parts):
    """One step of requests (name, begin, end, first slot)."""
    slots = torch.cat([torch.arange(slot, slot + end - begin) for _, begin, end, slot in parts])
    sums.expect([StepPart(name, begin, end - begin, slot) for name, begin, end, slot in parts])
    plan = sums.plan(slots)
    if plan is not None:
        sums.gather(layer, torch.cat([queries[name][begin:end] for name, begin, end, _ in parts]), plan)


@pytest.fixture
def queries():
    draw = torch.Generator().manual_seed(4)
    return {name: torch.randn(400, HEADS, DIM, generator=draw) for name in "ab"}


def close(found, wanted):
    assert found.count == wanted.count
    torch.testing.assert_close(found.total, wanted.total, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(found.outer, wanted.outer, rtol=1e-5, atol=1e-3)


def test_moments_of_chunks_and_steps_are_those_of_all_queries_but_the_sinks(queries):
    sums, layer = query_sums(sinks=4)
    feed(sums, layer, queries, [("a", 0, 2, 320)])
    feed(sums, layer, queries, [("b", 0, 90, 64), ("a", 2, 200, 322)])
    n = GATHERED // 2 + 10
    for at in range(n):
        feed(sums, layer, queries, [("a", 200 + at, 201 + at, 520 + at), ("b", 90 + at, 91 + at, 154 + at)])
    close(sums.moments("a", layer), QueryMoments.of(queries["a"][4 : 200 + n].transpose(0, 1)))
    close(sums.moments("b", layer), QueryMoments.of(queries["b"][4 : 90 + n].transpose(0, 1)))


def test_a_forgotten_request_begins_anew_and_others_go_on(queries):
    sums, layer = query_sums(sinks=0)
    feed(sums, layer, queries, [("a", 0, 50, 32), ("b", 0, 50, 96)])
    sums.forget("a")
    feed(sums, layer, queries, [("a", 0, 20, 32), ("b", 50, 60, 146)])
    close(sums.moments("a", layer), QueryMoments.of(queries["a"][:20].transpose(0, 1)))
    close(sums.moments("b", layer), QueryMoments.of(queries["b"][:60].transpose(0, 1)))


def test_a_request_with_sinks_alone_has_no_moments(queries):
    sums, layer = query_sums(sinks=9)
    feed(sums, layer, queries, [("a", 0, 5, 32)])
    assert sums.moments("a", layer).count == 0
