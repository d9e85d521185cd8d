"""A trained model that nobody here made: stories260K, from the data beside the checkout (skipped without it)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import millpond as mp

FOLDER = Path(__file__).parents[3] / "shared" / "data" / "models" / "stories260k"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="the stories260k model does not lie beside the checkout")

PROMPT = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park."


def test_greedy_text_equals_stock_and_goes_on_inside_a_budget() -> None:
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    inputs.pop("token_type_ids", None)
    length = inputs["input_ids"].shape[1]
    settings = {"max_new_tokens": 120, "do_sample": False}
    stock = model.generate(**inputs, **settings)
    with mp.compress(model, method="full") as cache:
        assert model.generate(**inputs, cache=cache, **settings).tolist() == stock.tolist()
    with mp.compress(model, method="h2o", budget=length) as cache:
        out = model.generate(**inputs, cache=cache, **settings)
        assert all(n == length for layer in cache.stats().stored for heads in layer for n in heads)
    assert out[0, : length + 1].tolist() == stock[0, : length + 1].tolist()
    assert "Lily" in tokenizer.decode(out[0, length:])
