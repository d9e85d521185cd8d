"""Requests that begin alike read their common pages once in each decoding step, and answer as alone."""

from __future__ import annotations

import pytest

from millpond.cache.pages import shared_prefix
from millpond.engine.request import Request
from millpond.kernels import ops
from tests.helpers.engine.helpers import add, alone, engine_for, greedy, prompt, tokens


@pytest.mark.parametrize("sharing", [True, False])
def test_what_prompts_begin_with_is_read_once(sharing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prefix, "MIN_SHARED_ENTRIES", 8)
    calls = []
    real = ops.decode_shared
    monkeypatch.setattr(ops, "decode_shared", lambda args: calls.append(1) or real(args))
    engine = engine_for("full", prefix_cache=sharing)
    add(engine, Request(request_id="first", prompt=prompt(57), params=greedy(1)))
    finish_one = engine.drain()
    assert len(finish_one) == 1
    add(engine, *(Request(request_id=str(i), prompt=prompt(57), params=greedy()) for i in range(3)))
    done = {out.request_id: out for out in engine.drain()}
    engine.close()
    assert [tokens(done[str(i)]) for i in range(3)] == [alone("full", 57)] * 3
    assert bool(calls) == sharing
