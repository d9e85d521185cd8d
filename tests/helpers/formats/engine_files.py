"""Kept files of engines: packed weights with a plan, a folder of sessions, one of chunks, and requests on their way."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import millpond as mp
from millpond.budget import Budget
from millpond.cache.chunks.file_format import content as chunk_content
from millpond.cache.chunks.file_format import serialized
from millpond.cache.chunks.files import mark_of
from millpond.cache.chunks.variant import StoredVariant
from millpond.engine.offload.plan import save_plan
from millpond.engine.offload.planner import EXAMPLE
from millpond.engine.outputs import RequestOutput
from millpond.engine.request import CacheOptions, Request
from millpond.engine.sessions.stored_turn import StoredTurn, TurnPlace
from millpond.engine.transfer.container import unpack
from millpond.engine.transfer.request_snapshot import Ages, CompletionSnapshot, RequestSnapshot
from millpond.prompt_marks import PromptMarks
from tests.helpers.formats.model import DATA, MODEL, VOCABULARY, of_heads, prompt

WEIGHTS, PLAN = DATA / "weights", DATA / "plan.json"
SESSIONS, CHUNKS = DATA / "sessions", DATA / "chunks"
UNDER_WAY, UNREAD = DATA / "request-under-way", DATA / "request-unread"
CHUNK = prompt(18, 31)
NEW = 8
#: Of an engine that stores its turns, or sends its requests away.
OPTIONS: dict[str, Any] = {"method": "h2o", "budget": 24, "codec": "bf16", "page_slots": 8}


def asked(new: int = NEW, **options: Any) -> mp.SamplingParams:
    return mp.SamplingParams(max_tokens=new, temperature=0, logprobs=2, ignore_eos=True, **options)


def answer(output: RequestOutput) -> tuple[list[int], float]:
    """The first answer, and the least margin between its tokens and the likeliest other ones."""
    if output.error is not None:
        raise output.error
    completion = output.completions[0]
    margins = [one.top[0][1] - one.top[1][1] for one in completion.logprobs or ()]
    return list(completion.token_ids), min(margins)


# ---------------------------------------------------------------------- packed weights and a plan


def write_plan() -> None:
    """Write a plan that was searched for, for the weights of `write_weights`."""
    found = mp.plan(
        MODEL,
        memory="24MiB",
        prompt_tokens=32,
        new_tokens=8,
        disk=DATA,
        method="h2o",
        budget=16,
        weights="int4",
        machine=EXAMPLE,
    )
    chosen: dict[str, Any] = {
        "weights": {"host": 0.5, "disk": 0.5},
        "ends": "disk",
        "schedule": "row",
        "micro_batch": 4,
        "block": 4,
        "prompt_rows": 64,
        "slots": 2,
    }
    save_plan(replace(found, **chosen), PLAN)


def write_weights() -> None:
    """Write the packed weights of the model."""
    shutil.rmtree(WEIGHTS, ignore_errors=True)
    WEIGHTS.mkdir()
    streamed(WEIGHTS, PLAN, 2)


def streamed(disk: Path, plan: Path, question: int) -> tuple[dict[str, Any], float]:
    """An answer with packed weights, half of which are read from `disk` in every sweep, and its least margin."""
    with mp.LLM(MODEL, method="h2o", budget=16, weights="int4", disk=disk, plan=plan) as llm:
        tokens, margin = answer(llm.generate([prompt(30, question)], asked())[0])
    return {"question": question, "tokens": tokens}, margin


# ---------------------------------------------------------------------- sessions


def write_sessions() -> list[int]:
    """Write a folder with one turn, and say what it answers."""
    shutil.rmtree(SESSIONS, ignore_errors=True)
    SESSIONS.mkdir()
    (SESSIONS / "secret").write_bytes(bytes(range(32)))
    with mp.LLM(of_heads(8), cache_dir=SESSIONS, **OPTIONS) as llm:
        said, _ = answer(llm.generate([prompt(40)], asked())[0])
        assert llm.sessions is not None
        assert llm.sessions.wait(60)
    (SESSIONS / "lock").unlink()
    return said


def second_turn(folder: Path, said: Sequence[int], question: int) -> tuple[dict[str, Any], float]:
    """What follows the turn of a folder, how many of its tokens were not read again, and the least margin."""
    with mp.LLM(of_heads(8), cache_dir=folder, **OPTIONS) as llm:
        (output,) = llm.generate([[*prompt(40), *said, *prompt(6, question)]], asked())
    tokens, margin = answer(output)
    kv = output.completions[0].kv
    assert kv is not None
    return {"question": question, "said": list(said), "restored": kv.restored_tokens, "tokens": tokens}, margin


def second_turn_of_copy(said: Sequence[int], question: int) -> tuple[dict[str, Any], float]:
    """`second_turn` of the kept folder, which stays as it is."""
    with TemporaryDirectory() as folder:
        shutil.copytree(SESSIONS, folder, dirs_exist_ok=True)
        return second_turn(Path(folder), said, question)


def turn_again(path: Path) -> bytes:
    """The bytes of a stored turn that was read from its file."""
    place, data = TurnPlace.of(path), path.read_bytes()
    assert place is not None
    return StoredTurn.from_bytes(data, place, unpack(data)[1]["ids"].numpy()).to_bytes(place)


# ---------------------------------------------------------------------- chunks


def chunked(folder: Path, question: int) -> tuple[dict[str, Any], float]:
    """The answer to a prompt with a chunk, how many of its tokens came from the store, and the least margin."""
    asks = mp.Prompt([tuple(prompt(5, 30)), mp.Chunk(tuple(CHUNK)), tuple(prompt(6, question))])
    with mp.LLM(of_heads(8), method="full", page_slots=8, chunk_store=mp.ChunkStore(folder)) as llm:
        (output,) = llm.generate([asks], asked())
        stats = llm.stats().chunks
    tokens, margin = answer(output)
    kv = output.completions[0].kv
    assert kv is not None
    assert stats is not None
    found = {"question": question, "reused": kv.reused_tokens, "from_disk": stats.disk_hits, "tokens": tokens}
    return found, margin


def chunked_copy(question: int) -> tuple[dict[str, Any], float]:
    """`chunked` of the kept folder, which stays as it is."""
    with TemporaryDirectory() as folder:
        shutil.copytree(CHUNKS, folder, dirs_exist_ok=True)
        return chunked(Path(folder), question)


def write_chunks() -> None:
    """Write a folder with one chunk."""
    shutil.rmtree(CHUNKS, ignore_errors=True)
    chunked(CHUNKS, 2)


def chunk_again(path: Path) -> bytes:
    """The bytes of the file of a chunk that was read from it."""
    mark = mark_of(path.parents[2])
    assert mark is not None
    facts, tensors = chunk_content(path, mark, path.parent.name)
    return serialized(StoredVariant(facts, None, tensors), mark)  # type: ignore[arg-type]  # it writes no shape


# ---------------------------------------------------------------------- requests


def write_under_way(question: int) -> tuple[dict[str, Any], float]:
    """Write a request with three tokens of its answer, and say what it answers, with the least margin."""
    with mp.LLM(of_heads(8), **OPTIONS) as llm:
        llm.engine.add(_request(question))
        tokens: Sequence[int] = ()
        while len(tokens) < 3:
            for output in llm.engine.step():
                tokens = output.completions[0].token_ids
        UNDER_WAY.write_bytes(llm.engine.export_request("kept"))
    found, margin = continued(UNDER_WAY.read_bytes())
    return {"question": question, "tokens": found}, margin


def _request(question: int) -> Request:
    return Request(
        request_id="kept",
        prompt=tuple(prompt(40, question)),
        params=asked(prompt_logprobs=1, seed=5),
        marks=PromptMarks(report=((3, 9),), keep=((4, 7),)),
    )


def continued(data: bytes) -> tuple[list[int], float]:
    """The whole answer of a request that goes on in another engine, and its least margin."""
    with mp.LLM(of_heads(8), **(OPTIONS | {"page_slots": 16})) as llm:
        llm.engine.import_request(data)
        (output,) = [output for output in llm.engine.drain() if output.finished]
    return answer(output)


def write_unread() -> None:
    """Write a request in which every field has another value than by default, as far as one may have them all."""
    UNREAD.write_bytes(full_snapshot().to_bytes())


def full_snapshot() -> RequestSnapshot:
    """See `write_unread`."""
    params = mp.SamplingParams(
        max_tokens=9,
        min_tokens=2,
        temperature=0.5,
        top_p=0.75,
        top_k=11,
        min_p=0.125,
        typical_p=0.875,
        repetition_penalty=1.25,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias={7: 1.5},
        bad_words=("mud",),
        allowed_token_ids=tuple(range(2, VOCABULARY)),
        logprobs=1,
        prompt_logprobs=2,
        stop=("mill",),
        stop_token_ids=(3,),
        include_stop=True,
        n=2,
        seed=12,
        regex="[a-z ]+",
        skip_special_tokens=False,
        kept_special_tokens=(1,),
    )
    cache = CacheOptions(
        method="snapkv",
        options={"window": 8},
        budget=Budget("ratio", 0.5, 24),
        codec="int8",
        recompute=0.25,
        max_kl=0.5,
        pick="head",
        preset="small",
        on_pressure="refuse",
    )
    request = Request(
        request_id="unread",
        prompt=tuple(prompt(12)),
        params=params,
        cache=cache,
        client="anna",
        cache_salt="pepper",
        priority=-2,
        deadline=30.0,
        watch=True,
        marks=PromptMarks(report=((1, 4),), breakpoints=(8,), keep=((2, 3),), shares=((4, 8, 0.5),), forget=((9, 10),)),
        tell_read=True,
    )
    answers = (
        CompletionSnapshot(
            seed=12, tokens=(5, 9), known=(7,), logprobs=((5, -0.5, ((5, -0.5),)), (9, -1.5, ())), shared=4
        ),
        CompletionSnapshot(seed=13, tokens=(8,), logprobs=((8, -2.0, ()),), finish_reason="stop"),
    )
    return RequestSnapshot(
        request=request,
        text="old stone",
        answers=answers,
        ages=Ages(arrived=2.0, started=1.0, first_token=0.5),
        model="m" * 64,
        recipe="h2o",
        prompt_logprobs=(None, (4, -0.25, ((4, -0.25),))),
    )


def snapshot_again(data: bytes) -> bytes:
    """The bytes of a request that was read from them."""
    return RequestSnapshot.from_bytes(data).to_bytes()
