"""A pipeline of two processes for a server: streams, aborts, deadlines, and errors where a stage is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
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
from tests.helpers.hf.families import COMMON, build

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
CONFIG = EngineConfig(method="full", codec="auto", max_step_tokens=16)


@pytest.fixture(scope="module")
def pipeline(folder: Path) -> Iterator[AsyncPipelineLLM]:  # noqa: F811
    llm = AsyncPipelineLLM(folder, CONFIG, threads=1)
    yield llm
    asyncio.run(llm.close(drain=False))


@pytest.fixture(scope="module")
def even(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncPipelineLLM]:
    """Two layers in two processes, with a limit of memory."""
    path = tmp_path_factory.mktemp("even")
    build("LlamaConfig", "LlamaForCausalLM", **(COMMON | {"head_dim": 16, "num_hidden_layers": 2})).save_pretrained(
        path
    )
    llm = AsyncPipelineLLM(path, replace(CONFIG, kv_memory="96KiB"), threads=1)
    yield llm
    asyncio.run(llm.close(drain=False))


def request(name: str, ids: Any, **options: Any) -> Request:
    more = {key: options.pop(key) for key in ("deadline", "cache", "marks") if key in options}
    return Request(request_id=name, prompt=ids, params=params(**options), **more)


async def last(llm: AsyncPipelineLLM, one: Request) -> mp.RequestOutput:
    return [output async for output in llm.stream(one)][-1]


def test_streams_come_and_go_with_the_tokens_of_one_process(pipeline: AsyncPipelineLLM, folder: Path) -> None:  # noqa: F811
    with mp.LLM(str(folder), replace(CONFIG, runner="modules")) as llm:
        expected = tokens(llm.generate(PROMPTS, params()))

    async def run() -> None:
        async def left() -> None:
            async with aclosing(pipeline.stream(request("left", prompt(50), max_tokens=200))) as outputs:
                async for output in outputs:
                    if len(output.completions[0].token_ids) >= 3:
                        break

        late = asyncio.create_task(last(pipeline, request("late", prompt(20), max_tokens=10**6, deadline=0.2)))
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


def test_answers_of_a_planned_batch_too(pipeline: AsyncPipelineLLM, folder: Path) -> None:  # noqa: F811
    alike = [(*prompt(40), 5 + n, 9) for n in range(3)]
    with mp.LLM(str(folder), replace(CONFIG, runner="modules")) as llm:
        expected = tokens(llm.generate(alike, params()))

    async def run() -> None:
        requests = [request(str(n), ids) for n, ids in enumerate(alike)]
        done = {output.request_id: output async for output in pipeline.batch(requests)}
        assert tokens([done[str(n)] for n in range(3)]) == expected

    asyncio.run(run())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cache": CacheOptions(method="pyramidkv", budget="30%")}, "method of a pipeline"),
        ({"cache": CacheOptions(method="snapkv", options={"window": 8})}, "options of a method"),
        ({"marks": mp.PromptMarks(keep=((0, 4),))}, "marks of a prompt"),
    ],
)
def test_requests_that_need_all_layers_are_refused(
    pipeline: AsyncPipelineLLM, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(OptionError, match=said):
        asyncio.run(last(pipeline, request("refused", prompt(9), **options)))
    assert len(asyncio.run(last(pipeline, request("next", prompt(9)))).completions[0].token_ids) == 12


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (EngineConfig(method="ada", budget="30%"), "method of a pipeline"),
        (EngineConfig(deterministic=True), "deterministic=True is for a model in one process"),
        (EngineConfig(runner="lean"), "as modules"),
        (EngineConfig(codec="0=fp8,*=int4"), "one format for all"),
        (EngineConfig(kv_memory="8MiB"), "3 layers are not over 2"),
    ],
)
def test_settings_that_need_all_layers_are_refused(folder: Path, config: EngineConfig, said: str) -> None:  # noqa: F811
    with pytest.raises(OptionError, match=said):
        AsyncPipelineLLM(folder, config, threads=1)


@pytest.mark.slow
def test_a_limit_of_memory_is_shared_out_evenly(even: AsyncPipelineLLM) -> None:
    """Of requests that do not fit together some wait, in both processes."""

    async def run() -> None:
        outputs = await asyncio.gather(*(last(even, request(str(n), prompt(40 + n))) for n in range(6)))
        assert [len(output.completions[0].token_ids) for output in outputs] == [12] * 6
        assert even.stats().kv_limit == 48 << 10
        with pytest.raises(MillpondError, match="kv_memory"):
            await last(even, request("long", prompt(60), max_tokens=190))

    asyncio.run(run())


@pytest.mark.slow
def test_a_lost_process_ends_all_requests(even: AsyncPipelineLLM) -> None:
    async def run() -> None:
        async def answer() -> None:
            async for output in even.stream(request("long", prompt(30), max_tokens=60)):
                if len(output.completions[0].token_ids) >= 2:
                    even._engine._others.processes[0].kill()  # type: ignore[attr-defined]

        with pytest.raises(MillpondError, match="the engine ended"):
            await answer()
        assert even.trouble(60.0) is not None
        with pytest.raises(MillpondError):
            await last(even, request("next", prompt(9)))

    asyncio.run(run())
