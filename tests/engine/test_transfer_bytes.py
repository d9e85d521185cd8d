"""Bytes of a moving request: codecs, sizes, and buffers that are cut off, changed or made up."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millpond.engine.engine import Engine
from millpond.engine.request import CacheOptions, Request
from millpond.engine.transfer import container
from millpond.engine.transfer.container import pack, unpack
from millpond.engine.transfer.request_snapshot import RequestSnapshot
from millpond.errors import DataError, MillpondError
from tests.engine.test_codecs import model, prompt
from tests.helpers.engine.helpers import greedy, tokens
from tests.helpers.examples import examples

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
NEW = 16
#: Codecs and the methods that the product allows with them on this shape.
CASES = [
    ("full", "int8"),
    ("full", "think"),
    ("full", "kivi2"),
    ("h2o", "int4"),
    ("h2o", "mikv"),
    ("h2o", "rotated4"),
    ("ada", "int4"),
    ("h2o", "0=bf16,*=int4"),
    ("h2o", "bf16:10%,kivi4:30%,kivi2"),
]


def asked(method: str, codec: str | None, length: int = 150) -> Request:
    cache = CacheOptions(method=method, budget=None if method == "full" else "70%", codec=codec)
    return Request(request_id="moved", prompt=tuple(prompt(length)), params=greedy(NEW), cache=cache)


def sent(engine: Engine, request: Request, at: int = 5) -> bytes:
    engine.add(request)
    while True:
        found = engine.step()
        if found and len(tokens(found[0])) >= at:
            return engine.export_request("moved")


def finish(engine: Engine) -> list[int]:
    (found,) = engine.drain()
    engine.check_integrity()
    assert engine.stats().kv_bytes == 0
    return tokens(found)


@pytest.fixture(scope="module")
def engines() -> Any:
    pair = Engine(model(), page_slots=16), Engine(model(), page_slots=32)
    yield pair
    for engine in pair:
        engine.close()


@pytest.mark.parametrize(("method", "codec"), CASES)
def test_codes_go_on_bit_by_bit(engines: tuple[Engine, Engine], method: str, codec: str) -> None:
    first, second = engines
    second.add(asked(method, codec))
    expected = finish(second)
    data = sent(first, asked(method, codec))
    first.check_integrity()
    second.import_request(data)
    assert finish(second) == expected


@pytest.mark.parametrize("method", ["full", "snapkv", "ada"])
def test_no_more_travels_than_what_is_kept(engines: tuple[Engine, Engine], method: str) -> None:
    """Keys and values of the entries that are held, their positions and scores, and little else."""
    first, _ = engines
    first.add(asked(method, None, 210))
    while True:
        found = first.step()
        if found and len(tokens(found[0])) >= 3:
            break
    kv = found[0].completions[0].kv
    assert kv is not None
    kept = kv.kv_bytes - kv.unused_bytes
    data = first.export_request("moved")
    assert kept < len(data) < 1.12 * kept


@pytest.fixture(scope="module")
def data(engines: tuple[Engine, Engine]) -> bytes:
    return sent(engines[0], asked("ada", None, 60))


def refused(engine: Engine, data: bytes) -> None:
    try:
        with pytest.raises(MillpondError):
            engine.import_request(data)
    finally:
        engine.abort_all()
    engine.check_integrity()
    assert not engine.busy
    assert engine.stats().kv_bytes == 0
    assert len(engine._sampler) == 0


@settings(max_examples=examples(25))
@given(cut=st.data())
def test_torn_and_changed_bytes_are_refused(engines: tuple[Engine, Engine], data: bytes, cut: st.DataObject) -> None:
    place = cut.draw(st.one_of(st.integers(0, 40), st.integers(0, len(data) - 1)), "place")
    if cut.draw(st.booleans(), "cut off"):
        broken = data[:place]
    else:
        other = cut.draw(st.integers(0, 255).filter(lambda byte: byte != data[place]), "byte")
        broken = data[:place] + bytes([other]) + data[place + 1 :]
    refused(engines[1], broken)


#: Tensors of a layer, and changes that no engine would make.
CHANGES = {
    "shape": lambda t: t[..., :-1] if t.ndim else t.view(1, 1),
    "type": lambda t: t.double() if t.is_floating_point() else t.float(),
    "sign": lambda t: -t - 5 if not t.is_floating_point() else t[:0],
    "size": lambda t: t + 2**20 if not t.is_floating_point() else t[None],
    "none": lambda t: None,
}


@pytest.mark.parametrize("change", CHANGES)
def test_made_up_tensors_are_refused_with_a_right_checksum(
    engines: tuple[Engine, Engine], data: bytes, change: str
) -> None:
    about, stored = unpack(data)
    allowed = {"log_masses", "recent", "capacities", "shape"}  # any number is one that an engine could have chosen
    for name in ("keys", "values", "positions", "scores", "lens", "head_rules", "capacities", "recent", "shape"):
        if (change in ("sign", "size") and name in allowed) or (change, name) == ("type", "shape"):
            continue
        changed = CHANGES[change](stored[f"cache.0.1.{name}"])
        tensors = {key: t for key, t in stored.items() if key != f"cache.0.1.{name}"}
        if changed is not None:
            tensors[f"cache.0.1.{name}"] = changed.contiguous()
        refused(engines[1], pack(about, tensors))


def test_made_up_codes_are_refused(engines: tuple[Engine, Engine]) -> None:
    about, stored = unpack(sent(engines[0], asked("full", "think")))
    for name in ("sealed.owned", "sealed.lens", "sealed.dead", "sealed.channels", "sealed.pages.0"):
        for change in ("shape", "type", "none") if name == "sealed.pages.0" else CHANGES:
            changed = CHANGES[change](stored[f"cache.0.0.{name}"])
            tensors = {key: t for key, t in stored.items() if key != f"cache.0.0.{name}"}
            if changed is not None:
                tensors[f"cache.0.0.{name}"] = changed.contiguous()
            refused(engines[1], pack(about, tensors))


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("params", {"max_tokens": -1}),
        ("params", {"n": 10**9}),
        ("params", {"stop": [5]}),
        ("params", None),
        ("cache", {"method": "none", "budget": None}),
        ("cache", {"method": "ada", "budget": [1, 2]}),
        ("answers", []),
        ("answers", [{"seed": "x"}]),
        ("marks", None),
        ("marks", {"kept": [[0, 4]]}),
        ("marks", {"keep": [[5, 4]]}),
        ("marks", {"keep": [[0, 1_000_000]]}),
        ("marks", {"shares": [[0, 4]]}),
        ("marks", {"forget": [[0, 4], [2, 6]]}),
        ("marks", {"report": [[0, 1_000_000]]}),
        ("marks", {"report": [[0, 1]] * 5_000}),
        ("marks", {"breakpoints": ["x"]}),
        ("caches", 7),
        ("caches", True),
        ("ages", {"arrived": "now"}),
        ("request", {"request_id": 5}),
        ("prompt_logprobs", [[1]]),
        ("text", 5),
    ],
)
def test_made_up_headers_are_refused(engines: tuple[Engine, Engine], data: bytes, part: str, value: Any) -> None:
    about, stored = unpack(data)
    header = {**json.loads(about["request"]), part: value}
    refused(engines[1], pack({**about, "request": json.dumps(header)}, stored))


def test_ids_behind_the_vocabulary_and_answers_behind_their_end(engines: tuple[Engine, Engine], data: bytes) -> None:
    about, stored = unpack(data)
    for name, ids in (("ids", [96, 1]), ("answer.0.tokens", [5, -3]), ("answer.0.tokens", [5] * 40), ("ids", [])):
        refused(engines[1], pack(about, {**stored, name: torch.tensor(ids, dtype=torch.int32)}))


def test_a_buffer_of_another_form_and_headers_that_lie_about_sizes() -> None:
    with pytest.raises(DataError, match="'other', and this Millpond reads 'millpond-request-2'"):
        RequestSnapshot.from_bytes(pack({"format": "other"}, {}))

    def made(entry: dict[str, Any]) -> bytes:
        text = json.dumps({"__metadata__": {}, "x": entry}, separators=(",", ":")).encode()
        return len(text).to_bytes(8, "little") + text + bytes(64)

    for entry, rule in (
        ({"dtype": "F32", "shape": [2**40], "data_offsets": [0, 64]}, "does not lie in 64"),
        ({"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]}, "has the shape"),
        ({"dtype": "F32", "shape": [4], "data_offsets": [60, 76]}, "does not lie in"),
        ({"dtype": "F32", "shape": [4], "data_offsets": [1, 17]}, "does not lie in"),
        ({"dtype": "F32", "shape": [1] * 9, "data_offsets": [0, 4]}, "has the shape"),
        ({"dtype": "F99", "shape": [4], "data_offsets": [0, 16]}, "no type, shape and place"),
        ({"dtype": "F32", "shape": True, "data_offsets": [0, 16]}, "no type, shape and place"),
    ):
        with pytest.raises(DataError, match=rule):
            unpack(made(entry))
    with pytest.raises(DataError, match=r"a header of .* does not fit"):
        unpack((container.MAX_HEADER + 1).to_bytes(8, "little") + bytes(100))
    with pytest.raises(DataError, match="its header is no JSON"):
        unpack((2**20).to_bytes(8, "little") + b"[" * 2**20)
