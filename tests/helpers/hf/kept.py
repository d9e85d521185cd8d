"""Texts of tiny models of which a cache evicted something, stored in the codec `transform` and restored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import millpond as mp
from millpond.cache.serialization import to_tensors
from millpond.hf.document import read_document, restore_document, save_document
from millpond.hf.text_storage import TextStorage
from millpond.models.cache_argument import cache_argument
from tests.helpers.hf.transform import ids, tiny, transform_of_tiny

TEXT, QUESTION = ids(400, 7)[None], ids(24, 8)[None]
#: Methods that keep other tokens in each head, and some that keep the same ones.
APART: dict[str, dict[str, Any]] = {"kvzip": {"ask": "5;6", "across": False}, "snapkv": {}, "h2o": {}, "ada": {}}
TOGETHER: dict[str, dict[str, Any]] = {"window": {}, "tova": {}, "streaming": {"positions": "absolute"}}
METHODS = APART | TOGETHER
BUDGET = 240


class Found:
    """A cache's positions and numbers before a question, its predictions, and the positions behind them."""

    def __init__(self, model: Any, cache: Any) -> None:
        layers = cache.stats().entry_layers
        self.positions = [cache.positions(layer) for layer in layers]
        self.tensors = [to_tensors(layer_cache) for layer_cache in cache.layer_caches]
        cache.check_integrity()
        with torch.no_grad():
            logits: Tensor = model(QUESTION, **cache_argument(cache)).logits[0]
        self.said = logits.log_softmax(-1)
        self.behind = [cache.positions(layer) for layer in layers]


def store(
    method: str, path: Path, kind: str = "gqa", bits: float = 2.0, text: Tensor = TEXT, budget: int = BUDGET, **how: Any
) -> Found:
    """Store a text in codes, and beside it, under a name with `-plain`, as it is.

    how: the last `steps` of its tokens are read one by one; `options` are the method's, others those of the storage.
    """
    steps = how.pop("steps", 0)
    model, options = tiny(kind), METHODS[method] | how.pop("options", {})
    with torch.no_grad(), mp.compress(model, method, budget, "auto", **options) as cache:
        storage = TextStorage(cache, f"transform:{bits:g}", how.pop("transform", transform_of_tiny(kind)), **how)
        read_document(model, cache, text[:, : text.shape[1] - steps])
        if steps:
            read_document(model, cache, text[:, -steps:], chunk=1)
        save_document(cache, text, path, storage=storage)
        save_document(cache, text, path.with_name(f"{path.name}-plain"))
        return Found(model, cache)


def restored(path: Path, kind: str = "gqa", transform: Any = None) -> Found:
    cache, text = restore_document(tiny(kind), path, calibration=transform or transform_of_tiny(kind))
    with cache:
        assert cache.get_seq_length() == text.shape[1]
        return Found(tiny(kind), cache)


def kl(one: Found, other: Found) -> float:
    return float((one.said.exp() * (one.said - other.said)).sum(-1).mean())


def error(one: Found, other: Found) -> float:
    """The largest error of the keys or values of a layer, relative to their size (root of mean squares).

    Predictions of these models depend little on what a cache holds, so that they tell little of it.
    """
    return max(
        float((a[name] - b[name]).square().mean().sqrt() / a[name].square().mean().sqrt())
        for a, b in zip(one.tensors, other.tensors, strict=True)
        for name in ("keys", "values")
    )
