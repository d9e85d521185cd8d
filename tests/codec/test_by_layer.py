"""Number formats by layer: what a text names, what each layer then holds, and what is refused."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

import millpond as mp
from millpond.codec import CodecSpec, LayerCodecs, codec_named, codec_text, resolve
from millpond.engine.engine import Engine
from millpond.engine.request import CacheOptions, Request
from millpond.errors import BudgetError, OptionError
from millpond.hf.document import restore_document, save_document
from tests.helpers.engine.helpers import finish, greedy
from tests.helpers.hf.families import family, generate, text

LENGTH, NEW = 150, 24


@cache
def model() -> Any:
    return family("llama").make(head_dim=64, hidden_size=128, num_hidden_layers=3, max_position_embeddings=512)


def prompt() -> torch.Tensor:
    return text(1, LENGTH, seed=3)


def answer(codec: CodecSpec, method: str = "full", budget: str | None = None) -> tuple[list[int], mp.CacheStats]:
    ids = prompt()
    with mp.compress(model(), method, budget, codec) as kept:
        out = generate(model(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, NEW, cache=kept)
        kept.check_integrity()
        return out[0, LENGTH:].tolist(), kept.stats()


@pytest.mark.parametrize(
    ("given", "formats"),
    [
        ("0-1=bf16,*=int4", [torch.bfloat16, torch.bfloat16, codec_named("int4")]),
        ("*=int4; 1 = int8+bf16", [codec_named("int4"), codec_named(("int8", "bf16")), codec_named("int4")]),
        ({"0": "auto", "1-2": ("int8", "int4")}, [None, *[codec_named(("int8", "int4"))] * 2]),
    ],
)
def test_what_each_layer_is_stored_as(given: CodecSpec, formats: list[Any]) -> None:
    found = resolve(given)
    assert isinstance(found, LayerCodecs)
    found.check_layers(3)
    assert [found.of(layer) for layer in range(3)] == formats
    assert resolve(found.name) == found


def test_one_format_for_all_is_that_format() -> None:
    assert resolve({"*": "int4"}) == resolve("int4")
    assert codec_text({"0-1": "bf16", "*": ("int8", "int4")}) == "0-1=bf16,*=int8+int4"


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ("0=int4,0-2=int8", "gives layer 0 two formats"),
        ("2-1=int4", "ends before it begins"),
        ("first=int4", "'first' is no layer"),
        ("-1=int4", "'-1' is no layer"),
        (f"{'9' * 5000}=int4", "is no layer"),
        ("0=int5", "unknown codec 'int5'; did you mean"),
        ("*=int4,*=int8", "twice"),
        ("int8,0=int4", "'int8' names no layers"),
        ({}, "names no format"),
        ({0: "int4"}, "is no layer range"),
        ({"0": 4}, "is no layer range"),
    ],
)
def test_what_is_refused(given: Any, match: str) -> None:
    with pytest.raises(OptionError, match=match):
        resolve(given)


@pytest.mark.parametrize(
    ("given", "match"), [("3=int4,*=bf16", "layers 0 to 2"), ("0=int4,2=int8", "layer 1 of 3 no format")]
)
def test_layers_that_the_model_lacks_or_that_no_one_names(given: str, match: str) -> None:
    with pytest.raises(OptionError, match=match):
        mp.compress(model(), "full", codec=given)
    with pytest.raises(OptionError, match=match):
        Engine(model(), method="full", codec=given).close()


def test_a_method_refuses_what_any_layer_has() -> None:
    with pytest.raises(OptionError, match="merges into stored entries"):
        mp.compress(model(), "d2o", "30%", "2=int4,*=bf16")
    with pytest.raises(OptionError, match="merges into stored entries"):
        Engine(model(), method="d2o", budget="30%", codec="2=int4,*=bf16").close()


def test_bytes_that_layers_compete_for_have_one_size() -> None:
    with pytest.raises(BudgetError, match="different sizes"):
        mp.compress(model(), "d2o", "200kB", "0=int4,*=bf16", decode="grow")


@pytest.mark.parametrize(("method", "budget"), [("full", None), ("h2o", "60%")])
def test_all_layers_named_alike_equal_one_codec(method: str, budget: str | None) -> None:
    named, plain = answer("0=int4,1-2=int4", method, budget), answer("int4", method, budget)
    assert named == plain


def test_bytes_and_formats_are_counted_by_layer() -> None:
    (_, mixed), (_, plain), (_, coded) = answer("0=f32,*=int4"), answer("auto"), answer("int4")
    assert mixed.layer_formats == ["float32", "int4", "int4"]
    assert mixed.layer_kv_bytes == [plain.layer_kv_bytes[0], *coded.layer_kv_bytes[1:]]
    assert sum(mixed.layer_kv_bytes) == mixed.kv_bytes
    assert coded.layer_kv_bytes[0] < plain.layer_kv_bytes[0]


def test_each_layer_holds_what_its_own_codec_makes_of_it() -> None:
    """The first layer's entries do not depend on the others', so they are those of a cache in its format alone."""
    held = {}
    for codec in ("0=int4,*=int8", "int4", "int8"):
        with torch.no_grad(), mp.compress(model(), "full", codec=codec) as kept:
            model()(prompt(), cache=kept)
            held[codec] = [layer_cache.read(0) for layer_cache in kept.layer_caches]
    mixed = held["0=int4,*=int8"]
    assert torch.equal(mixed[0].keys, held["int4"][0].keys)
    assert not torch.equal(mixed[0].keys, held["int8"][0].keys)
    for layer in (1, 2):  # a prompt attends to what it computes, so these do not depend on codes either
        assert torch.equal(mixed[layer].values, held["int8"][layer].values)


def test_a_document_keeps_its_formats(tmp_path: Any) -> None:
    codec = {"0": "bf16", "*": "int4"}
    ids = prompt()
    with torch.no_grad(), mp.compress(model(), "h2o", "60%", codec) as kept:
        model()(ids, cache=kept)
        save_document(kept, ids, tmp_path / "doc.safetensors")
        expected = model()(ids[:, :1], cache=kept).logits
    again, known = restore_document(model(), tmp_path / "doc.safetensors")
    with torch.no_grad(), again:
        assert torch.equal(known, ids)
        assert again.stats().layer_formats == ["bfloat16", "int4", "int4"]
        torch.testing.assert_close(model()(ids[:, :1], cache=again).logits, expected)


def test_a_request_chooses_formats_by_layer() -> None:
    engine = Engine(model(), method="full", kv_memory="8MB")
    for name, codec in (("mapping", {"0": "int8", "*": "int4"}), ("text", "0=int8,*=int4"), ("one", "int4")):
        engine.add(
            Request(
                request_id=name, prompt=tuple(prompt()[0].tolist()), params=greedy(NEW), cache=CacheOptions(codec=codec)
            )
        )
    done = finish(engine)
    engine.close()
    found = {name: done[name].completions[0] for name in ("mapping", "text", "one")}
    assert found["mapping"].token_ids == found["text"].token_ids == tuple(answer("0=int8,*=int4")[0])
    bytes_of = {name: one.kv.kv_bytes for name, one in found.items() if one.kv is not None}
    assert bytes_of["mapping"] == bytes_of["text"] > bytes_of["one"]


def test_prompts_share_their_beginnings_in_the_format_of_each_layer() -> None:
    engine = Engine(model(), method="full", codec="0=bf16,*=int4", prefix_cache=True)
    alike = [("first", 0), ("other", 7)]
    for name, last in alike:
        ids = [*prompt()[0].tolist()[:-1], last]
        engine.add(Request(request_id=name, prompt=tuple(ids), params=greedy(NEW)))
        found = engine.drain()[0].completions[0]
        engine.check_integrity()
        shared = 0 if found.kv is None else found.kv.shared_tokens
        assert (shared > LENGTH // 2) == (name == "other")
        alone = Engine(model(), method="full", codec="0=bf16,*=int4")
        alone.add(Request(request_id=name, prompt=tuple(ids), params=greedy(NEW)))
        assert finish(alone)[name].completions[0].token_ids == found.token_ids
        alone.close()
    engine.close()
