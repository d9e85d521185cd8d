"""Chunks in a folder: broken files, and a folder of another model."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from millpond.cache.chunks.store import ChunkStore
from millpond.engine.engine import Engine
from millpond.errors import OptionError
from tests.helpers.engine.chunked import PROMPTS, A, B, ask, close, engine
from tests.helpers.hf.families import family

pytestmark = pytest.mark.filterwarnings("ignore::millpond.hf.layer_budgets.BudgetFloorWarning")


def test_broken_files_give_no_wrong_token_and_fail_no_request(tmp_path: Path) -> None:
    def opened() -> Engine:
        return engine(store=ChunkStore(tmp_path / "chunks", memory=1))

    of = opened()
    plain = ask(of, PROMPTS["ab"])
    of.close()
    of = opened()
    again = ask(of, PROMPTS["ab"])
    assert again.completions[0].kv.reused_tokens == len(A) + len(B)
    assert close(again, plain)
    for path in (tmp_path / "chunks").glob("??/*/*"):
        data = bytearray(path.read_bytes())
        data[-9] ^= 1
        path.write_bytes(data)
    broken = ask(of, PROMPTS["ab"])
    assert close(broken, plain)
    assert broken.completions[0].kv.reused_tokens == 0
    assert of.stats().chunks is not None
    assert of.stats().chunks.torn == 2
    shutil.rmtree(tmp_path / "chunks")
    assert close(ask(of, PROMPTS["ab"]), plain)
    of.close()


def test_a_folder_is_of_one_model(tmp_path: Path) -> None:
    engine(store=ChunkStore(tmp_path)).close()
    with pytest.raises(OptionError, match="holds chunks of another model"):
        engine("qwen3", store=ChunkStore(tmp_path))
    changed = family("llama").make()
    with torch.no_grad():
        next(changed.parameters())[0, 0] += 1
    with pytest.raises(OptionError, match="holds chunks of another model"):
        Engine(changed, method="full", chunk_store=ChunkStore(tmp_path))
