"""The kept texts, turn and request in the codec `transform`, and the transform files that they were written with."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

import millpond as mp
from millpond.cache.coded.kept_tensors import KeptDecoder
from millpond.cache.coded.text import unit_of
from millpond.codec.transform.coding import decode
from millpond.codec.transform.page import PageAddress
from millpond.codec.transform.prompt_header import LayerHeader, SideHeader
from millpond.codec.transform.transform_file import load_transform
from millpond.engine.request import Request
from tests.helpers.formats.documents import NEW, parts
from tests.helpers.formats.engine_files import answer, asked
from tests.helpers.formats.model import DATA, greedy, ids, of_heads, prompt

FOLDER = DATA / "coded"
TRANSFORM, TEXT = FOLDER / "transform.safetensors", FOLDER / "text"
#: A transform file with parts for single heads, and a text whose heads hold other tokens each.
WITH_HEADS, KEPT = FOLDER / "transform-2.safetensors", FOLDER / "text-kept"
SESSIONS, UNDER_WAY = FOLDER / "sessions", FOLDER / "request-under-way"
LENGTH = 170
#: Of the text whose heads hold other tokens each, so long that some have a header of their own.
KEPT_LENGTH = 270
#: Tokens of the prompts of the turn and the request, of which enough are coded for a header of their own.
TURN = 240
OPTIONS: dict[str, Any] = {
    "method": "full",
    "codec": "auto",
    "storage_codec": "transform:1.5",
    "calibration": TRANSFORM,
    "prefix_cache": False,
}


@torch.no_grad()
def write_coded() -> None:
    """Write both."""
    FOLDER.mkdir(exist_ok=True)
    call: Any = of_heads(8)
    transform = mp.calibrate_transform(call, [ids(400, seed)[0] for seed in range(20, 23)], most_bits=2.5)
    transform.save(TRANSFORM)
    text = ids(LENGTH)
    with mp.compress(call, "full") as cache:
        storage = mp.TextStorage(cache, "transform:1.5", TRANSFORM)
        call(text, cache=cache)
        mp.save_document(cache, text, TEXT, storage=storage)


@torch.no_grad()
def coded_content(question: int) -> tuple[dict[str, Any], float]:
    """What the text holds: digests of the numbers before RoPE as torch decodes them, which are equal bits on every
    machine, and tokens behind a question, with their least margin."""
    call: Any = of_heads(8)
    about, stored = parts(TEXT)
    transform, found = load_transform(TRANSFORM), []
    for nth, layer in enumerate(transform.layers):
        headers = [
            SideHeader.from_bytes(stored[f"{nth}.{name}_header"], side.n_rows, torch.device("cpu"))
            for name, side in zip(("key", "value"), layer, strict=True)
        ]
        address = PageAddress(unit_of(stored["ids"]), nth)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MILLPOND_KERNELS", "reference")
            numbers = decode(layer, LayerHeader(*headers), stored[f"{nth}.pages"], address)
        kernels = decode(layer, LayerHeader(*headers), stored[f"{nth}.pages"], address)
        for one, other in zip(kernels, numbers, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5 * float(other.abs().max()))
        found.append([hashlib.sha256(side.numpy().tobytes()).hexdigest() for side in numbers])
    cache, text = mp.restore_document(call, TEXT, calibration=TRANSFORM)
    with cache:
        tokens, margin = greedy(call, torch.cat([text, ids(5, question)], 1), NEW, cache)
    return {"question": question, "codec": about["storage"], "decoded": found, "tokens": tokens}, margin


@torch.no_grad()
def write_kept() -> None:
    """Write the text whose heads hold other tokens each, and its transform file."""
    call: Any = of_heads(8)
    transform = mp.calibrate_transform(call, [ids(400, seed)[0] for seed in range(20, 23)], most_bits=2.5)
    transform.save(WITH_HEADS)
    text = ids(KEPT_LENGTH)
    with mp.compress(call, "ada", 170, "auto", page_slots=8) as cache:
        storage = mp.TextStorage(cache, "transform:1.5", WITH_HEADS)
        call(text, cache=cache)
        mp.save_document(cache, text, KEPT, storage=storage)


@torch.no_grad()
def kept_content(question: int) -> tuple[dict[str, Any], float]:
    """What the text holds: where, digests of the numbers without RoPE as torch decodes them, which are equal bits on
    every machine, and tokens behind a question, with their least margin."""
    call: Any = of_heads(8)
    about, stored = parts(KEPT)
    transform, found = load_transform(WITH_HEADS), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MILLPOND_KERNELS", "reference")
        decoder = KeptDecoder(
            transform,
            1.5,
            [None] * len(transform.layers),
            KEPT_LENGTH,
            unit_of(stored["ids"]),
            torch.float32,
            torch.device("cpu"),
        )
        for nth in range(len(transform.layers)):
            own = {name.removeprefix(f"{nth}."): t for name, t in stored.items() if name.startswith(f"{nth}.")}
            layer = decoder.layer(nth, own)
            found.append([hashlib.sha256(layer[name].numpy().tobytes()).hexdigest() for name in ("keys", "values")])
    cache, text = mp.restore_document(call, KEPT, calibration=WITH_HEADS)
    with cache:
        positions = [cache.positions(layer) for layer in cache.stats().entry_layers]
        tokens, margin = greedy(call, torch.cat([text, ids(5, question)], 1), NEW, cache)
    said = {"question": question, "codec": about["storage"], "format": about["format"], "positions": positions}
    return said | {"decoded": found, "tokens": tokens}, margin


def write_coded_turn() -> list[int]:
    """Write a folder with one turn, and say what it answers."""
    shutil.rmtree(SESSIONS, ignore_errors=True)
    SESSIONS.mkdir()
    (SESSIONS / "secret").write_bytes(bytes(range(32)))
    with mp.LLM(of_heads(8), cache_dir=SESSIONS, **OPTIONS) as llm:
        said, _ = answer(llm.generate([prompt(TURN)], asked())[0])
        assert llm.sessions is not None
        assert llm.sessions.wait(60)
    (SESSIONS / "lock").unlink()
    return said


def second_coded_turn(said: Sequence[int], question: int) -> tuple[dict[str, Any], float]:
    """What follows the turn, of a copy of its folder, how many tokens were not read again, and the least margin."""
    with TemporaryDirectory() as folder:
        shutil.copytree(SESSIONS, folder, dirs_exist_ok=True)
        with mp.LLM(of_heads(8), cache_dir=Path(folder), **OPTIONS) as llm:
            (output,) = llm.generate([[*prompt(TURN), *said, *prompt(6, question)]], asked())
    tokens, margin = answer(output)
    kv = output.completions[0].kv
    assert kv is not None
    return {"question": question, "said": list(said), "restored": kv.restored_tokens, "tokens": tokens}, margin


def write_coded_request(question: int) -> tuple[dict[str, Any], float]:
    """Write a request with three tokens of its answer, and say what it answers, with the least margin."""
    with mp.LLM(of_heads(8), **OPTIONS) as llm:
        llm.engine.add(Request(request_id="kept", prompt=tuple(prompt(TURN, question)), params=asked()))
        tokens: Sequence[int] = ()
        while len(tokens) < 3:
            for output in llm.engine.step():
                tokens = output.completions[0].token_ids
        UNDER_WAY.write_bytes(llm.engine.export_request("kept"))
    found, margin = continued_from_codes(UNDER_WAY.read_bytes())
    return {"question": question, "tokens": found}, margin


def continued_from_codes(data: bytes) -> tuple[list[int], float]:
    """The whole answer of a request that goes on in another engine, and its least margin."""
    with mp.LLM(of_heads(8), **OPTIONS) as llm:
        llm.engine.import_request(data)
        (output,) = [output for output in llm.engine.drain() if output.finished]
    return answer(output)
