"""A pipeline of two processes for a server: streams, aborts, deadlines, and errors where a stage is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import millpond as mp
from millpond.cluster.async_pipeline import AsyncPipelineLLM
from millpond.engine.config import EngineConfig
from millpond.engine.request import CacheOptions, Request
from millpond.errors import MillpondError, OptionError
from tests.cluster.test_pipeline import PROMPTS, folder, params, tokens  # noqa: F401
from tests.helpers.engine.helpers import prompt

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
CONFIG = EngineConfig(method="full", codec="auto", max_step_tokens=16)


@pytest.fixture(scope="module")
def pipeline(folder: Path) -> Iterator[AsyncPipelineLLM]:  # noqa: F811
    llm = AsyncPipelineLLM(folder, CONFIG, threads=1)
    yield llm
    asyncio.run(llm.close(drain=False))


def request(name: str, ids: Any, **options: Any) -> Request:
    more = {key: options.pop(key) for key in ("deadline", "cache", "marks") if key in options}
    return Request(request_id=name, prompt=ids, params=params(**options), **more)


async def last(llm: AsyncPipelineLLM, one: Request) -> mp.RequestOutput:
    output = None
    async for output in llm.stream(one):
        pass
    assert output is not None
    return output


def test_streams_come_and_go_with_the_tokens_of_one_process(pipeline: AsyncPipelineLLM, folder: Path) -> None:  # noqa: F811
    with mp.LLM(str(folder), replace(CONFIG, runner="modules")) as llm:
        expected = tokens(llm.generate(PROMPTS, params()))

    async def run() -> None:
        async def left() -> None:
            async with aclosing(pipeline.stream(request("left", prompt(50), max_tokens=200))) as outputs:
                async for output in outputs:
                    if len(output.completions[0].token_ids) >= 3:
                        break

        late = asyncio.create_task(last(pipeline, request("late", prompt(20), max_tokens=10**6, deadline=1.0)))
        away = asyncio.create_task(left())
        outputs = await asyncio.gather(*(last(pipeline, request(str(n), ids)) for n, ids in enumerate(PROMPTS)))
        assert tokens(outputs) == expected
        await away
        ended = await late
        assert ended.completions[0].finish_reason == "deadline"
        again = await asyncio.gather(*(last(pipeline, request(str(n), ids)) for n, ids in enumerate(PROMPTS[:2])))
        assert tokens(again) == expected[:2]
        (drawn,) = tokens([await last(pipeline, request("unseeded", PROMPTS[0], seed=None))])
        assert len(drawn) == 12
        assert pipeline.trouble(60.0) is None

    asyncio.run(run())
