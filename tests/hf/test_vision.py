"""Vision-language models on pictures that their image processors prepared: as stock at a full budget, small in less."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from torch import Tensor
from transformers import CLIPImageProcessorPil, PreTrainedModel, Qwen2VLImageProcessorPil

import millpond as mp
from millpond.errors import CacheMismatchError, UnsupportedModelError
from tests.helpers.hf.families import COMMON, generate, one, run, shared_model, tiny_llava

IMAGE, VIDEO, START, END = 2, 3, 4, 5
NO_IMAGES = {"suppress_tokens": [IMAGE, VIDEO, START, END]}  # a random model would write them
NAMES = ["llava", "qwen2_vl", "qwen3_vl"]
METHODS: dict[str, dict[str, Any]] = {
    "elastic": {"distance": -6},
    "sirllm": {"recent": 3},
    "h2o": {},
    "snapkv": {"window": 4},
}


def picture(width: int, height: int, seed: int) -> Image.Image:
    """A gradient with a bright square and some noise."""
    make = np.random.default_rng(seed)
    pixels = np.zeros((height, width, 3))
    pixels[..., 0] = np.linspace(0, 255, width)
    pixels[..., 1] = np.linspace(255, 0, height)[:, None]
    pixels[height // 4 : height // 2, width // 4 : width // 2] = 250
    return Image.fromarray(np.clip(pixels + make.normal(0, 20, pixels.shape), 0, 255).astype(np.uint8))


@cache
def vision_model(name: str) -> PreTrainedModel:
    if name == "llava":
        return tiny_llava()
    torch.manual_seed(7)
    common = {k: v for k, v in COMMON.items() if k not in ("attn_implementation", "tie_word_embeddings")}
    text = common | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}}
    vision: dict[str, Any] = {"depth": 1, "num_heads": 2, "patch_size": 4}
    vision |= {"spatial_merge_size": 2, "temporal_patch_size": 2}
    ids = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}
    if name == "qwen2_vl":
        vision |= {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}
        config: Any = transformers.Qwen2VLConfig(text_config=text, vision_config=vision, **ids)
        kind: Any = transformers.Qwen2VLForConditionalGeneration
    else:
        vision |= {
            "hidden_size": 16,
            "intermediate_size": 16,
            "out_hidden_size": 32,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        }
        text |= {"head_dim": 8}
        config = transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **ids)
        kind = transformers.Qwen3VLForConditionalGeneration
    made: PreTrainedModel = kind._from_config(config, attn_implementation="sdpa").eval()
    return made


@cache
def prompt(name: str, batch: int = 1) -> dict[str, Tensor]:
    """Text, the tokens of two pictures of different size in each row, text; rows differ in length."""
    pictures = [picture(24 + 8 * i, 16, seed=i) for i in range(2 * batch)]
    if name == "llava":
        processor = CLIPImageProcessorPil(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8})
        inputs = {"pixel_values": processor(pictures, return_tensors="pt")["pixel_values"]}
        counts = [4] * len(pictures)
    else:
        processor = Qwen2VLImageProcessorPil(patch_size=4, size={"shortest_edge": 64, "longest_edge": 1024})
        inputs = dict(processor(pictures, return_tensors="pt"))
        counts = [int(grid.prod()) // 4 for grid in inputs["image_grid_thw"]]
    make = torch.Generator().manual_seed(1)
    rows = []
    for row in range(batch):
        words = torch.randint(6, 96, (14 + 5 * row,), generator=make).tolist()
        first, second = ([START, *[IMAGE] * n, END] for n in counts[2 * row : 2 * row + 2])
        rows.append([*words[:3], *first, *words[3:6], *second, *words[6:]])
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    inputs |= {"input_ids": ids, "attention_mask": (ids != 0).long()}
    if name != "llava":
        inputs["mm_token_type_ids"] = (ids == IMAGE).int()
    return inputs


def images_in(ids: Tensor) -> list[int]:
    return (ids == IMAGE).sum(1).tolist()


@pytest.mark.covering
@pytest.mark.parametrize("method", ["full", *METHODS])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_a_full_budget_equals_stock(name: str, batch: int, method: str) -> None:
    model, inputs = vision_model(name), prompt(name, batch)
    expected = run(model, inputs, 12, **NO_IMAGES)
    options = {} if method == "full" else {"budget": 300, **METHODS[method]}
    with mp.compress(model, method, **options) as cache:
        found = run(model, inputs, 12, cache=cache, **NO_IMAGES)
        seen = images_in(inputs["input_ids"])
        assert cache.image_tokens().seen == seen
        assert cache.image_tokens().stored == [[[n] * 2 for n in seen]] * 2
    assert torch.equal(found.ids, expected.ids)
    torch.testing.assert_close(found.logits, expected.logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", NAMES)
def test_a_small_budget(name: str, method: str) -> None:
    """Pictures change what is written; image tokens leave like others, and what is left of them is counted."""
    model, inputs = vision_model(name), prompt(name, 2)
    with mp.compress(model, method, "30%", **METHODS[method]) as cache:
        generate(model, inputs, 10, cache=cache, **NO_IMAGES)
        left, n = cache.image_tokens(), inputs["attention_mask"].sum(1).tolist()
        for layer, stored in enumerate(left.stored):
            for s in (0, 1):
                own = inputs["input_ids"][s, inputs["attention_mask"][s].bool()].tolist()
                for head, count in zip(cache.positions(layer, s), stored[s], strict=True):
                    assert count == sum(own[p] == IMAGE for p in head if p < n[s])
        assert left.seen == images_in(inputs["input_ids"])
        assert any(count < left.seen[s] for stored in left.stored for s in (0, 1) for count in stored[s])
        seen = cache.stats().seen
        grown = {"elastic": [int(0.3 * m + 0.5) for m in seen], "snapkv": [int(0.3 * m + 0.5) + 9 for m in n]}
        expected = grown.get(method, [int(0.3 * m + 0.5) for m in n])
        assert [[len(h) for h in cache.positions(1, s)] for s in (0, 1)] == [[m] * 2 for m in expected]
        cache.check_integrity()


@pytest.mark.parametrize("name", NAMES)
def test_elastic_takes_image_tokens_in_by_the_text(name: str) -> None:
    """The entries after a prompt with pictures are the means of buckets of a full cache, per layer."""
    model, inputs = vision_model(name), prompt(name)
    with torch.no_grad():
        with mp.compress(model, "full") as cache:
            first = model(**inputs, cache=cache).logits[:, -1]
            whole = [layer_cache.read(0).keys for layer_cache in cache.layer_caches]
        with mp.compress(model, "elastic", 12) as cache:
            again = model(**inputs, cache=cache).logits[:, -1]
            for layer_cache, keys in zip(cache.layer_caches, whole, strict=True):
                held = layer_cache.read(0)
                _, *anchors, newest = held.positions[0].tolist()
                assert newest == keys.shape[1] - 1
                nearest = [min(anchors, key=lambda a: (abs(a - j), a)) for j in range(1, newest)]
                for place, anchor in enumerate(anchors, 1):
                    bucket = [j for j, a in enumerate(nearest, 1) if a == anchor]
                    torch.testing.assert_close(held.keys[:, place], keys[:, bucket].mean(1), atol=1e-5, rtol=0)
    torch.testing.assert_close(again, first, atol=1e-5, rtol=0)


def test_image_tokens_of_what_has_none() -> None:
    model, prompt_ = shared_model("llama"), one(9)
    with torch.no_grad(), mp.compress(model, "h2o", 8) as cache:
        model(**prompt_, cache=cache)
        with pytest.raises(UnsupportedModelError, match="names no image tokens"):
            cache.image_tokens()
    model = vision_model("llava")
    with torch.no_grad(), mp.compress(model, "h2o", 8) as cache:
        model(inputs_embeds=model.get_input_embeddings()(prompt_["input_ids"]), cache=cache)
        with pytest.raises(CacheMismatchError, match="pass input_ids"):
            cache.image_tokens()
