"""Runs of blanks, of one letter or of marks: tokenized in bounded time or refused, with others served meanwhile."""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import nullcontext
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from millpond.models.load import load_tokenizer
from millpond.server import text_cost
from millpond.server.errors import ApiError
from millpond.server.text_cost import LONG_RUN, check_runs
from tests.helpers.models import needs_pond_text
from tests.helpers.server.fake import FakeLLM, client_of

#: Blanks, line ends, one letter, and marks that combine with a letter.
RUNS = {"spaces": " ", "newlines": "\n", "letter": "w", "marks": "w\u0301"}
#: Characters of a run, and CPU seconds that the server may take for it.
LONG, MOST_S = 500_000, 2.0


def squared(pattern: str) -> Any:
    """A tokenizer whose expression tries each place of a run anew."""
    words = {"<unk>": 0} | {f"w{i}": i + 1 for i in range(60)} | {" ": 61}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = Split(Regex(pattern), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")  # type: ignore[no-untyped-call]


BLANKS, LETTERS = r"\s+\z|\s|\S+", r"w+!|w|[^w]+"


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (BLANKS, " " * LONG + "x"),
        (BLANKS, "x " + "\n" * LONG + "x"),
        (BLANKS, ("\t" * 20_000 + "x") * 25),
        (LETTERS, "w" * LONG),
        (LETTERS, "a b " + "w" * 100_000 + " " + "w" * 90_000),
    ],
)
def test_a_tokenizer_that_takes_the_square_is_found_out(pattern: str, text: str) -> None:
    tokenizer = squared(pattern)
    began = time.process_time()
    with pytest.raises(ApiError, match=r"in a row, from character .* break them up") as found:
        check_runs(text, tokenizer.encode, "prompt")
    assert time.process_time() - began < MOST_S
    assert (found.value.status, found.value.param) == (400, "prompt")


@pytest.mark.parametrize(("power", "refused"), [(2, True), (1.8, True), (1, False), (1.1, False)])
def test_a_slow_moment_of_the_processor_decides_nothing(
    monkeypatch: pytest.MonkeyPatch, power: float, refused: bool
) -> None:
    """Whichever tries take twice as long as they should."""
    for slow in (slice(first, first + count) for first in range(8) for count in (0, 1, 2)):
        tries = 0

        def seconds(encode: object, text: str) -> float:
            nonlocal tries
            tries += 1
            return (2 if tries in range(100)[slow] else 1) * 0.005 * math.pow(len(text) / 1024, power)  # noqa: B023

        monkeypatch.setattr(text_cost, "_seconds", seconds)
        with pytest.raises(ApiError) if refused else nullcontext():
            check_runs(" " * LONG, len, "prompt")


@pytest.mark.parametrize("pattern", [BLANKS, LETTERS])
def test_what_takes_no_time_is_tokenized(pattern: str) -> None:
    tokenizer = squared(pattern)
    for text in (" " * 2_000 + "x", "w" * 2_000, "w5 w6 " * 20_000, (" " * 500 + "x") * 400, "x" * (LONG_RUN - 1)):
        check_runs(text, tokenizer.encode, "prompt")


@pytest.mark.covering
@pytest.mark.parametrize("kind", RUNS)
@pytest.mark.parametrize("name", ["pond-recall", pytest.param("pond-text", marks=needs_pond_text)])
def test_our_tokenizers_take_the_length(name: str, kind: str) -> None:
    tokenizer = load_tokenizer(name)
    text = f"the {RUNS[kind] * (LONG // len(RUNS[kind]))} end"
    began = time.thread_time()
    check_runs(text, lambda part: tokenizer.encode(part, add_special_tokens=False), "prompt")
    tokenizer.encode(text)
    taken = time.thread_time() - began
    tokenizer.encode("some words " * (LONG // 11))
    plain = time.thread_time() - began - taken
    assert taken < 10 * plain, "of words: how fast a machine is does not count"


def test_others_are_served_meanwhile() -> None:
    """Whatever one client sends, the short texts of others are tokenized; and what is refused is refused soon."""

    async def work() -> None:
        async with client_of(FakeLLM(20_000, squared(BLANKS))) as client:
            refused = [client.post("/tokenize", json={"prompt": char * LONG + "x"}) for char in " \n\t"]
            refused.append(client.post("/v1/completions", json={"prompt": " " * LONG + "x", "max_tokens": 1}))
            chat = {"messages": [{"role": "user", "content": "x" + " " * LONG + "x"}], "max_tokens": 1}
            refused.append(client.post("/v1/chat/completions", json=chat))
            began = time.process_time()
            tasks = [asyncio.create_task(request) for request in refused]
            for _ in range(20):
                asked = time.monotonic()
                short = await client.post("/tokenize", json={"prompt": "w5 w6"})
                assert short.json()["count"] == 3
                assert time.monotonic() - asked < 1
            for answer in await asyncio.gather(*tasks):
                assert answer.status_code == 400, answer.text
                assert "blanks in a row" in answer.json()["error"]["message"]
            assert time.process_time() - began < len(tasks) * MOST_S

    asyncio.run(work())
