"""Kept documents: one for each part that a file of a compressed text may have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

import millpond as mp
from millpond.hf.document import checksum, document_note
from tests.helpers.formats.model import DATA, greedy, hybrid, ids, of_heads, sure

FOLDER = DATA / "documents"
#: In other words: files that methods and codecs read, which documents name relative to `DATA`.
GATE, CALIBRATION = "gate.safetensors", "calibration.safetensors"
NOTE = "a text of small numbers"
#: Tokens that are written behind the question.
NEW = 8


@dataclass(frozen=True)
class Document:
    """How one was written.

    Attributes:
        of: its model. length: tokens of its text, read 60 at a time. prepare, finish: of the cache, before and after.
    """

    of: Callable[[], PreTrainedModel]
    method: str
    budget: int | None = None
    codec: str = "bf16"
    options: dict[str, Any] = field(default_factory=dict)
    length: int = 40
    prepare: Callable[[mp.MillpondCache], None] = lambda cache: None
    finish: Callable[[mp.MillpondCache], None] = lambda cache: None


def _narrow() -> PreTrainedModel:
    return of_heads(8)


def _wide() -> PreTrainedModel:
    return of_heads(32, 1, 1)


def _with_shares(cache: mp.MillpondCache) -> None:
    cache.protect([(4, 7)])
    cache.protect([(8, 20), (20, 32)], share=0.5)


#: Between them they have every part of a file: see `test_documents_have_every_part`.
DOCUMENTS = {
    "full": Document(_narrow, "full", codec="auto", length=20),
    "marks": Document(_narrow, "h2o", 16, prepare=_with_shares, finish=lambda cache: cache.forget((24, 30))),
    "streaming": Document(_narrow, "streaming", 16),
    "gaps": Document(_narrow, "h2o", 16, options={"positions": "cache_relative"}, length=560),
    "window": Document(_narrow, "snapkv", 16, options={"window": 8}),
    "moments": Document(_narrow, "expected_attention", 16),
    "merging": Document(_narrow, "d2o", 16, options={"mass_bias": True}),
    "merged": Document(_narrow, "kvmerger", 16),
    "blocks": Document(
        _narrow, "infllm", 24, options={"sinks": 2, "block": 4, "local": 8, "representatives": 2}, length=48
    ),
    "gate": Document(_narrow, "attention_gate", 24, options={"gate": GATE}),
    "states": Document(hybrid, "h2o", 16),
    "rotated4": Document(_wide, "h2o", 72, "rotated4", length=110),
    "channels": Document(lambda: of_heads(48, 1, 1), "h2o", 70, "think", length=110),
    "mixed": Document(_wide, "h2o", 40, "mikv", length=110),
    "ages": Document(_wide, "full", codec="bf16:32,kivi4:32,kivi2", length=110),
    "calibrated": Document(_wide, "full", codec="kvquant4", options={"calibration": CALIBRATION}, length=110),
    "version-2": Document(_wide, "full", codec="rotated4_paper", length=110),
}


@torch.no_grad()
def write_documents() -> dict[str, Any]:
    """Write all of them, and say what `content` finds in each. The working folder is `DATA`."""
    FOLDER.mkdir(exist_ok=True)
    found: dict[str, Any] = {}
    for name, document in DOCUMENTS.items():
        call: Any = document.of()
        text = ids(document.length)
        with mp.compress(
            call, document.method, document.budget, document.codec, page_slots=8, **document.options
        ) as cache:
            document.prepare(cache)
            for begin in range(0, document.length, 60):
                call(text[:, begin : begin + 60], cache=cache)
            document.finish(cache)
            mp.save_document(cache, text, FOLDER / name, note=NOTE)
        if name == "version-2":
            _as_version_2(FOLDER / name)
        found[name] = sure(lambda question, name=name: content(name, question))
    return found


def _as_version_2(path: Path) -> None:
    """The file that the version before made of the same text: then `rotated4` was what `rotated4_paper` is now."""
    about, tensors = parts(path)
    about |= {"format": "millpond-document-2", "settings": about["settings"].replace("_paper", "")}
    about["checksum"] = checksum(about, tensors)
    save_file(tensors, path, about)


def parts(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """What a file says of itself, and its tensors."""
    with safe_open(path, "pt") as file:
        return dict(file.metadata() or {}), load_file(path)


@torch.no_grad()
def content(name: str, question: int, again: Path | None = None) -> tuple[dict[str, Any], float]:
    """What a kept document holds, and the least margin of the tokens behind it.

    question: seed of what is asked. again: where what was restored is saved once more.
    """
    of = DOCUMENTS[name].of()
    cache, text = mp.restore_document(of, FOLDER / name)
    with cache:
        if again is not None:
            mp.save_document(cache, text, again, note=document_note(FOLDER / name))
        stats = cache.stats()
        found = {
            "question": question,
            "note": document_note(FOLDER / name),
            "ids": text[0].tolist(),
            "stored": stats.stored,
            "kv_bytes": stats.kv_bytes,
            "formats": stats.layer_formats,
            "state_bytes": stats.state_bytes,
            "positions": [cache.positions(layer) for layer in stats.entry_layers],
        }
        found["tokens"], margin = greedy(of, torch.cat([text, ids(5, question)], 1), NEW, cache)
    return found, margin
