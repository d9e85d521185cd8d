"""The table of the requests in flight: by name, by answer, by status, in the order of arrival."""

from __future__ import annotations

import pytest

from millpond.engine.request import Request
from millpond.engine.request_table import RequestTable
from millpond.engine.sampling.params import SamplingParams
from millpond.engine.scheduler_request import RequestStatus
from millpond.errors import OptionError
from tests.helpers.engine.helpers import engine_for


def test_requests_are_found_by_name_answer_and_status_until_they_are_removed() -> None:
    engine = engine_for("full", "llama")
    params = SamplingParams(max_tokens=4, temperature=0.0, n=2)
    states = [
        engine._validator.validate(Request(request_id=name, prompt=[1, 2, 3], params=params))
        for name in ("b", "a", "c")
    ]
    table = RequestTable()
    for state in states:
        table.add(state)
    assert list(table) == states
    assert len(table) == 3
    assert "a" in table
    assert table.get("d") is None
    assert table["a"] is table.get("a") is table.owner(states[1].completions[1]) is states[1]
    states[2].scheduled.status = RequestStatus.DECODE
    assert table.with_status(RequestStatus.DECODE) == [states[2]]
    states[0].completions[1].end("cancelled")
    assert table.unfinished == [states[0].completions[0], *states[1].completions, *states[2].completions]
    with pytest.raises(AssertionError, match="names of requests"):
        table.add(states[0])
    table.remove(states[0])
    assert list(table) == states[1:]
    with pytest.raises(OptionError, match="2 requests of a batch are named 'b'"):
        table.check_names(["d", "b", "b"])
    with pytest.raises(OptionError, match="'a' is in flight already"):
        table.check_names(["b", "a"])
    table.check_names(["b", "d"])
    engine.close()
