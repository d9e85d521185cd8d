"""Spans of prompts that leave a request's cache: before later tokens are read, and from the caches of earlier turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import millpond as mp
from millpond.engine.engine import Engine
from millpond.engine.outputs import RequestOutput
from millpond.engine.request import Request
from millpond.errors import OptionError
from millpond.prompt_marks import PromptMarks
from tests.helpers.engine.sessions import NEW, kv, model, open_engine, said, words
from tests.helpers.engine.sessions import ask as answer_to

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

SPANS = ((10, 30), (41, 44))
#: float32: rounding of sums in another order.
CLOSE = 1e-5


def ask(engine: Engine, ids: list[int], **fields: Any) -> RequestOutput:
    return answer_to(engine, ids, fields=fields, logprobs=0)


def logprobs(output: RequestOutput) -> list[float]:
    return [one.logprob for one in output.completions[0].logprobs or ()]


@torch.no_grad()
def masked(
    turns: list[tuple[list[int], tuple[tuple[int, int], ...]]], answers: list[list[int]]
) -> tuple[list[list[int]], list[list[float]]]:
    """Greedy answers and their log probabilities by transformers alone.

    Each turn is read token by token behind the answer before; a span of it is hidden from the moment that its end was
    read, or from the turn's begin where it lies in what was read before.
    """
    cache, shown, ids, n = DynamicCache(), torch.ones(1, 0, dtype=torch.long), list[int](), 0
    found: tuple[list[list[int]], list[list[float]]] = [], []

    def read(token: int) -> torch.Tensor:
        nonlocal shown, n
        shown = torch.cat([shown, torch.ones(1, 1, dtype=torch.long)], 1)
        given = torch.tensor([[token]])
        out = model()(given, past_key_values=cache, attention_mask=shown, position_ids=torch.tensor([[n]]))
        n += 1
        logits: torch.Tensor = out.logits[0, -1]
        return logits

    for (more, spans), _ in zip(turns, answers, strict=True):
        ids = ids + more
        for begin, end in spans:
            shown[:, begin : min(end, n)] = 0
        logits = torch.zeros(0)
        for token in ids[n:]:
            logits = read(token)
            for begin, end in spans:
                if end == n:
                    shown[:, begin:end] = 0
        said_now, values = list[int](), list[float]()
        for step in range(NEW):
            chosen = int(logits.argmax())
            values.append(float(logits.log_softmax(-1)[chosen]))
            said_now.append(chosen)
            if step + 1 < NEW:
                logits = read(chosen)
        ids = ids + said_now
        found[0].append(said_now)
        found[1].append(values)
    return found


@pytest.mark.parametrize("cut", [7, 32, 512])
def test_later_tokens_do_not_see_a_span(cut: int) -> None:
    ids = words(80, 1)
    engine = open_engine(None, "full", max_step_tokens=cut)
    output = ask(engine, ids, marks=PromptMarks(forget=SPANS))
    (expected,), (values,) = masked([(ids, SPANS)], [[]])
    assert said(output) == expected
    assert logprobs(output) == pytest.approx(values, abs=CLOSE)
    assert (kv(output).forgotten_tokens, kv(output).exact, kv(output).seen) == (23, False, 80 + NEW - 1)
    plain = ask(engine, ids)
    assert abs(logprobs(plain)[0] - values[0]) > 1e-3, "or the test could not fail"
    assert (kv(plain).forgotten_tokens, kv(plain).exact) == (0, True)
    engine.close()


def test_a_stored_turn_forgets_and_only_new_tokens_are_read(tmp_path: Path) -> None:
    first, more, last = words(80, 1), words(9, 2), words(7, 3)
    one = open_engine(tmp_path, "full")
    answer = said(ask(one, first))
    one.close()
    two = open_engine(tmp_path, "full")  # a restart
    ids = [*first, *answer, *more]
    output = ask(two, ids, marks=PromptMarks(forget=SPANS))
    again = [*ids, *said(output), *last]
    wider = (*SPANS, (82, 88))
    three = ask(two, again, marks=PromptMarks(forget=wider))
    texts, values = masked([(first, ()), (more, SPANS), (last, wider)], [[], [], []])
    assert [answer, said(output), said(three)] == texts
    assert logprobs(output) == pytest.approx(values[1], abs=CLOSE)
    assert logprobs(three) == pytest.approx(values[2], abs=CLOSE)
    assert kv(output).restored_tokens == 80 + NEW - 1
    assert kv(three).restored_tokens == len(ids) + NEW - 1, "the turn that had forgotten the others goes on"
    assert (kv(output).forgotten_tokens, kv(three).forgotten_tokens) == (23, 29)
    assert two.stats().prompt_tokens == len(more) + 1 + len(last) + 1
    assert kv(ask(two, again)).restored_tokens == 80 + NEW - 1, "who forgets nothing goes on from the turn before"
    assert kv(ask(two, again, marks=PromptMarks(forget=((10, 20),)))).restored_tokens == 80 + NEW - 1, (
        "nor who forgets less"
    )
    two.close()


@pytest.mark.parametrize("method", ["h2o", "snapkv", "ada", "expected_attention"])
@pytest.mark.parametrize("codec", [None, "int4"])
def test_no_head_of_any_method_holds_a_span(method: str, codec: str | None) -> None:
    engine = open_engine(None, method, codec)
    ids = words(90, 4)
    output = ask(engine, ids, marks=PromptMarks(forget=SPANS, report=(*SPANS, (50, 90))))
    told = output.completions[0].forgotten
    assert [one.share for one in told[:2]] == [1.0, 1.0]
    assert told[2].share < 1.0
    engine.close()


def test_several_answers_and_a_small_pool() -> None:
    ids = words(80, 5)
    params = mp.SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True, n=2)
    roomy, tight = open_engine(None, "full"), open_engine(None, "full", kv_memory="220KiB")
    found = []
    for engine in (roomy, tight):
        for name in range(4):
            request = Request(
                request_id=str(name),
                prompt=tuple(ids),
                params=params,
                marks=PromptMarks(forget=SPANS if name % 2 else ()),
            )
            engine.add(request)
        done: dict[str, Any] = {}
        while engine.busy:
            for output in engine.step():
                assert output.error is None, output.error
                done[output.request_id] = [c.token_ids for c in output.completions]
            engine.check_integrity()
        assert done["0"] == done["2"]
        assert done["1"] == done["3"]
        found.append(done)
        assert engine.stats().kv_bytes == 0
        engine.close()
    assert found[0] == found[1]


def test_a_prompt_that_forgets_shares_no_page() -> None:
    ids = words(80, 6)
    engine = open_engine(None, "full", prefix_cache=True)
    plain = said(ask(engine, ids))
    first = ask(engine, ids, marks=PromptMarks(forget=SPANS))
    assert kv(first).shared_tokens == 0
    assert said(ask(engine, ids)) == plain, "nor does it leave what others would take over"
    assert said(ask(engine, ids, marks=PromptMarks(forget=SPANS))) == said(first)
    engine.close()


def test_a_request_that_moves_goes_on_without_them() -> None:
    ids = words(80, 7)
    expected = said(ask(engine := open_engine(None, "h2o"), ids, marks=PromptMarks(forget=SPANS)))
    params = mp.SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True)
    engine.add(Request(request_id="moves", prompt=tuple(ids), params=params, marks=PromptMarks(forget=SPANS)))
    while not any(output.completions[0].token_ids for output in engine.step()):
        pass
    data = engine.export_request("moves")
    other = open_engine(None, "h2o")
    other.import_request(data)
    cache = other.cache_of("moves")
    assert cache is not None
    assert cache[0].tracker.marks.dropped.of(cache[1]) == SPANS
    found: list[RequestOutput] = []
    while other.busy:
        found += [output for output in other.step() if output.finished]
    assert said(found[0]) == expected
    engine.close()
    other.close()


@pytest.mark.parametrize(
    ("spans", "rule"),
    [
        (((3, 9), (8, 12)), r"\[8, 12\) overlaps \[3, 9\)"),
        (((5, 5),), "one token at least"),
        (((5, 80),), "without its last token"),
        (((-1, 4),), "tokens 0 to 78"),
        (((1, 2, 3),), "two whole numbers"),
        (tuple((i, i + 1) for i in range(1025)), "at most 1024"),
    ],
)
def test_spans_that_cannot_leave_are_refused(spans: Any, rule: str) -> None:
    engine = open_engine(None, "full")
    with pytest.raises(OptionError, match=rule):
        ask(engine, words(80, 1), marks=PromptMarks(forget=spans))
    with pytest.raises(OptionError, match=r"\[2, 6\) holds tokens of \[4, 8\), which keep= keeps"):
        ask(engine, words(80, 1), marks=PromptMarks(forget=((2, 6),), keep=((4, 8),)))
    assert not engine.busy
    engine.close()


@pytest.mark.parametrize(("method", "reason"), [("kvmerger", "merges entries"), ("streaming", "positions='absolute'")])
def test_methods_that_cannot_forget_say_why(method: str, reason: str) -> None:
    engine = open_engine(None, method)
    with pytest.raises(OptionError, match=reason):
        ask(engine, words(80, 1), marks=PromptMarks(forget=SPANS))
    engine.close()


def test_generate_takes_them() -> None:
    ids = words(80, 1)
    engine = open_engine(None, "full")
    expected = said(ask(engine, ids, marks=PromptMarks(forget=SPANS)))
    engine.close()
    with mp.LLM(model(), method="full") as llm:
        params = mp.SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True)
        (output,) = llm.generate(ids, params, marks=PromptMarks(forget=SPANS))
    assert said(output) == expected
