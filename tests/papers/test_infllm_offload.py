"""InfLLM's blocks outside of the pool: bit-equal where they are as the model made them, close in number formats."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

import millpond as mp
from millpond.cache.far_blocks import BlockFormat, FarBlocks
from millpond.cache.pages.page_table import PageTable
from millpond.cache.selective import BlockRetrieval
from millpond.cache.serialization import from_tensors, to_tensors
from millpond.engine.engine import Engine
from millpond.engine.request import Request
from millpond.errors import DataError, OptionError
from millpond.hf.document import read_document, restore_document, save_document
from tests.helpers.engine.helpers import finish, greedy
from tests.helpers.hf.families import COMMON, build, text
from tests.helpers.matrix.models import llama, prompts
from tests.papers.test_infllm import SMALL

BUDGET = 14
PLACES = ["host", "disk"]


def turns(offload: str, far: str = "one_distance", **options: Any) -> tuple[list[Tensor], mp.CacheStats]:
    """Logits of a padded batch, single steps and a second turn."""
    model, (ids, mask) = llama(), prompts(3)
    later = torch.randint(2, 96, (3, 24), generator=torch.Generator().manual_seed(2))
    logits = []
    settings: dict[str, Any] = {"page_slots": 4, **SMALL, "far": far, "offload": offload, **options}
    with torch.no_grad(), mp.compress(model, "infllm", BUDGET, **settings) as kept:
        for new in (ids, *later[:, :6].split(1, 1), later[:, 6:18], *later[:, 18:].split(1, 1)):
            mask = mask if new is ids else torch.cat([mask, torch.ones_like(new)], 1)
            places = (mask.cumsum(1) - 1).clamp(min=0)[:, -new.shape[1] :]
            logits.append(model(new, attention_mask=mask, position_ids=places, cache=kept).logits)
            kept.check_integrity()
        return logits, kept.stats()


@pytest.mark.parametrize(("offload", "far"), [("host", "one_distance"), ("disk", "true")])
def test_blocks_outside_give_the_same_bits(offload: str, far: str) -> None:
    inside, before = turns("none", far)
    outside, after = turns(offload, far)
    assert all(torch.equal(a, b) for a, b in zip(inside, outside, strict=True))
    assert after.stored == before.stored
    assert after.evicted == 0
    assert before.outside_bytes == 0
    assert after.kv_bytes < before.kv_bytes / 4
    numbers = 2 * 2 * 16 * 8  # layers, heads, numbers of an entry, bytes of each
    blocks = sum((int(seen) - SMALL["sinks"] - SMALL["local"]) // SMALL["block"] for seen in after.seen)
    assert after.outside_bytes == blocks * SMALL["block"] * numbers
    assert turns("auto", far)[1].outside_bytes == 0  # the pool of a CPU is the host's memory


@pytest.mark.parametrize("offload", PLACES)
def test_only_looked_up_blocks_come_back(offload: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step reads as many blocks as the budget has room for, and not those that it does not attend to."""
    model, (ids, _) = llama(), prompts(1, length=60)
    asked: list[int] = []
    read = FarBlocks.read

    def counting(self: FarBlocks, wanted: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        asked.append(len(wanted))
        return read(self, wanted, device)

    with torch.no_grad(), mp.compress(model, "infllm", BUDGET, **SMALL, offload=offload) as kept:
        model(ids, cache=kept)
        monkeypatch.setattr(FarBlocks, "read", counting)
        model(ids[:, :1], cache=kept)
        assert kept.stats().outside_bytes > 15 * 3 * 2 * 2 * 16 * 8
    assert asked == [2, 2]  # (14 - 1 - 4 - 3) / 3 blocks in each of two layers


@pytest.mark.parametrize("offload", ["host", pytest.param("disk", marks=pytest.mark.slow)])
def test_beams_forks_and_drafts_share_blocks(offload: str) -> None:
    model, (ids, _) = llama(), prompts(1, length=30)
    ids = torch.cat([ids, ids[:, :20]], 1)
    common: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    found = {}
    for place in ("none", offload):
        with torch.no_grad(), mp.compress(model, "infllm", BUDGET, **SMALL, offload=place) as kept:
            plain = model.generate(input_ids=ids, cache=kept, **common)
            kept.reset()
            drafted = model.generate(input_ids=ids, cache=kept, prompt_lookup_num_tokens=3, **common)
            kept.reset()
            beams = model.generate(input_ids=ids, cache=kept, num_beams=3, **common)
            kept.reset()
            model(ids, cache=kept)
            with kept.fork() as other:
                branch = model(ids[:, :1], cache=other).logits
            trunk = model(ids[:, :1], cache=kept).logits
            assert torch.equal(branch, trunk)
            found[place] = (plain.tolist(), drafted.tolist(), beams.tolist(), trunk.tolist())
    assert found["none"] == found[offload]


def test_documents_carry_their_blocks(tmp_path: Path) -> None:
    model, (ids, _) = llama(), prompts(1, length=50)
    steps = ids[:, :8].split(1, 1)
    for place in PLACES:
        with torch.no_grad(), mp.compress(model, "infllm", BUDGET, **SMALL, offload=place) as kept:
            read_document(model, kept, ids)
            save_document(kept, ids, tmp_path / place)
            expected = [model(one, cache=kept).logits for one in steps]
        restored, _ = restore_document(model, tmp_path / place)
        with torch.no_grad(), restored as again:
            assert again.stats().outside_bytes > 0
            found = [model(one, cache=again).logits for one in steps]
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("focus.far_0", lambda t: t[:, :1]),
        ("focus.far_1", lambda t: t[..., :3]),
        ("focus.far_0", lambda t: t.long()),
        ("focus.far_shape", lambda t: t + torch.tensor([0, 1, 0, 0])),
        ("focus.far_shape", lambda t: t * 1000),
        ("focus.far_1", None),
    ],
)
def test_damaged_blocks_are_a_typed_error(name: str, change: Any) -> None:
    model, (ids, _) = llama(), prompts(1, length=50)
    with torch.no_grad(), mp.compress(model, "infllm", BUDGET, **SMALL, offload="host") as kept:
        model(ids, cache=kept)
        stored = to_tensors(kept.layer_caches[0])
    with mp.compress(model, "infllm", BUDGET, **SMALL, offload="host") as kept:
        from_tensors(kept.layer_caches[0], dict(stored), 50, torch.device("cpu"))
    other = {key: t for key, t in stored.items() if key != name} | (
        {} if change is None else {name: change(stored[name])}
    )
    with mp.compress(model, "infllm", BUDGET, **SMALL, offload="host") as kept, pytest.raises(DataError):
        from_tensors(kept.layer_caches[0], other, 50, torch.device("cpu"))


def test_files_are_gone_and_a_full_disk_is_a_typed_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    turns("disk")
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(DataError, match="cannot be written"):
        turns("disk")


@pytest.mark.parametrize("offload", PLACES)
def test_the_engine_runs_it(offload: str) -> None:
    """Answers are those of blocks in the pool, and requests that are preempted and go on keep their blocks."""
    model = llama(dtype=torch.float32)
    found, pages = {}, {}
    for place in ("none", offload):
        options = {**SMALL, "offload": place}
        engine = Engine(model, method="infllm", options=options, budget=BUDGET, page_slots=4, max_step_tokens=64)
        for name in range(3):
            ids = tuple(text(1, 40 + 7 * name, seed=name)[0].tolist())
            engine.add(Request(request_id=str(name), prompt=ids, params=greedy(12, n=1 + name % 2)))
        outs = finish(engine)
        found[place] = {name: [c.token_ids for c in out.completions] for name, out in outs.items()}
        kv = [c.kv for out in outs.values() for c in out.completions]
        assert all(one is not None and one.evicted == 0 for one in kv)
        pages[place] = sum(one.kv_bytes for one in kv if one is not None)
        engine.close()
    assert found["none"] == found[offload]
    assert pages[offload] < pages["none"] / 2


# ------------------------------------------------------------------ number formats


@cache
def wide() -> LlamaForCausalLM:
    made: Any = build("LlamaConfig", "LlamaForCausalLM", **COMMON | {"hidden_size": 64, "head_dim": 32})
    return made


WIDE: dict[str, Any] = {"sinks": 4, "local": 16, "block": 64, "representatives": 4, "together": 16}


@pytest.mark.parametrize("place", ["auto", *PLACES])
@pytest.mark.parametrize(("codec", "bits"), [("int8", 10), ("kivi4", 7), ("fp8", 9)])
def test_number_formats_of_blocks(codec: str, bits: int, place: str) -> None:
    """Blocks are codes of the format, sinks and newest entries are as they were."""
    model, ids = wide(), text(1, 230)
    steps = text(1, 6, seed=3).split(1, 1)
    found, stats = {}, {}
    for name in (None, codec):
        with torch.no_grad(), mp.compress(model, "infllm", 180, codec=name or "f32", offload=place, **WIDE) as kept:
            logits = [model(ids, cache=kept).logits[:, -1:], *(model(one, cache=kept).logits for one in steps)]
            found[name], stats[name] = torch.cat(logits, 1), kept.stats()
            kept.check_integrity()
    blocks = (ids.shape[1] - 4 - 16) // 64
    numbers = 2 * 2 * 64 * 64 * blocks  # layers, heads, entries, numbers of a key and a value
    assert 0 < 8 * stats[codec].outside_bytes <= bits * numbers
    error = (found[codec] - found[None]).norm() / found[None].norm()
    assert 1e-7 < float(error) < (0.02 if codec == "int8" else 0.2)


def test_copies_keep_the_format_of_blocks_to_come() -> None:
    """A batch is repeated before there is any block; what comes later is codes in both rows."""
    model, ids = wide(), text(1, 230)
    with torch.no_grad(), mp.compress(model, "infllm", 180, codec="int8", **WIDE) as kept:
        model(ids[:, :20], cache=kept)
        kept.batch_repeat_interleave(2)
        model(ids[:, 20:].repeat(2, 1), cache=kept)
        blocks = 2 * ((ids.shape[1] - 4 - 16) // 64)
        assert 0 < 8 * kept.stats().outside_bytes <= 10 * 2 * 2 * 64 * 64 * blocks


def test_the_engine_runs_number_formats_of_blocks() -> None:
    ids = text(1, 230)
    with torch.no_grad(), mp.compress(wide(), "infllm", 180, codec="int8", **WIDE) as kept:
        out = wide().generate(input_ids=ids, attention_mask=torch.ones_like(ids), cache=kept, max_new_tokens=8)
    options = {"method": "infllm", "options": WIDE, "budget": 180, "codec": "int8", "max_step_tokens": 256}
    engine = Engine(wide(), kv_memory="4MiB", **options)
    for name in "ab":
        engine.add(Request(request_id=name, prompt=tuple(ids[0].tolist()), params=greedy(8)))
    for output in finish(engine).values():
        assert list(output.completions[0].token_ids) == out[0, 230:].tolist()
    engine.close()


def test_what_no_block_can_be() -> None:
    for codec, options, message in (
        ("int8", {"offload": "none"}, "give offload='host'"),
        ("int8", {"block": 32}, "give block=64 or a multiple"),
        ("rotated4", {}, "formats of plain groups"),
        ("think_kivi2", {}, "formats of plain groups"),
    ):
        with pytest.raises(OptionError, match=message):
            mp.compress(wide(), "infllm", 180, codec=codec, **WIDE | options)
    with pytest.raises(OptionError, match="offload"):
        mp.compress(wide(), "infllm", 180, **WIDE, offload="tape")


def test_runs_of_blocks_are_few() -> None:
    far = FarBlocks(BlockFormat("host", 2), (3, 5))
    keys, values = torch.randn(2, 100, 2, 3), torch.randn(2, 100, 2, 5)
    for n in range(100):
        far = far.with_more(keys[:, n : n + 1], values[:, n : n + 1])
    assert far.n == 100
    assert len(far._runs) <= 7
    ids = torch.tensor([0, 31, 32, 77, 99])
    found = far.read(ids, torch.device("cpu"))
    assert torch.equal(found[0], keys[:, ids])
    assert torch.equal(found[1], values[:, ids])


# ------------------------------------------------------------------ admission

#: Ten queries of a prompt look up one set of blocks.
TEN: dict[str, Any] = SMALL | {"together": 10}


def engine_of(offload: str, kv_memory: int | None) -> Engine:
    options = TEN | {"offload": offload}
    model = llama(dtype=torch.float32)
    engine_options: dict[str, Any] = {"budget": BUDGET, "page_slots": 4, "max_step_tokens": 25, "kv_memory": kv_memory}
    return Engine(model, method="infllm", options=options, **engine_options)


def crowd(offload: str, kv_memory: int | None, n: int = 1) -> tuple[dict[str, Any], int, int, int]:
    """Answers of some requests, how many ran at once, and bytes: reserved at most for one, and held at most."""
    engine = engine_of(offload, kv_memory)
    for name in range(6):
        ids = tuple(text(1, 120 + name, seed=name)[0].tolist())
        engine.add(Request(request_id=str(name), prompt=ids, params=greedy(20, n=n)))
    reserved = max(state.scheduled.memory_need.peak(n) for state in engine._requests)
    done: dict[str, Any] = {}
    at_once = held = 0
    while engine.busy:
        done |= {out.request_id: [c.token_ids for c in out.completions] for out in engine.step() if out.finished}
        at_once = max(at_once, engine.stats().running)
        held = max(held, engine._parts.memory.live_bytes)
    engine.check_integrity()
    assert engine.stats().preemptions == 0, "what was reserved is enough"
    engine.close()
    return done, at_once, reserved, held


@pytest.mark.parametrize(("n", "factor"), [(1, 2.0), pytest.param(2, 1.0, marks=pytest.mark.slow)])
def test_more_requests_run_at_once_than_if_blocks_stayed(n: int, factor: float) -> None:
    wide_pool, _, inside, _ = crowd("none", None, n)
    pool = int(inside * 2.2)
    few, few_at_once, _, _ = crowd("none", pool, n)
    many, many_at_once, outside, held = crowd("disk", pool, n)
    assert few == many == wide_pool
    assert few_at_once == 2
    assert many_at_once >= factor * few_at_once
    assert outside < inside / (0.85 * factor)
    assert held <= pool


def test_a_prompt_is_read_in_pieces_of_whole_lookups() -> None:
    """One whose entries would not fit the pool together."""
    ids, found = tuple(text(1, 305)[0].tolist()), {}
    request = Request(request_id="a", prompt=ids, params=greedy(6))
    cuts = set()
    for offload, kv_memory in (("none", None), ("disk", 80_000)):
        engine = engine_of(offload, kv_memory)
        engine.add(request)
        (state,) = engine._requests
        while engine.busy:
            (output,) = engine.step()[-1:] or [None]
            if offload == "disk":
                cuts.add(state.scheduled.num_computed_tokens)
        assert output is not None
        found[offload] = output.completions[0].token_ids
        engine.close()
    assert found["none"] == found["disk"]
    assert cuts == {*range(20, 305, 20), 305}
    few = engine_of("none", 80_000)
    with pytest.raises(mp.BudgetError, match="may need"):
        few.add(request)
    few.close()


def test_blocks_in_the_same_memory_are_counted() -> None:
    """Blocks in the host's memory, beside a pool that lies there too, take room of the same limit."""
    reserved = {}
    for place in ("none", "host", "disk"):
        engine = engine_of(place, None)
        engine.add(Request(request_id="a", prompt=tuple(text(1, 400)[0].tolist()), params=greedy(8)))
        reserved[place] = next(iter(engine._requests)).scheduled.reserved_bytes
        engine.close()
    numbers = 2 * 2 * 16 * 4  # layers, heads, numbers of an entry, bytes of each
    blocks = (408 - TEN["sinks"] - TEN["local"]) // TEN["block"]
    assert reserved["host"] - reserved["disk"] == blocks * TEN["block"] * numbers
    assert reserved["disk"] < reserved["none"] / 2


def test_no_pass_holds_more_pages_than_are_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of each layer's pass, before its blocks leave."""
    engine, held = engine_of("disk", None), [0]
    move_out = BlockRetrieval.move_out

    def looking(blocks: BlockRetrieval, table: PageTable, sequence: int) -> None:
        held.append(engine._parts.memory.live_bytes)
        move_out(blocks, table, sequence)

    monkeypatch.setattr(BlockRetrieval, "move_out", looking)
    engine.add(Request(request_id="a", prompt=tuple(text(1, 130)[0].tolist()), params=greedy(12)))
    (state,) = engine._requests
    need, unpaged = state.scheduled.memory_need, state.group.cache_factory.unpaged_bytes(130, 142)
    while state.scheduled.num_computed_tokens < 130:
        engine.step()
    assert (need.prefill - unpaged) / 2 < max(held) <= need.prefill - unpaged
    held.clear()
    finish(engine)
    assert (need.each - unpaged) / 2 < max(held) <= need.each - unpaged
    engine.close()
