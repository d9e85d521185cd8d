"""Every codec with every method through every door: the tokens of generate(), in float32, on bundled weights.

The doors: requests of an engine that are alone, beside others, and carried out to a file and back; a server; documents
that are saved and restored. Each codec meets one method here, those that rotate meet all; the whole cross is slow.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

import millpond as mp
from millpond.codec import resolve
from millpond.codec.calibration import Calibration
from millpond.codec.spec import Codec
from millpond.engine.async_llm import AsyncLLM
from millpond.engine.engine import Engine
from millpond.engine.request import CacheOptions, Request
from millpond.hf.calibration.measure import calibrate
from millpond.hf.document import read_document, restore_document, save_document
from millpond.models.load import load_model, load_tokenizer
from millpond.presets import PRESETS
from tests.cli.test_cli import right
from tests.helpers.engine.helpers import tokens
from tests.helpers.models import REAL, needs_real_model
from tests.helpers.server.live import Live, live
from tests.matrix.test_codecs import llama as wide

METHODS: dict[str, dict[str, Any]] = {
    "full": {},
    "h2o": {"sinks": 2},
    "ada": {"score": "snapkv/window=8"},
    "snapkv": {"window": 8},
}
LENGTH, NEW, DOCUMENT = 230, 6, 200
#: Codecs that take heads of 64.
WIDE = ("flexgen4", "flexgen4_paper", "think", "think_kivi2", "think_kivi2:0.5:0.5")
#: Formats with shares of channels in their names.
RATIOS = ("think:0.5", "think:0.5:0.5", "think_kivi2:0.5", "think_kivi2:0.5:0.5")
CODECS = [*mp.list_codecs(), *RATIOS]
#: Prompts that run beside the one that is looked at.
BESIDE = (190, 45)
#: An id that no model says, so that no answer ends early.
NEVER = 10**6
GREEDY = mp.SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True)


def is_possible(method: str, codec: str) -> bool:
    if codec.startswith("kvquant") and codec.endswith("_paper"):  # of tokens that all heads hold
        return method == "full"
    return method != "full" or "mikv" not in codec  # nothing leaves, so there is no lower tier


CROSS = [(method, codec) for codec in CODECS for method in METHODS if is_possible(method, codec)]


def cover() -> list[tuple[str, str]]:
    """One method for each codec, each method in turn; all methods for codecs that rotate."""
    chosen = []
    for place, codec in enumerate(CODECS):
        stored = resolve(codec)
        possible = [method for method in METHODS if is_possible(method, codec)]
        rotated = isinstance(stored, Codec) and stored.rotated
        chosen += [(m, codec) for m in (possible if rotated else [possible[place % len(possible)]])]
    return chosen


@cache
def model(codec: str = "auto") -> Any:
    """The bundled model; its heads of 32 are too narrow for some formats."""
    return wide() if codec in WIDE else load_model("pond-recall", "f32")


@cache
def prompt(codec: str = "auto", length: int = LENGTH) -> tuple[int, ...]:
    """Words, some of which come again."""
    draw = torch.Generator().manual_seed(length)
    most = min(320, model(codec).config.vocab_size)
    return tuple(torch.randint(20, most, (length,), generator=draw).tolist())


@cache
def calibration() -> Calibration:
    return calibrate(model(), torch.tensor(prompt(length=400)), windows=1, length=300, fisher=False)


def kept(method: str, codec: str) -> dict[str, Any]:
    """Arguments of `compress`, but for the options."""
    return {"method": method, "budget": None if method == "full" else "90%", "codec": codec}


def options(method: str, codec: str) -> dict[str, Any]:
    return METHODS[method] | ({"every": 0} if method == "ada" and "mikv" in codec else {})


def known(codec: str) -> Calibration | None:
    return calibration() if codec.startswith("kvquant") else None


def go_on(looked_at: Any, kept_cache: mp.MillpondCache, ids: tuple[int, ...]) -> list[int]:
    """What generate() answers behind a cache."""
    asked = torch.tensor([ids])
    plain = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=NEVER, pad_token_id=0)
    out = looked_at.generate(asked, cache=kept_cache, attention_mask=torch.ones_like(asked), generation_config=plain)
    return [int(i) for i in out[0, len(ids) :]]


@cache
def generated(method: str, codec: str) -> list[int]:
    looked_at = model(codec)
    with mp.compress(looked_at, **kept(method, codec), calibration=known(codec), **options(method, codec)) as held:
        found = go_on(looked_at, held, prompt(codec))
        if isinstance(resolve(codec), Codec):  # codes were really made
            assert any(part.lens.any() for layer_cache in held.layer_caches for part in layer_cache.table.packed_parts)
    return found


def request(name: str, method: str, codec: str, ids: tuple[int, ...]) -> Request:
    asked = CacheOptions(options=options(method, codec), **kept(method, codec))
    return Request(request_id=name, prompt=ids, params=GREEDY, cache=asked)


def engine_for(codec: str, **more: Any) -> Engine:
    return Engine(model(codec), method="full", calibration=known(codec), max_step_tokens=100, **more)


def finish(engine: Engine) -> dict[str, list[int]]:
    done = {output.request_id: tokens(output) for output in engine.drain()}
    engine.check_integrity()
    return done


def through_an_engine(method: str, codec: str, folder: Path) -> dict[str, list[int]]:
    """Alone; in a batch with others of the same and of another kind; carried out to a file in the middle and back."""
    engine = engine_for(codec, swap_to=folder)
    try:
        engine.add(request("alone", method, codec, prompt(codec)))
        found = finish(engine)
        for n in BESIDE:
            engine.add(request(str(n), method, codec, prompt(codec, n)))
        engine.add(request("other", "h2o", "int4", prompt(codec, BESIDE[0])))
        engine.step()  # a part of what the others ask is read, and what is asked next comes in the middle of it
        engine.add(request("mixed", method, codec, prompt(codec)))
        found |= finish(engine)
        engine.add(request("swapped", method, codec, prompt(codec)))
        for new in (0, 3):  # while its prompt is read, and while it decodes
            while (
                len(engine._requests["swapped"].completions[0].tokens) < new
                or not engine._requests["swapped"].scheduled.num_computed_tokens
            ):
                engine.step()
            scheduled = engine._scheduler.preempt_newest()
            assert scheduled is not None
            engine._preemptor._preempt(scheduled)
            engine.check_integrity()
        found |= finish(engine)
        assert engine.stats().preemptions == 2
    finally:
        engine.close()
    return found


def through_a_document(
    looked_at: Any, ids: tuple[int, ...], path: Path, **settings: Any
) -> tuple[list[int], list[int]]:
    """A question behind a text, asked of the cache that read it, and of one that was restored."""
    text = torch.tensor([ids[:DOCUMENT]])
    with mp.compress(looked_at, **settings) as held, torch.no_grad():
        read_document(looked_at, held, text)
        save_document(held, text, path)
        expected = go_on(looked_at, held, ids)
    held, _ = restore_document(looked_at, path)
    with held, torch.no_grad():
        found = go_on(looked_at, held, ids)
        held.check_integrity()
    return expected, found


def check(method: str, codec: str, folder: Path) -> None:
    expected = generated(method, codec)
    found = through_an_engine(method, codec, folder)
    assert {name: found[name] for name in ("alone", "mixed", "swapped")} == dict.fromkeys(
        ("alone", "mixed", "swapped"), expected
    )
    given = known(codec)
    if given is None:  # a document names the calibration's file
        asked, restored = through_a_document(
            model(codec), prompt(codec), folder / "text", **kept(method, codec), **options(method, codec)
        )
        assert restored == asked


@pytest.mark.covering
@pytest.mark.parametrize(("method", "codec"), cover())
def test_every_codec(method: str, codec: str, tmp_path: Path) -> None:
    check(method, codec, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "codec"), [pair for pair in CROSS if pair not in cover()])
def test_the_rest_of_the_cross(method: str, codec: str, tmp_path: Path) -> None:
    check(method, codec, tmp_path)


def test_nothing_is_left_out() -> None:
    assert {codec for _, codec in cover()} == set(CODECS) >= set(mp.list_codecs())
    assert {method for method, _ in cover()} == set(METHODS)
    assert {codec for method, codec in cover() if method == "full"} >= {"rotated4", "rotated2"}


# ---------------------------------------------------------------------- a server


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    def make() -> AsyncLLM:
        return AsyncLLM(
            model(),
            tokenizer=load_tokenizer("pond-recall"),
            model_name="pond",
            method="full",
            max_step_tokens=300,
            calibration=calibration(),
        )

    with live(make) as running:
        yield running


def served(server: Live, cases: list[tuple[str, str]]) -> None:
    """All at once, so that each runs beside all others."""
    import asyncio

    import httpx

    tokenizer: Any = load_tokenizer("pond-recall")

    async def ask_all() -> list[dict[str, Any]]:
        async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
            answers = await asyncio.gather(
                *(
                    client.post(
                        "/v1/completions",
                        json={
                            "prompt": list(prompt()),
                            "max_tokens": NEW,
                            "temperature": 0,
                            "ignore_eos": True,
                            "skip_special_tokens": False,
                            "millpond": kept(m, c) | {"options": options(m, c)},
                        },
                    )
                    for m, c in cases
                )
            )
        assert {answer.status_code for answer in answers} == {200}, [answer.text for answer in answers]
        return [answer.json() for answer in answers]

    found = {case: body["choices"][0]["text"].split() for case, body in zip(cases, asyncio.run(ask_all()), strict=True)}
    assert found == {case: tokenizer.decode(generated(*case)).split() for case in cases}


@pytest.mark.slow
def test_a_server(server: Live) -> None:
    served(server, [case for case in cover() if case[1] not in WIDE])


@pytest.mark.slow
def test_a_server_with_the_whole_cross(server: Live) -> None:
    served(server, [case for case in CROSS if case[1] not in WIDE])


# ---------------------------------------------------------------------- presets, and a real model


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_through_every_door(name: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = mp.preset(name)
    looked_at: Any = load_model("pond-recall", "f32")
    with mp.compress(looked_at, **settings) as held:
        expected = go_on(looked_at, held, prompt())
    with mp.LLM(looked_at, **settings) as llm:
        assert tokens(llm.generate([list(prompt())], GREEDY)[0]) == expected
    asked, restored = through_a_document(looked_at, prompt(), tmp_path / "text", **settings)
    assert restored == asked


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_on_the_command_line(name: str, tmp_path: Path) -> None:
    tokenizer: Any = load_tokenizer("pond-recall")
    words = tokenizer.decode(prompt())
    (tmp_path / "prompt").write_text(words)
    ids = tokenizer(words)["input_ids"]
    looked_at: Any = load_model("pond-recall", "f32")
    with mp.LLM(looked_at, tokenizer=tokenizer, **mp.preset(name)) as llm:
        answer = llm.generate([ids], mp.SamplingParams(max_tokens=NEW, temperature=0))[0].completions[0].text
    out = right(
        "generate",
        "--preset",
        name,
        "--prompt-file",
        str(tmp_path / "prompt"),
        "--max-new-tokens",
        str(NEW),
        "--dtype",
        "f32",
    ).stdout
    assert out.split() == answer.split()


@pytest.mark.slow
@needs_real_model
@pytest.mark.parametrize("codec", ["int8", "int4", "kivi4", "rotated4", "rotated2"])
@pytest.mark.parametrize("method", ["full", "ada"])
def test_a_real_model(method: str, codec: str, tmp_path: Path) -> None:
    assert REAL is not None
    looked_at, tokenizer = real(REAL)
    boxes = "".join(f"Box {i} holds {7 * i % 23} stones. " for i in range(60))
    question = boxes + "Which city is the capital of France?"
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    settings = {"method": method, "budget": None if method == "full" else "50%", "codec": codec}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category=UserWarning)
        with mp.compress(looked_at, **settings) as held:
            expected = go_on(looked_at, held, tuple(ids))
        with mp.LLM(looked_at, tokenizer=tokenizer, max_step_tokens=200, **settings) as llm:
            found = llm.generate([ids, ids[:300]], GREEDY)[0]
        assert tokens(found) == expected
        asked, restored = through_a_document(looked_at, tuple(ids[:LENGTH]), tmp_path / "text", **settings)
    assert restored == asked


@cache
def real(folder: str) -> tuple[Any, Any]:
    return load_model(folder, "f32"), load_tokenizer(folder)
