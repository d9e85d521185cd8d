"""Requests that make room wait in files: the same tokens, and errors that say what to do."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

import millpond as mp
from millpond.cache import swap as swap_files
from millpond.engine.engine import Engine
from millpond.engine.outputs import RequestOutput
from millpond.engine.request import Request
from tests.helpers.engine.helpers import add, alone, engine_for, greedy, prompt, tokens
from tests.helpers.hf.families import shared_model

pytestmark = pytest.mark.filterwarnings("ignore::millpond.hf.layer_budgets.BudgetFloorWarning")
LENGTHS = (57, 40, 57, 31)


def crowded(folder: Path, method: str = "h2o") -> Engine:
    """An engine whose requests find room for about two of them."""
    engine = engine_for(method, kv_memory="28kB", overcommit=4, swap_to=folder)
    for i, length in enumerate(LENGTHS):
        add(engine, Request(request_id=str(i), prompt=prompt(length), params=greedy()))
    return engine


def files_in(folder: Path) -> list[Path]:
    return list(folder.rglob("*.safetensors"))


@pytest.mark.parametrize("method", ["h2o", "full", "d2o"])
def test_what_waits_in_files_goes_on_with_the_same_tokens(method: str, tmp_path: Path) -> None:
    engine = crowded(tmp_path, method)
    seen = 0
    done: dict[str, RequestOutput] = {}
    while engine.busy:
        done |= {out.request_id: out for out in engine.step() if out.finished}
        engine.check_integrity()
        assert len(files_in(tmp_path)) == engine.stats().swapped
        seen = max(seen, len(files_in(tmp_path)))
    assert seen > 0
    assert engine.stats().preemptions > 0
    for i, length in enumerate(LENGTHS):
        assert tokens(done[str(i)]) == alone(method, length)
    assert not files_in(tmp_path)
    engine.close()
    assert not list(tmp_path.iterdir())


def until_swapped(engine: Engine, folder: Path) -> None:
    while not files_in(folder):
        engine.step()


def test_cancelled_requests_leave_no_file(tmp_path: Path) -> None:
    engine = crowded(tmp_path)
    until_swapped(engine, tmp_path)
    for i in range(len(LENGTHS)):
        engine.cancel(str(i))
    assert not files_in(tmp_path)
    engine.drain()
    assert engine.stats().kv_reserved == 0
    engine.close()


def test_closing_removes_what_waits(tmp_path: Path) -> None:
    engine = crowded(tmp_path)
    until_swapped(engine, tmp_path)
    engine.close()
    assert not list(tmp_path.iterdir())


def ends(engine: Engine) -> dict[str, RequestOutput]:
    """What became of each request, with all pages checked."""
    done: dict[str, RequestOutput] = {}
    while engine.busy:
        done |= {out.request_id: out for out in engine.step() if out.finished}
        engine.check_integrity()
    assert engine.stats().kv_reserved == 0
    return done


def test_a_full_disk_ends_the_request_that_had_to_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(tensors: object, path: Path) -> None:
        path.write_bytes(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(swap_files, "save_file", full)
    engine = crowded(tmp_path)
    done = ends(engine)
    lost = [name for name, out in done.items() if out.error is not None]
    assert 0 < len(lost) < len(LENGTHS)
    for i, length in enumerate(LENGTHS):
        if str(i) not in lost:
            assert tokens(done[str(i)]) == alone("h2o", length)
    error = done[lost[0]].error
    assert isinstance(error, mp.errors.DataError)
    assert "No space left on device" in str(error)
    assert "swap_to" in str(error)
    assert not files_in(tmp_path)
    engine.close()


@pytest.mark.parametrize("harm", [Path.unlink, lambda path: path.write_bytes(b"not a file of tensors")])
def test_a_file_that_is_gone_or_broken_ends_its_request(harm: object, tmp_path: Path) -> None:
    engine = crowded(tmp_path)
    until_swapped(engine, tmp_path)
    for path in files_in(tmp_path):
        harm(path)  # type: ignore[operator]
    done = ends(engine)
    lost = {name: out for name, out in done.items() if out.error is not None}
    assert len(lost) == 1
    error = next(iter(lost.values())).error
    assert isinstance(error, mp.errors.DataError)
    assert "cannot be read" in str(error)
    for i, length in enumerate(LENGTHS):
        if str(i) not in lost:
            assert tokens(done[str(i)]) == alone("h2o", length)
    engine.close()


def test_a_folder_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(mp.errors.OptionError, match="is no folder: make it first"):
        Engine(shared_model("llama"), method="full", swap_to=tmp_path / "none")
    (tmp_path / "file").write_text("")
    with pytest.raises(mp.errors.OptionError, match="is no folder"):
        Engine(shared_model("llama"), method="full", swap_to=tmp_path / "file")


def test_a_folder_where_nothing_can_be_made_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**options: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(swap_files.tempfile, "mkdtemp", refuse)
    with pytest.raises(mp.errors.OptionError, match="no file can be made there"):
        Engine(shared_model("llama"), method="full", swap_to=tmp_path)


def test_only_the_owner_reads_the_folder(tmp_path: Path) -> None:
    files = swap_files.SwapFiles(tmp_path)
    assert stat.S_IMODE(files.folder.stat().st_mode) == 0o700
    files.close()


def test_llm_takes_a_folder(tmp_path: Path) -> None:
    with mp.LLM(shared_model("llama"), method="full", kv_memory="60kB", swap_to=tmp_path) as llm:
        (out,) = llm.generate([list(prompt(40))], greedy())
        assert list(out.completions[0].token_ids) == alone("full", 40)
        assert len(list(tmp_path.iterdir())) == 1
    assert not list(tmp_path.iterdir())
