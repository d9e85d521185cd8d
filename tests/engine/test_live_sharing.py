"""Requests in flight that begin alike: read once by default, and nothing is kept behind them."""

from __future__ import annotations

import pytest

from millpond.engine.engine import Engine
from millpond.engine.request import Request
from millpond.errors import OptionError
from tests.engine import test_codecs
from tests.helpers.engine.helpers import add, alone, engine_for, finish, greedy, prompt, tokens

pytestmark = pytest.mark.filterwarnings("ignore::millpond.hf.layer_budgets.BudgetFloorWarning")

#: Equal prompts share all full pages but those of their last token.
SHARED = 56


def requests(n: int, new: int = 14) -> list[Request]:
    return [Request(request_id=str(i), prompt=prompt(57), params=greedy(new)) for i in range(n)]


@pytest.mark.parametrize("step_tokens", [16, 512])
def test_equal_prompts_sent_at_once_are_read_once(step_tokens: int) -> None:
    engine = engine_for("full", codec="f32", max_step_tokens=step_tokens)
    add(engine, *requests(5))
    done = finish(engine)
    assert engine.stats().prompt_tokens == 57 + 4 * (57 - SHARED)
    assert [tokens(done[str(i)]) for i in range(5)] == [alone("full", 57)] * 5
    engine.close()


@pytest.mark.parametrize("step_tokens", [64, 512])
def test_so_are_those_whose_pages_become_codes_at_their_end(step_tokens: int) -> None:
    """The usual format is int8: what was read leaves its pages in the step in which the prompt ends."""
    engine = Engine(test_codecs.model(), max_step_tokens=step_tokens, page_slots=16)
    text = tuple(test_codecs.prompt(210))
    add(engine, *(Request(request_id=str(i), prompt=text, params=greedy(4)) for i in range(5)))
    done = finish(engine)
    assert engine.stats().prompt_tokens == 210 + 4 * (210 - 208)
    assert [tokens(done[str(i)]) for i in range(5)] == [test_codecs.alone("full int8", 210)[:4]] * 5
    engine.close()


def test_nothing_stays_once_no_request_holds_it() -> None:
    engine = engine_for("full", codec="f32")
    for _ in range(2):
        add(engine, *requests(1, new=2))
        finish(engine)  # it asserts that no page is held
    assert engine.stats().prompt_tokens == 2 * 57
    assert engine.stats().prefix is None
    engine.close()


def test_a_prompt_begins_with_pages_of_one_that_decodes() -> None:
    engine = engine_for("full", codec="f32")
    add(engine, *requests(1, new=30))
    for _ in range(8):
        engine.step()
    assert engine.stats().prompt_tokens == 57
    add(engine, Request(request_id="later", prompt=prompt(57), params=greedy()))
    done = finish(engine)
    assert done["later"].completions[0].kv.shared_tokens == SHARED
    assert tokens(done["later"]) == alone("full", 57)
    engine.close()


@pytest.mark.parametrize("method", ["snapkv", "h2o"])
def test_methods_that_evict_share_what_they_read(method: str) -> None:
    engine = engine_for(method, codec="f32")
    add(engine, *requests(4))
    done = finish(engine)
    assert engine.stats().shared_tokens >= 2 * 24
    assert [tokens(done[str(i)]) for i in range(4)] == [alone(method, 57)] * 4
    engine.close()


def test_the_plan_of_a_prompt_alone_takes_no_more_pages_than_without_sharing() -> None:
    peaks = []
    for sharing in ("live", False):
        engine = engine_for("snapkv", codec="f32", prefix_cache=sharing)
        add(engine, *requests(1))
        peaks.append(0)
        while engine.busy:
            engine.step()
            peaks[-1] = max(peaks[-1], engine.stats().kv_reserved)
        engine.close()
    assert peaks[0] == peaks[1]


def test_a_request_that_waits_and_is_cancelled_leaves_nothing() -> None:
    engine = engine_for("snapkv", codec="f32", max_running=1)
    add(engine, *requests(2, new=40))
    for _ in range(6):
        engine.step()
    engine.check_integrity()
    engine.cancel("1")
    finish(engine)
    engine.close()


@pytest.mark.parametrize("option", [{"prefix_disk": "1MiB"}, {"pager": "file"}])
def test_what_needs_kept_prompts_is_refused(option: dict[str, str]) -> None:
    with pytest.raises(OptionError, match="prefix"):
        engine_for("full", **option)


def test_sharing_can_be_turned_off() -> None:
    engine: Engine = engine_for("full", codec="f32", prefix_cache=False)
    add(engine, *requests(2))
    finish(engine)
    assert engine.stats().shared_tokens == 0
    engine.close()
