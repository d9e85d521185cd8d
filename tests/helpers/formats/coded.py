"""The kept text in the codec `transform`, and the transform file that it was written with."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

import millpond as mp
from millpond.cache.coded.text import unit_of
from millpond.codec.transform.coding import decode
from millpond.codec.transform.page import PageAddress
from millpond.codec.transform.prompt_header import LayerHeader, SideHeader
from millpond.codec.transform.transform_file import load_transform
from tests.helpers.formats.documents import NEW, parts
from tests.helpers.formats.model import DATA, greedy, ids, of_heads

FOLDER = DATA / "coded"
TRANSFORM, TEXT = FOLDER / "transform.safetensors", FOLDER / "text"
LENGTH = 170


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
    """What the text holds: digests of the decoded numbers before RoPE, which are equal bit by bit on every machine, and
    tokens behind a question, with their least margin."""
    call: Any = of_heads(8)
    about, stored = parts(TEXT)
    transform, found = load_transform(TRANSFORM), []
    for nth, layer in enumerate(transform.layers):
        headers = [
            SideHeader.from_bytes(stored[f"{nth}.{name}_header"], side.n_rows, torch.device("cpu"))
            for name, side in zip(("key", "value"), layer, strict=True)
        ]
        address = PageAddress(unit_of(stored["ids"]), nth)
        numbers = decode(layer, LayerHeader(*headers), stored[f"{nth}.pages"], address)
        found.append([hashlib.sha256(side.numpy().tobytes()).hexdigest() for side in numbers])
    cache, text = mp.restore_document(call, TEXT, calibration=TRANSFORM)
    with cache:
        tokens, margin = greedy(call, torch.cat([text, ids(5, question)], 1), NEW, cache)
    return {"question": question, "codec": about["storage"], "decoded": found, "tokens": tokens}, margin
