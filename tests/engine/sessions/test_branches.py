"""Branches of one conversation go on from the compressed state of the turn that they share: forks of its cache."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import millpond as mp
from millpond.engine.engine import Engine
from millpond.engine.outputs import RequestOutput
from millpond.engine.request import Request
from tests.helpers.engine.sessions import NEW, ask, budget_of, kv, model, open_engine, said, words

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

CASES = [("full", None), ("h2o", None), ("snapkv", "int4")]
BEGIN, ENDS = 80, (9, 9, 17)


@cache
def forked(method: str, codec: str | None) -> tuple[list[int], list[list[int]], list[list[int]]]:
    """A first turn with its answer; the branches behind it; and what a fork of its cache answers to each."""
    ids = words(BEGIN, 0)

    def go_on(cache: Any, tokens: list[int]) -> list[int]:
        asked = torch.tensor([tokens])
        out = model().generate(
            asked,
            attention_mask=torch.ones_like(asked),
            cache=cache,
            max_new_tokens=NEW,
            do_sample=False,
            pad_token_id=0,
        )
        return [int(token) for token in out[0, len(tokens) :]]

    with mp.compress(model(), method, budget_of(method), codec or "auto") as kept:
        first = ids + go_on(kept, ids)
        branches = [first + words(length, 10 + n) for n, length in enumerate(ENDS)]
        answers = [go_on(kept.fork(), branch) for branch in branches]
    return first, branches, answers


def ask_together(engine: Engine, prompts: list[list[int]]) -> list[RequestOutput]:
    chosen = mp.SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True)
    for n, ids in enumerate(prompts):
        engine.add(Request(request_id=str(n), prompt=tuple(ids), params=chosen))
    done: dict[str, RequestOutput] = {}
    while engine.busy:
        done |= {output.request_id: output for output in engine.step() if output.finished}
        engine.check_integrity()
    assert engine.sessions is not None
    assert engine.sessions.wait(60)
    return [done[str(n)] for n in range(len(prompts))]


@pytest.mark.covering
@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize(("method", "codec"), CASES)
def test_each_branch_is_a_fork_of_the_turn_before(
    method: str, codec: str | None, together: bool, restarted: bool, tmp_path: Path
) -> None:
    first, branches, answers = forked(method, codec)
    engine = open_engine(tmp_path, method, codec)
    assert words(BEGIN, 0) + said(ask(engine, words(BEGIN, 0))) == first
    if restarted:
        engine.close()
        engine = open_engine(tmp_path, method, codec)
    outputs = ask_together(engine, branches) if together else [ask(engine, branch) for branch in branches]
    assert [said(output) for output in outputs] == answers
    assert {kv(output).restored_tokens for output in outputs} == {BEGIN + NEW - 1}
    # and so do branches of branches, and of the first turn once more
    later = [branches[n] + answers[n] + words(5, 30 + n) for n in (2, 0)]
    assert [kv(ask(engine, ids)).restored_tokens for ids in later] == [len(ids) - 6 for ids in later]
    once_more = ask(engine, branches[1])
    assert (said(once_more), kv(once_more).restored_tokens) == (answers[1], BEGIN + NEW - 1)
    engine.close()


@pytest.mark.parametrize(("method", "codec"), CASES)
def test_each_of_several_answers_has_branches(method: str, codec: str | None, tmp_path: Path) -> None:
    engine = open_engine(tmp_path, method, codec)
    ids = words(BEGIN, 0)
    output = ask(engine, ids, n=3, temperature=1.5, seed=1)
    told = [list(one.token_ids) for one in output.completions]
    assert len({tuple(one) for one in told}) == 3
    branches = [ids + one + words(7, 40 + n) for one in told for n in range(2)]
    together = ask_together(engine, branches)
    assert {kv(one).restored_tokens for one in together} == {BEGIN + NEW - 1}
    engine.close()
    engine = open_engine(tmp_path, method, codec)
    assert [said(ask(engine, branch)) for branch in branches] == [said(one) for one in together]
    engine.close()
