"""Breakpoints of chats: cache_control, and the ends of messages where a prefix cache and the method need them."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import httpx
import pytest

import millpond as mp
from millpond.engine.request import CacheOptions
from millpond.models.load import load_model, load_tokenizer
from millpond.server.app import create_app
from millpond.server.messages import Message
from millpond.server.prompt_marks import ChatBreakpoints, breakpoints_of, completion_marks
from millpond.server.schemas import CacheFields
from millpond.server.service import Service
from millpond.server.settings import ServerSettings
from tests.helpers.server.fake import FakeLLM

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

RULES = "anna kettle and some river and old rain the quiet rain past the meadow " * 3
STORY = "the quiet rain past the meadow and old stone on the river " * 4
MARK = {"cache_control": {"type": "ephemeral"}}
SLOTS = 8


@pytest.fixture(scope="module")
def llm() -> Iterator[mp.AsyncLLM]:
    made = mp.AsyncLLM("pond-recall", method="h2o", budget="30%", dtype="f32", prefix_cache=True, page_slots=SLOTS)
    yield made
    asyncio.run(made.close())


@cache
def app_of(llm: Any) -> Any:
    """One server: each has a secret of its own, by which clients are kept apart."""
    return create_app(llm, ServerSettings())


def ask(llm: Any, *bodies: dict[str, Any], path: str = "chat/completions") -> list[httpx.Response]:
    """The answers to bodies that are sent together."""

    async def work() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app_of(llm))
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=120) as client:
            return await asyncio.gather(*(client.post(f"/v1/{path}", json=body) for body in bodies))

    return asyncio.run(work())


def body(messages: Sequence[dict[str, Any]], salt: str, **rest: Any) -> dict[str, Any]:
    return {"messages": messages, "max_tokens": 4, "temperature": 0, "cache_salt": salt, **rest}


def usage(response: httpx.Response) -> tuple[int, int, str]:
    """Tokens of the prompt, those of them that were cached, and the answer."""
    assert response.status_code == 200, response.text
    found = response.json()
    cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found["usage"]["prompt_tokens"], cached, found["choices"][0]["message"]["content"]


def test_turns_of_a_chat_read_only_what_is_new(llm: mp.AsyncLLM) -> None:
    said: list[dict[str, Any]] = [{"role": "system", "content": RULES}, {"role": "user", "content": STORY}]
    before = 0
    for turn in range(3):
        (there,) = ask(llm, body(said, f"other {turn}"))
        (here,) = ask(llm, body(said, "one"))
        n_tokens, cached, answer = usage(here)
        assert usage(there) == (n_tokens, 0, answer)
        assert (cached > before - 2 * SLOTS and cached % SLOTS == 0) if turn else cached == 0
        before = n_tokens
        said += [{"role": "assistant", "content": answer}, {"role": "user", "content": f"{STORY} {turn}"}]


def test_instructions_are_shared_by_chats_that_differ(llm: mp.AsyncLLM) -> None:
    chats = [
        [{"role": "system", "content": RULES}, {"role": "user", "content": f"{word} {STORY}"}]
        for word in ("rain", "stone", "river")
    ]
    ask(llm, body(chats[0], "instructions"))
    _, cached, answer = usage(ask(llm, body(chats[1], "instructions"))[0])
    own = len(llm.tokenizer(RULES.strip(), add_special_tokens=False)["input_ids"])
    assert own - SLOTS <= cached <= own + SLOTS
    assert answer == usage(ask(llm, body(chats[1], "by itself"))[0])[2]


def test_chats_that_arrive_together_read_their_beginning_once(llm: mp.AsyncLLM) -> None:
    chats = [[{"role": "user", "content": f"{RULES} {STORY} {n} {STORY}"}] for n in range(4)]
    before = llm.stats().prompt_tokens
    found = [usage(response) for response in ask(llm, *(body(chat, "together", n=2) for chat in chats))]
    read = llm.stats().prompt_tokens - before
    own = len(llm.tokenizer(f"{RULES} {STORY}")["input_ids"])
    assert sorted(cached for _, cached, _ in found)[:2] == [0, found[-1][1]]
    assert read <= sum(n for n, _, _ in found) - 3 * (own - 2 * SLOTS)


def test_a_marked_message_is_shared(llm: mp.AsyncLLM) -> None:
    """Of many messages the last ends and the marked one are kept."""
    long = [{"role": "user" if n % 2 == 0 else "assistant", "content": f"{STORY} {n}"} for n in range(7)]
    marked = [dict(message) for message in long]
    marked[1] = {"role": "assistant", "content": [{"type": "text", "text": marked[1]["content"], **MARK}]}
    behind = [*long[:2], {"role": "user", "content": "something else"}]
    found = []
    for salt, first in (("plain", long), ("marked", marked)):
        ask(llm, body(first, salt))
        found.append(usage(ask(llm, body(behind, salt))[0]))
    assert found[0][1] == 0
    assert found[1][1] >= 2 * len(STORY.split())
    assert found[0][2] == found[1][2]


def test_too_many_marks_and_other_marks_are_refused(llm: mp.AsyncLLM) -> None:
    said = [{"role": "user", "content": f"rain {n}", **MARK} for n in range(5)]
    refused, none, kind = ask(
        llm,
        body(said, "marks"),
        body(said[:4], "marks"),
        body([{"role": "user", "content": "rain", "cache_control": {"type": "forever"}}], "marks"),
    )
    assert (refused.status_code, none.status_code, kind.status_code) == (400, 200, 400)
    assert "5 messages have cache_control: at most 4" in refused.json()["error"]["message"]


def test_responses_have_breakpoints_too(llm: mp.AsyncLLM) -> None:
    said = {"instructions": RULES, "max_output_tokens": 4, "temperature": 0, "cache_salt": "responses"}
    cached = []
    for text in (STORY, f"stone {STORY}"):
        (found,) = ask(llm, {**said, "input": text}, path="responses")
        assert found.status_code == 200, found.text
        cached.append(found.json()["usage"]["input_tokens_details"]["cached_tokens"])
    assert cached[0] == 0 < cached[1]


def test_methods_that_need_none_are_not_looked_at(llm: mp.AsyncLLM) -> None:
    found = ChatBreakpoints(llm, {})
    assert found.needed(CacheOptions())
    assert found.needed(CacheOptions(method="ada", options={"score": "h2o"}))
    assert not found.needed(CacheOptions(method="ada"))
    assert not found.needed(CacheOptions(method="full"))
    assert not found.needed(CacheOptions(method="no such method"))
    assert not found.needed(CacheOptions(method="locret", options={"heads": "/etc/passwd"}))
    assert not ChatBreakpoints(FakeLLM(), {}).needed(CacheOptions()), "there is no prefix cache"


def test_which_ends_are_chosen() -> None:
    said = [Message(role="system", content="a")] + [Message(role="user", content="b") for _ in range(6)]
    spans = [(n, n + 1) for n in range(7)]
    assert breakpoints_of(said, spans) == (1, 5, 6, 7)
    said[2] = Message(role="user", content="b", **MARK)  # type: ignore[arg-type]
    assert breakpoints_of(said, spans) == (1, 3, 6, 7)
    assert breakpoints_of(said[:2], [(0, 0), (3, 4)]) == (4,)


def completion(llm: Any, prompt: Any, salt: str, places: Any = None, **rest: Any) -> httpx.Response:
    more = {} if places is None else {"millpond": {"breakpoints": places}}
    sent = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "cache_salt": salt, **more, **rest}
    return ask(llm, sent, path="completions")[0]


def cached(response: httpx.Response) -> tuple[int, str]:
    assert response.status_code == 200, response.text
    found = response.json()
    return found["usage"]["prompt_tokens_details"]["cached_tokens"], found["choices"][0]["text"]


@pytest.mark.parametrize("in_ids", [False, True])
def test_completions_go_on_from_places_of_a_prompt(llm: mp.AsyncLLM, in_ids: bool) -> None:
    n = len(llm.tokenizer(RULES.strip())["input_ids"])
    texts = [f"{RULES}{word} {STORY}" for word in ("rain", "stone")]
    prompts: list[Any] = [llm.tokenizer(text)["input_ids"] for text in texts] if in_ids else texts
    place, salt = (n if in_ids else len(RULES.strip())), f"place {in_ids}"
    assert cached(completion(llm, prompts[0], salt, [place]))[0] == 0
    found, answer = cached(completion(llm, prompts[1], salt))
    assert found == n // SLOTS * SLOTS > 0
    assert answer == cached(completion(llm, prompts[1], f"{salt} by itself"))[1]
    cached(completion(llm, prompts[0], f"{salt} none"))
    assert cached(completion(llm, prompts[1], f"{salt} none"))[0] == 0, "without a place nothing goes on"


def test_a_place_in_the_middle_of_a_token_is_before_it(llm: mp.AsyncLLM) -> None:
    async def work() -> None:
        text = "anna kettle and"
        ids = tuple(llm.tokenizer(text)["input_ids"])
        service = Service(llm, ServerSettings())
        n = len(llm.tokenizer("anna")["input_ids"])

        async def places(*given: int) -> tuple[int, ...]:
            fields = CacheFields(breakpoints=list(given))
            requested = completion_marks(fields, [ids], [text], shared=True, prefixes=True)
            assert requested is not None
            return (await service.tokens.in_text(text, ids, requested)).breakpoints

        assert await places(4) == (n,)
        assert await places(8) == (n,)
        assert await places(11, 8, 15) == (n, n + 1, len(ids))

    asyncio.run(work())


@pytest.mark.parametrize(
    ("prompt", "places", "rest", "match"),
    [
        ("anna", [5], {}, "number of characters from 1 to the prompt's 4"),
        ("anna", [0], {}, "from 1 to"),
        ([3, 4], [3], {}, "number of tokens from 1 to the prompt's 2"),
        ("anna", [True], {}, "valid integer"),
        ("anna", [1, 1, 1, 1, 1], {}, "at most 4"),
        (["anna", "kettle"], [1], {}, "one prompt"),
        ("anna", [1], {"echo": True, "logprobs": 1}, "is not shared"),
    ],
)
def test_bad_places_of_a_completion_are_refused(
    llm: mp.AsyncLLM, prompt: Any, places: Any, rest: Any, match: str
) -> None:
    found = completion(llm, prompt, "bad", places, **rest)
    assert found.status_code == 400
    assert match in found.json()["error"]["message"]
    assert found.json()["error"]["param"].startswith("millpond.breakpoints")


@pytest.mark.parametrize(
    ("path", "sent"),
    [("chat/completions", {"messages": [{"role": "user", "content": "a"}]}), ("responses", {"input": "a"})],
)
def test_places_go_with_completions_alone(llm: mp.AsyncLLM, path: str, sent: dict[str, Any]) -> None:
    (found,) = ask(llm, {**sent, "millpond": {"breakpoints": [1]}}, path=path)
    assert found.status_code == 400
    assert "cache_control" in found.json()["error"]["message"]


def test_a_server_that_keeps_no_prompts_says_so() -> None:
    fake = FakeLLM()
    found = completion(fake, "w5 w6", "x", [2])
    assert found.status_code == 400
    assert "--prefix-cache" in found.json()["error"]["message"]


STRIPS = """{% for message in messages %}{% set text = message.content %}
{%- if message.role == 'assistant' and '</think>' in text %}{% set text = text.split('</think>')[-1] %}{% endif %}
{{- '<ask> ' + text.strip() + ' <is>' }}{% endfor %}"""


@pytest.fixture(scope="module")
def stripping() -> Iterator[mp.AsyncLLM]:
    """With a template that leaves the thoughts of answers out, as templates of models that think do."""
    tokenizer = copy.deepcopy(load_tokenizer("pond-recall"))
    tokenizer.chat_template = STRIPS
    model = load_model("pond-recall", "f32")
    made = mp.AsyncLLM(
        model, tokenizer=tokenizer, model_name="m", method="h2o", budget="30%", prefix_cache=True, page_slots=SLOTS
    )
    yield made
    asyncio.run(made.close())


@pytest.mark.parametrize("thought", ["<think>rain and rain</think>", "<think>\n\n</think>\n\n", "rain</think>", ""])
def test_a_template_that_strips_thoughts_shares_as_without_them(stripping: mp.AsyncLLM, thought: str) -> None:
    """Clients that send earlier thoughts back share what those share that leave them out."""

    def chat(n: int, before: str) -> list[dict[str, Any]]:
        said: list[dict[str, Any]] = [{"role": "system", "content": RULES}, {"role": "user", "content": STORY}]
        for turn in range(n):
            said.append({"role": "assistant", "content": f"{before}meadow {turn}"})
            said.append({"role": "user", "content": f"{STORY} {turn}"})
        return said

    found = {}
    for before in (thought, ""):
        salt = f"strips {thought} {before}"
        found[before] = [usage(ask(stripping, body(chat(n, before), salt))[0]) for n in range(4)]
    assert found[thought] == found[""]
    lengths = [n_tokens for n_tokens, _, _ in found[""]]
    for n, (_, cached, _) in enumerate(found[thought][1:]):
        assert cached > lengths[n] - 2 * SLOTS, f"turn {n + 1} goes on behind all of the one before it"
