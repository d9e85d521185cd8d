"""Files of every kind that was ever written are read as they were meant, and are written once more as they were."""

from __future__ import annotations

import json
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import millpond as mp
from millpond.codec.transform.transform_file import load_transform
from millpond.engine.request import Request
from millpond.engine.transfer.container import unpack
from millpond.engine.transfer.request_snapshot import CODED, FORMAT, Ages, CompletionSnapshot, RequestSnapshot
from tests.helpers.formats import coded, engine_files
from tests.helpers.formats.coded import TRANSFORM, coded_content
from tests.helpers.formats.documents import DOCUMENTS, FOLDER, content, parts
from tests.helpers.formats.files import KEPT, chat, same
from tests.helpers.formats.model import DATA
from tests.helpers.formats.write import CONTENT

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # budgets of a few tokens

EXPECTED: dict[str, Any] = json.loads(CONTENT.read_text(encoding="utf-8"))
#: Parts of a layer that a document may have, but for a closed gap, which only an engine leaves.
PARTS = {
    "keys",
    "values",
    "positions",
    "scores",
    "log_masses",
    "lens",
    "capacities",
    "recent",
    "head_rules",
    "shape",
    "queries",
    "queries.at",
    "moments.total",
    "moments.outer",
    "moments.count",
    "memory",
    "rolling.base",
    "rolling.keys",
    "rolling.positions",
    "rolling.places",
    "focus.budget",
    "focus.means",
    "focus.scores",
    "gate.keys",
    "gate.values",
    "gate.ceiling",
    "sealed.owned",
    "sealed.lens",
    "sealed.dead",
    "sealed.channels",
    "sealed.balance",
    "sealed.reach",
    "sealed.pages.0",
    "sealed.pages.1",
    "sealed.pages.2",
    "sealed1.owned",
    "sealed1.lens",
    "sealed1.dead",
    "sealed1.pages.0",
    "sealed1.pages.1",
    "sealed1.pages.2",
}


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents name the files of their methods from the folder of the kept files."""
    monkeypatch.chdir(DATA)


def plain(found: Any) -> Any:
    """As JSON has it."""
    return json.loads(json.dumps(found))


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_document(name: str, tmp_path: Path) -> None:
    expected = EXPECTED["documents"][name]
    found, _ = content(name, expected["question"], tmp_path / "again")
    assert plain(found) == expected
    if name != "version-2":  # which becomes one of this version
        assert same((tmp_path / "again").read_bytes(), (FOLDER / name).read_bytes())


def test_documents_have_every_part() -> None:
    names = {name for path in FOLDER.iterdir() for name in parts(path)[1]}
    assert {name.partition(".")[2] for name in names if name[0].isdigit()} == PARTS
    assert {name for name in names if not name[0].isdigit()} == {
        "ids",
        "kept",
        "fair.spans",
        "fair.shares",
        "dropped",
        "state.0.conv.0",
    }


def test_a_text_in_the_codec_transform(tmp_path: Path) -> None:
    """Decoding gives equal bits on every machine: sums have one order."""
    expected = EXPECTED["coded"]
    assert plain(coded_content(expected["question"])[0]) == expected
    load_transform(TRANSFORM).save(tmp_path / "again")
    assert same((tmp_path / "again").read_bytes(), TRANSFORM.read_bytes())


def test_a_text_in_the_codec_transform_of_which_something_was_evicted(tmp_path: Path) -> None:
    expected = EXPECTED["coded kept"]
    assert plain(coded.kept_content(expected["question"])[0]) == expected
    load_transform(coded.WITH_HEADS).save(tmp_path / "again")
    assert same((tmp_path / "again").read_bytes(), coded.WITH_HEADS.read_bytes())


def test_a_turn_in_the_codec_transform() -> None:
    expected = EXPECTED["coded sessions"]
    found, _ = coded.second_coded_turn(expected["said"], expected["question"])
    assert found == expected
    assert found["restored"] > coded.TURN
    (path,) = coded.SESSIONS.glob("*/*/*")
    assert same(engine_files.turn_again(path), path.read_bytes())


def test_a_request_in_the_codec_transform() -> None:
    data, expected = coded.UNDER_WAY.read_bytes(), EXPECTED["coded request"]
    if unpack(data)[0]["format"] != CODED:
        pytest.skip("engines of other versions do not send each other requests")
    assert coded.continued_from_codes(data)[0] == expected["tokens"]
    assert same(engine_files.snapshot_again(data), data)


@pytest.mark.parametrize("name", KEPT)
def test_a_file(name: str, tmp_path: Path) -> None:
    kept = KEPT[name]
    assert plain(kept.values(DATA / name)) == EXPECTED["files"][name]
    if kept.again is not None:
        kept.again(DATA / name, tmp_path / name)
        assert same((tmp_path / name).read_bytes(), (DATA / name).read_bytes())


def test_packed_weights_and_their_plan(tmp_path: Path) -> None:
    (kept,) = engine_files.WEIGHTS.iterdir()
    copy = shutil.copy2(kept, tmp_path / kept.name)
    before = copy.stat()
    found, _ = engine_files.streamed(tmp_path, engine_files.PLAN, EXPECTED["weights"]["question"])
    assert found == EXPECTED["weights"]
    after = copy.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns), "it was packed anew"
    assert [path.name for path in tmp_path.iterdir()] == [kept.name]


def test_a_session() -> None:
    expected = EXPECTED["sessions"]
    found, _ = engine_files.second_turn_of_copy(expected["said"], expected["question"])
    assert found == expected
    assert found["restored"] > 40
    (path,) = engine_files.SESSIONS.glob("*/*/*")
    assert same(engine_files.turn_again(path), path.read_bytes())


def test_a_chunk() -> None:
    expected = EXPECTED["chunks"]
    found, _ = engine_files.chunked_copy(expected["question"])
    assert found == expected
    assert found["reused"] == len(engine_files.CHUNK)
    (path,) = engine_files.CHUNKS.glob("*/*/*")
    assert same(engine_files.chunk_again(path), path.read_bytes())


def test_a_request_under_way() -> None:
    data, expected = engine_files.UNDER_WAY.read_bytes(), EXPECTED["request"]
    if unpack(data)[0]["format"] != FORMAT:
        pytest.skip("engines of other versions do not send each other requests")
    assert engine_files.continued(data)[0] == expected["tokens"]
    assert same(engine_files.snapshot_again(data), data)


def test_every_field_of_a_request() -> None:
    data = engine_files.UNREAD.read_bytes()
    about, _ = unpack(data)
    if about["format"] != FORMAT:
        pytest.skip("engines of other versions do not send each other requests")
    assert same(engine_files.snapshot_again(data), data)
    assert same(engine_files.full_snapshot().to_bytes(), data)
    found = RequestSnapshot.from_bytes(data)
    assert (found.request.client, found.request.params.max_tokens, found.ages.arrived) == ("anna", 9, 2.0)
    assert found.answers == engine_files.full_snapshot().answers
    said = json.loads(about["request"])
    own = {"prompt", "params", "cache", "known", "marks", "images"}  # stored in another place, or not at all
    assert said["request"].keys() == {one.name for one in fields(Request)} - own
    constraints = {"json_schema", "choice", "grammar", "structural_tag", "ignore_eos"}  # not beside `regex`
    assert said["params"].keys() == {one.name for one in fields(mp.SamplingParams)} - constraints
    assert said["marks"].keys() == {one.name for one in fields(mp.PromptMarks)}
    assert said["cache"].keys() == {one.name for one in fields(mp.CacheOptions)} - {"files"}
    answers = {name for answer in said["answers"] for name in answer}
    assert answers == {one.name for one in fields(CompletionSnapshot)} - {"tokens", "known"}
    assert said["ages"].keys() == {one.name for one in fields(Ages)}


def test_a_conversation(tmp_path: Path) -> None:
    shutil.copytree(DATA / "chats", tmp_path, dirs_exist_ok=True)
    assert chat(tmp_path) == [{"role": "user", "content": "old stone"}]


def test_all_kept_files_are_small() -> None:
    assert sum(path.stat().st_size for path in DATA.rglob("*") if path.is_file()) < 710_000
