"""Images in the engine: as `generate` reads them, in methods, in parts, and in prompts that begin alike."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import millpond as mp
from millpond.engine.engine import Engine
from millpond.engine.request import Request
from millpond.engine.shared_codes import SharedCodes
from millpond.errors import ImageError, OptionError, UnsupportedModelError
from millpond.images.picture import Picture
from tests.helpers.engine.helpers import finish, greedy
from tests.helpers.hf.families import generate, shared_model
from tests.helpers.images import N_TOKENS, TEXTS, TOKEN, image_url, processor, reader, vision_tokenizer
from tests.hf.test_vision import IMAGE, NO_IMAGES, picture, prompt, vision_model

NO_MARKS = {i: -100.0 for i in NO_IMAGES["suppress_tokens"]}
NEW = 10


@cache
def pictures(*seeds: int) -> tuple[Picture, ...]:
    return tuple(reader().read(picture(24, 16, seed)) for seed in seeds)


def vision_engine(**options: Any) -> Engine:
    return Engine(vision_model("llava"), **{"max_step_tokens": 16, "page_slots": 4} | options)


def request(name: str, ids: list[int], images: tuple[Picture, ...], **rest: Any) -> Request:
    params = greedy(NEW, logit_bias=NO_MARKS)
    return Request(request_id=name, prompt=tuple(ids), images=images, params=params, **rest)


def with_images(*parts: list[int] | None) -> list[int]:
    """Token ids with the tokens of an image for each None."""
    return [i for part in parts for i in ([IMAGE] * N_TOKENS if part is None else part)]


def alone(ids: list[int], images: tuple[Picture, ...], cache: Any = None) -> list[int]:
    tokens = torch.tensor([ids])
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    inputs |= {"pixel_values": torch.stack([one.pixels for one in images])} if images else {}
    out = generate(vision_model("llava"), inputs, NEW, cache=cache, **NO_IMAGES)
    return [int(i) for i in out[0, len(ids) :]]


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = vision_engine(prefix_cache=True, method="full")
    yield made
    made.close()


@pytest.mark.parametrize("runner", ["lean", "modules"])
@pytest.mark.parametrize("step_tokens", [7, 64])
def test_answers_are_those_of_generate(runner: str, step_tokens: int) -> None:
    """Steps of seven tokens cut both images; a text and another order of the images are in the same passes."""
    inputs = prompt("llava")
    ids, images = inputs["input_ids"][0].tolist(), tuple(map(Picture, inputs["pixel_values"]))
    asked = {"a": (ids, images), "b": (ids, images[::-1]), "text": ([i for i in ids if i != IMAGE], ())}
    engine = vision_engine(method="full", runner=runner, max_step_tokens=step_tokens)
    for name, (tokens, pixels) in asked.items():
        engine.add(request(name, tokens, pixels))
    found = {name: list(out.completions[0].token_ids) for name, out in finish(engine).items()}
    assert found == {name: alone(*prompt_) for name, prompt_ in asked.items()}
    assert found["a"] != found["b"]
    engine.close()


@pytest.mark.parametrize("method", ["elastic", "h2o", "snapkv"])
def test_methods_on_images_are_those_of_compress(method: str) -> None:
    inputs = prompt("llava")
    ids, images = inputs["input_ids"][0].tolist(), tuple(map(Picture, inputs["pixel_values"]))
    options: dict[str, Any] = {"elastic": {"distance": -6}, "snapkv": {"window": 4}}.get(method, {})
    engine = vision_engine(method=method, budget=12, options=options)
    engine.add(request("a", ids, images))
    (out,) = finish(engine).values()
    engine.close()
    with mp.compress(vision_model("llava"), method, 12, **options) as kept:
        expected = alone(ids, images, cache=kept)
    assert list(out.completions[0].token_ids) == expected
    assert out.completions[0].kv is not None
    assert out.completions[0].kv.held < len(ids)


HEAD, TAIL = list(range(10, 18)), list(range(40, 50))


def test_two_images_never_share_a_prefix_and_equal_ones_do(engine: Engine) -> None:
    """Their token ids are the same, and only the text before the image is shared with another image."""
    ids = with_images(HEAD, None, TAIL)
    whole = len(ids) - 2  # blocks of four, without the last token
    shared = {}
    for name, images in {"first": (1,), "other": (2,), "again": (1,), "other again": (2,)}.items():
        engine.add(request(name, ids, pictures(*images)))
        out = finish_kept(engine)[name]
        assert list(out.completions[0].token_ids) == alone(ids, pictures(*images))
        shared[name] = out.completions[0].kv.shared_tokens
    assert shared == {"first": 0, "other": len(HEAD), "again": whole, "other again": whole}


def test_the_order_of_images_counts(engine: Engine) -> None:
    ids = with_images(HEAD, None, None, TAIL)
    shared = {}
    for name, images in {"ab": (1, 2), "ba": (2, 1), "aa": (1, 1), "ab again": (1, 2)}.items():
        engine.add(request(name, ids, pictures(*images)))
        out = finish_kept(engine)[name]
        assert list(out.completions[0].token_ids) == alone(ids, pictures(*images))
        shared[name] = out.completions[0].kv.shared_tokens
    head = len(HEAD)
    assert shared == {"ab": 0, "ba": head, "aa": head + N_TOKENS, "ab again": len(ids) - 2}


def test_a_text_and_an_image_share_the_text_before_it(engine: Engine) -> None:
    engine.add(request("text", HEAD + TAIL, ()))
    finish_kept(engine)
    engine.add(request("image", with_images(HEAD, None, TAIL), pictures(1)))
    assert finish_kept(engine)["image"].completions[0].kv.shared_tokens == len(HEAD)


def finish_kept(engine: Engine) -> dict[str, Any]:
    return {output.request_id: output for output in engine.drain()}


def test_a_planned_batch_reads_a_common_image_once() -> None:
    """The trunk holds the image that two prompts have in common, and nothing of another one."""
    engine = vision_engine(method="full", max_step_tokens=64)
    asked = {
        "a": (with_images(HEAD, *[None] * 16, [50, *TAIL]), pictures(1) * 16),
        "b": (with_images(HEAD, *[None] * 16, [60, *TAIL]), pictures(1) * 16),
        "c": (with_images(HEAD, *[None] * 16, [60, *TAIL]), pictures(2) * 16),
    }
    engine.add_batch([request(name, *one) for name, one in asked.items()])
    found = {output.request_id: output for output in engine.drain()}
    assert {name: list(found[name].completions[0].token_ids) for name in asked} == {
        name: alone(*one) for name, one in asked.items()
    }
    saved = [found[name].completions[0].kv.shared_tokens for name in asked]
    assert saved == [len(HEAD) + 16 * N_TOKENS] * 2 + [len(HEAD)]
    engine.close()


def test_what_does_not_fit_together(engine: Engine) -> None:
    ids = with_images(HEAD, None, TAIL)
    for wrong, images in ((ids, ()), (ids, pictures(1, 2)), (HEAD, pictures(1)), ([*ids, IMAGE], pictures(1))):
        with pytest.raises(ImageError, match="image tokens"):
            engine.add(request("a", wrong, images))
    with pytest.raises(ImageError, match="own image processor"):
        engine.add(request("a", ids, (Picture(torch.zeros(3, 16, 16)),)))
    text_model = Engine(shared_model("llama"))
    with pytest.raises(ImageError, match="text alone"):
        text_model.add(request("a", HEAD, pictures(1)))
    text_model.close()
    with pytest.raises(OptionError, match="belongs to a model that takes images"):
        Engine(shared_model("llama"), image_processor=processor())
    engine.add(request("a", ids, pictures(1)))
    engine.step()
    with pytest.raises(OptionError, match="has images"):
        engine.export_request("a")
    with pytest.raises(UnsupportedModelError, match="text alone"):
        Engine(vision_model("llava"), weights="int8")
    with pytest.raises(UnsupportedModelError, match="takes images"):
        Engine(vision_model("qwen2_vl"))


def test_a_failing_image_side_ends_its_request_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = engine._parts.model.images
    assert encoder is not None

    def encode(one: Picture) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(encoder, "encode", encode)
    engine.add(request("image", with_images(HEAD, None, TAIL), pictures(1)))
    engine.add(request("text", HEAD + TAIL, ()))
    done = finish_kept(engine)
    assert done["image"].error is not None
    assert list(done["text"].completions[0].token_ids) == alone(HEAD + TAIL, ())


@pytest.mark.parametrize("template", [None, TEXTS])
def test_chats_of_llm(template: str | None) -> None:
    tokenizer = vision_tokenizer() if template is None else vision_tokenizer(template)
    url = image_url(1)
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "w5 w6"}]
    model = vision_model("llava")
    with mp.LLM(model, tokenizer=tokenizer, image_processor=processor(), method="full") as llm:
        params = greedy(NEW, logit_bias=NO_MARKS)
        (out,) = llm.chat([{"role": "user", "content": content}], params)
        (again,) = llm.generate({"prompt": f"w90 {TOKEN} w5 w6 w91", "images": [picture(24, 16, 1)]}, params)
        ids = [90, *[IMAGE] * N_TOKENS, 5, 6, 91]
        assert list(out.prompt_token_ids) == list(again.prompt_token_ids) == ids
        assert list(out.completions[0].token_ids) == list(again.completions[0].token_ids) == alone(ids, pictures(1))
        for wrong in ("https://example.org/a.png", image_url(1, 1, 300)):
            with pytest.raises(ImageError):
                llm.chat([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": wrong}}]}])
        with pytest.raises(ImageError, match="0 images and 1 times"):
            llm.chat([{"role": "user", "content": f"w5 {TOKEN}"}])
    with mp.LLM(model, tokenizer=tokenizer) as llm, pytest.raises(ImageError, match="image_processor="):
        llm.chat([{"role": "user", "content": content}])
    assert isinstance(picture(3, 3, 1), Image.Image)


def test_a_model_of_a_folder_brings_its_image_processor(tmp_path: Path) -> None:
    """Strangers' folders are checked as those of models of text are."""
    url = image_url(1)
    chat = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
    vision_model("llava").save_pretrained(tmp_path)
    vision_tokenizer().save_pretrained(tmp_path)
    params = greedy(NEW, logit_bias=NO_MARKS)
    with mp.LLM(tmp_path, method="full") as llm:
        assert llm.engine.images is None
        with pytest.raises(ImageError, match="image processor"):
            llm.chat(chat, params)
    processor().save_pretrained(tmp_path)
    with mp.LLM(tmp_path, method="full") as llm:
        (out,) = llm.chat(chat, params)
    assert list(out.completions[0].token_ids) == alone([90, *[IMAGE] * N_TOKENS, 91], pictures(1))
    (tmp_path / "preprocessor_config.json").write_text('{"image_processor_type": "NoSuchProcessor"}')
    with pytest.raises(OptionError, match="image processor"):
        mp.LLM(tmp_path, method="full")


def test_codes_are_shared_by_image_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of codes are found by ids that tell one picture from another, as plain pages are."""
    seen: dict[str, list[tuple[int, ...]]] = {"begin": [], "keep": []}
    for name, ids_of in seen.items():
        monkeypatch.setattr(SharedCodes, name, lambda self, key, ids, *rest, to=ids_of: to.append(tuple(ids.tolist())))
    ids = with_images(HEAD, None, TAIL)
    engine = vision_engine(method="full")
    for name, images in (("a", pictures(1)), ("b", pictures(2)), ("c", pictures(1))):
        engine.add(request(name, ids, images))
        finish(engine)
    engine.close()
    for one, other, again in seen.values():
        assert one == again != other
