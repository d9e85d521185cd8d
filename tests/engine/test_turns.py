"""Answers that decode in turns with others', whose client has had less service: the same tokens, no page lost."""

from __future__ import annotations

import pytest

from millpond.engine.request import Request
from millpond.engine.sampling.params import SamplingParams
from tests.helpers.engine.helpers import add, alone, engine_for, greedy, prompt, tokens

pytestmark = pytest.mark.filterwarnings("ignore::millpond.hf.layer_budgets.BudgetFloorWarning")


@pytest.mark.parametrize("method", ["full", "h2o", "snapkv"])
def test_turns_change_no_token(method: str) -> None:
    engine = engine_for(method)
    wide = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, n=20)
    add(engine, Request(request_id="wide", prompt=prompt(40), params=wide, client="many"))
    while engine._requests["wide"].completions[0].kv is None:
        engine.step()
    for _ in range(5):
        engine.step()
    add(engine, Request(request_id="one", prompt=prompt(31), params=greedy(), client="one"))
    done, passed, together = {}, 0, 0
    while engine.busy:
        before = len(engine._requests["wide"].completions[0].tokens) if "wide" in engine._requests else None
        for output in engine.step():
            if output.finished:
                done[output.request_id] = output
        engine.check_integrity()
        if before is not None and "wide" in engine._requests:
            moved = len(engine._requests["wide"].completions[0].tokens) > before
            passed += not moved
            together += moved
    assert passed > 0, "it passes steps"
    assert together > 0, "and goes on"
    assert tokens(done["one"]) == alone(method, 31)
    first, *others = (completion.token_ids for completion in done["wide"].completions)
    assert all(one == first for one in others)
    assert len(first) == 40
    engine.close()
