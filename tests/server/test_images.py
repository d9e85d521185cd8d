"""Images in chats over HTTP: answers of the model, and hostile images that harm nobody else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import torch

from millpond.engine.async_llm import AsyncLLM
from millpond.server.routes.chat import chat_request_of
from millpond.server.schemas import ChatBody
from millpond.server.service import Service
from millpond.server.settings import ServerSettings
from tests.engine.test_images import NO_MARKS, alone, pictures, with_images
from tests.helpers.images import TOKEN, file_of, image_url, processor, url_of, vision_tokenizer
from tests.helpers.server.fake import FakeLLM, client_of
from tests.helpers.server.live import Live, live
from tests.hf.test_vision import picture, vision_model
from tests.images.test_reader import REFUSED

NEW = 10


def engine() -> AsyncLLM:
    return AsyncLLM(
        vision_model("llava"),
        tokenizer=vision_tokenizer(),
        image_processor=processor(),
        model_name="tiny",
        prefix_cache=True,
        page_slots=4,
        max_step_tokens=16,
        method="full",
    )


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(engine, max_images=3, max_image_bytes=60_000) as running:
        yield running


def image(url: str, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **more}


def body(*parts: dict[str, Any], **more: Any) -> dict[str, Any]:
    message = {"role": "user", "content": list(parts)}
    biased = {"logit_bias": {str(i): bias for i, bias in NO_MARKS.items()}, "skip_special_tokens": False}
    return {"messages": [message], "max_tokens": NEW, "temperature": 0, **biased, **more}


def post(server: Live, wanted: dict[str, Any]) -> Any:
    with server.client() as client:
        return client.post("/v1/chat/completions", json=wanted)


def words(ids: list[int]) -> str:
    return " ".join(f"w{i}" for i in ids)


def test_a_chat_with_images_is_answered_as_generate_does(server: Live) -> None:
    wanted = body(said("w5 w6"), image(image_url(1)), said("w7"), image(image_url(2), detail="auto"))
    answer = post(server, wanted).json()
    ids = with_images([90, 5, 6], None, [7], None, [91])
    assert answer["usage"]["prompt_tokens"] == len(ids)
    assert answer["choices"][0]["message"]["content"] == words(alone(ids, pictures(1, 2)))


def test_the_client_of_openai_streams_it(server: Live) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    parts: Any = [image(image_url(1)), said("w7")]
    stream = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": parts}],
        max_tokens=NEW,
        temperature=0,
        stream=True,
        logit_bias={str(i): -100 for i in NO_MARKS},
        extra_body={"skip_special_tokens": False},
    )
    text = "".join(event.choices[0].delta.content or "" for event in stream if event.choices)
    assert text == words(alone(with_images([90], None, [7, 91]), pictures(1)))


def test_equal_images_share_their_prefix_and_others_do_not(server: Live) -> None:
    texts = [said(words(list(range(10, 27))))]  # with the template's word a whole number of blocks before the image
    cached = [
        post(server, body(*texts, image(image_url(seed)), said("w7 w8 w9 w10 w11"))).json()["usage"]
        for seed in (3, 4, 3)
    ]
    before = [usage["prompt_tokens_details"]["cached_tokens"] for usage in cached]
    assert before == [0, 16, 24]


def test_parts_are_kept_and_messages_found_with_images_between(server: Live) -> None:
    parts = [said("w5 w6 w7", millpond={"keep": True}), image(image_url(1)), said("w20 w21 ")]
    wanted = body(*parts, said("w30", millpond={"keep": True}), image(image_url(2)), millpond={"forgotten": True})
    service = Service(server.llm, ServerSettings())
    (request,), *_ = asyncio.run(chat_request_of(service, ChatBody.model_validate(wanted), "chat"))
    assert request.prompt == tuple(with_images([90, 5, 6, 7], None, [20, 21, 30], None, [91]))
    assert sorted(request.marks.keep) == [(1, 4), (10, 11)]
    assert list(request.marks.report) == [(1, 11)]
    assert [one.digest for one in request.images] == [one.digest for one in pictures(1, 2)]
    service.tokens.close(), service.bodies.close(), service.images.close()


HOSTILE = {
    **{what: ([image(url)], message) for what, (url, message) in REFUSED.items()},
    "too many": ([image(image_url(1))] * 4, "4 images: a prompt may have 3"),
    "too long": ([image(url_of(bytes(70_000)))], "it may have 60,000"),
    "the token in a text": ([said(f"w5 {TOKEN}"), image(image_url(1))], "1 images and 2 times"),
    "detail": ([image(image_url(1), detail="high")], "detail"),
    "another field": ([image(image_url(1), width=3)], "unknown field"),
    "another part": ([{"type": "input_audio", "input_audio": {}}], "input_audio"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_images_are_refused(server: Live, what: str) -> None:
    parts, message = HOSTILE[what]
    answer = post(server, body(*parts))
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert message in error["message"]
    assert error["type"] == "invalid_request_error"
    if what in REFUSED:
        assert error["code"] == "invalid_image"


def test_hostile_images_harm_no_other_request(server: Live) -> None:
    """A chat streams while all of them are refused; its answer is that of a quiet server."""
    parts, bad = (image(image_url(1)), said("w7 w8")), [body(*parts) for parts, _ in HOSTILE.values()]
    threads = [threading.Thread(target=post, args=(server, one)) for one in bad for _ in range(2)]
    for thread in threads:
        thread.start()
    answers = [post(server, body(*parts)).json()["choices"][0]["message"]["content"] for _ in range(3)]
    for thread in threads:
        thread.join()
    assert set(answers) == {words(alone(with_images([90], None, [7, 8, 91]), pictures(1)))}


def test_images_of_others_than_the_user(server: Live) -> None:
    wanted = body(image(image_url(1))) | {"messages": [{"role": "system", "content": [image(image_url(1))]}]}
    answer = post(server, wanted)
    assert answer.status_code == 400
    assert "only those of the user" in answer.json()["error"]["message"]


def test_images_are_counted_by_tokenize(server: Live) -> None:
    with server.client() as client:
        answer = client.post("/tokenize", json={"messages": body(image(image_url(1)), said("w7"))["messages"]})
    assert answer.json()["tokens"] == with_images([90], None, [7, 91])


def test_a_model_of_text_takes_no_images() -> None:
    async def ask() -> Any:
        async with client_of(FakeLLM()) as client:
            return await client.post("/v1/chat/completions", json=body(image(image_url(1))) | {"logit_bias": None})

    answer = asyncio.run(ask())
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "images_unsupported"


def test_a_large_image_is_read(server: Live) -> None:
    data = file_of(picture(900, 700, 5), "JPEG", quality=30)
    assert 10_000 < len(data) < 60_000
    answer = post(server, body(image(url_of(data, "jpeg")), said("w7")))
    assert answer.status_code == 200, answer.text
    assert torch.isfinite(pictures(5)[0].pixels).all()
