"""The cost model and the search: sums of bytes, the linear program, and what is chosen."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

import millpond as mp
from millpond.cache.tiered.disk_tier import DiskTier
from millpond.cache.tiered.write_back import MAX_PATCHES
from millpond.engine.engine import Engine
from millpond.engine.memory_estimate import estimate
from millpond.engine.offload.cost import PLACES, BlockShape, CostModel, StepMemory, block_sweeps
from millpond.engine.offload.kv_size import KVSize, cache_layout, kv_size
from millpond.engine.offload.machine import Accelerator, MachineConstants
from millpond.engine.offload.model_size import ModelSize, model_size
from millpond.engine.offload.plan import ENGINE, EVERYTHING, Capabilities
from millpond.engine.offload.planner import EXAMPLE
from millpond.engine.offload.search import Limits, min_memory, predicted, search, solve, solve_linear
from millpond.engine.request import Request
from millpond.errors import BudgetError
from millpond.models.load import load_model
from millpond.models.weights.sizes import WeightSizes
from millpond.models.weights.skeleton import Skeleton
from millpond.runner.packed_model import PackedModel
from tests.helpers.hf.families import family

MiB = 2**20


@pytest.fixture(scope="module", params=["llama", "qwen3", "opt", "gpt_neox"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp(request.param)
    family(request.param).make().save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def recall() -> ModelSize:
    return model_size("pond-recall")


def cost_of(model: ModelSize, **kv: object) -> CostModel:
    chosen = {"method": "h2o", "budget": 64, **kv}
    return CostModel(model, kv_size(model, 256, 64, memory=64 * MiB, **chosen), EXAMPLE)  # type: ignore[arg-type]


def test_sizes_are_those_that_the_sweep_reads(folder: Path) -> None:
    found, sizes = model_size(folder), WeightSizes(Skeleton.of(folder))
    indices = range(len(sizes.layers))
    assert found.layer_bytes + found.end_bytes == sizes.kept_bytes(indices)
    assert found.slot_bytes == sizes.slot_bytes
    saved = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert found.n_bytes > 0.9 * saved


def test_shapes_are_those_of_a_loaded_model(folder: Path) -> None:
    packed = PackedModel(load_model(folder))
    try:
        assert model_size(folder).shapes == packed.layers
    finally:
        packed.close()


def test_a_step_is_counted_as_the_engine_counts_it(folder: Path) -> None:
    found = model_size(folder)
    cost = CostModel(found, kv_size(found, 20, 8, method="full"), EXAMPLE)
    for sequences, rows in ((1, 16), (7, 64), (200, 64), (40, 512)):
        block = BlockShape(sequences=sequences, micro_batch=sequences, prompt_rows=rows)
        step = StepMemory.of(found, step_tokens=rows, running=sequences)
        assert cost.step(block).by_purpose == step.by_purpose
        counted = {term.name: term.constant for term in cost.bytes(block)["host"]}
        assert {name: counted[name] for name in step.by_purpose} == dict(step.by_purpose)


def test_kv_is_what_requests_reserve(recall: ModelSize) -> None:
    for method, budget, codec in (
        ("full", None, "auto"),
        ("h2o", 64, "auto"),
        ("snapkv", 64, "int4"),
        ("h2o", 96, "int4"),
    ):
        layout = cache_layout(recall, method, {}, budget, codec)
        need = estimate(layout, 256, 64, 1)
        found = kv_size(recall, 256, 64, method=method, budget=budget, codec=codec)
        assert (found.reading, found.held) == (need.prefill, need.each)
    full, kept = cost_of(recall, method="full", budget=None).kv, cost_of(recall).kv
    assert full.held > 3 * kept.held
    per_token = sum(2 * s.n_kv_heads * s.key_dim * recall.dtype.itemsize for s in recall.shapes)
    assert full.step_bytes == pytest.approx((256 + 32) * per_token, rel=0.2)  # positions and scores besides


def test_bytes_of_a_plan_sum_to_less_than_its_memory(recall: ModelSize) -> None:
    cost = cost_of(recall)
    least = min_memory(cost)
    for memory in range(least, 2 * least, least // 7):
        plan = search(cost, Limits(memory=memory))
        assert plan.prediction is not None
        assert plan.prediction.total("host") <= memory
        parts = plan.prediction.bytes
        layers = parts["host"].get("weights", 0) + parts["disk"].get("weights", 0)
        assert layers == recall.layer_bytes
        assert plan.model == recall.fingerprint
        ENGINE.check(plan)


def test_least_memory_is_the_least_that_runs(recall: ModelSize) -> None:
    cost = cost_of(recall)
    least = min_memory(cost)
    search(cost, Limits(memory=least))
    with pytest.raises(BudgetError, match=f"below the smallest that runs, {least:,} bytes"):
        search(cost, Limits(memory=least - 1))


def test_more_memory_is_never_slower(recall: ModelSize) -> None:
    cost = cost_of(recall)
    least = min_memory(cost)
    rates = [search(cost, Limits(memory=least * n // 4)).prediction for n in (4, 5, 7, 10, 15)]
    found = [one.tokens_per_s for one in rates if one is not None]
    assert all(later >= 0.97 * earlier for earlier, later in pairwise(found))
    assert found[-1] > found[0]


def test_the_linear_program_agrees_with_filling_the_memory(recall: ModelSize) -> None:
    """Where only weights may lie in two places, the optimum is known: as many in memory as fit."""
    pytest.importorskip("scipy")
    cost, free = cost_of(recall), ["weights host", "weights disk", "kv host"]
    slow = replace(cost, machine=replace(EXAMPLE, read_per_s=1e6))  # bound by reading, so the optimum is unique
    for sequences in (1, 3, 8):
        block = BlockShape(sequences=sequences, micro_batch=sequences, prompt_rows=64)
        limits = Limits(memory=min_memory(cost) + 3 * MiB)
        shares, filled = solve_linear(slow, block, limits, free), solve(slow, block, limits)
        if shares is None or filled is None:
            assert shares is filled
            continue
        n = len(recall.layers)
        assert int(shares["weights host"] * n + 1e-6) == round(filled["weights host"] * n)


def test_kv_goes_to_disk_where_that_may_be(recall: ModelSize) -> None:
    pytest.importorskip("scipy")
    deep = replace(recall, layers=recall.layers * 8)
    cost = CostModel(deep, kv_size(deep, 1024, 64, method="full"), EXAMPLE)
    block = BlockShape(sequences=64, micro_batch=8, prompt_rows=64)
    limits = Limits(memory=cost.kv.held * 32)
    assert solve(cost, block, limits, Capabilities(kv=("host",))) is None
    shares = solve(cost, block, limits, ENGINE)
    assert shares is not None
    assert 0.2 < shares["kv disk"] < 1
    assert shares["kv host"] + shares["kv disk"] == pytest.approx(1)


@pytest.mark.parametrize(("method", "budget"), [("full", None), ("h2o", 256)])
def test_few_layers_on_a_disk_take_their_windows_too(recall: ModelSize, method: str, budget: int | None) -> None:
    """What a plan counts for some layers there is what requests reserve with as many."""
    deep = replace(recall, layers=recall.layers * 8)
    kv, layout = kv_size(deep, 1024, 64, method=method, budget=budget), cache_layout(deep, method, {}, budget, "auto")
    n = len(deep.layers)
    assert kv.window_held > kv.far_held / n
    for far in (1, 2, n // 2, n):
        need = estimate(layout, 1024, 64, 1, on_disk=frozenset(range(far)))
        share = far / n
        for near, all_far, window, reserved in (
            (kv.held, kv.far_held, kv.window_held, need.each),
            (kv.reading, kv.far_reading, kv.window_reading, need.prefill),
        ):
            assert (1 - share) * near + share * (all_far - window) + window == pytest.approx(reserved, rel=0.01)


def test_all_sequences_of_a_plan_are_admitted_at_once(recall: ModelSize) -> None:
    """With KV in both places: there is room for the last prompt while all others decode."""
    pytest.importorskip("scipy")
    deep = replace(recall, layers=recall.layers * 8)
    cost = CostModel(deep, kv_size(deep, 1024, 64, method="full"), EXAMPLE)
    layout, n = cache_layout(deep, "full", {}, None, "auto"), len(deep.layers)
    for sequences, near in ((24, 20), (40, 30), (64, 32), (64, 50)):
        block = BlockShape(sequences=sequences, micro_batch=8, prompt_rows=64)
        shares = solve(cost, block, Limits(memory=cost.kv.held * near), ENGINE)
        assert shares is not None
        plan = predicted(cost, block, shares)
        far = plan.kv_layers_on_disk(n)
        assert 0 < len(far) < n
        need = estimate(layout, 1024, 64, 1, on_disk=frozenset(far))
        assert plan.prediction is not None
        room = plan.prediction.bytes["host"]["kv"] + plan.prediction.bytes["host"]["kv on its way"]
        assert (sequences - 1) * need.each + need.peak(1) <= room


def test_a_device_holds_what_fits_it(recall: ModelSize) -> None:
    pytest.importorskip("scipy")
    machine = replace(EXAMPLE, accelerator=Accelerator(flops=1e13, memory_per_s=3e11, link_per_s=1e9))
    cost = replace(cost_of(recall), machine=machine)
    block = BlockShape(sequences=4, micro_batch=4, prompt_rows=64)
    near = sum(term.constant for term in cost.bytes(block)["device"])
    kv = cost.bytes(block)["device"][1].shares[PLACES.index("kv device")]  # with a prompt that is read
    everything = cost.model.layer_bytes + kv
    for share in (0.3, 1.01):
        limits = Limits(memory=64 * MiB, device_memory=int(near + share * everything))
        shares = solve(cost, block, limits, EVERYTHING)
        assert shares is not None
        on_device = shares["weights device"] * cost.model.layer_bytes + shares["kv device"] * kv
        assert on_device <= share * everything
    assert shares["weights device"] == 1


def test_diagonal_holds_the_mean_and_zigzag_the_last(recall: ModelSize) -> None:
    """Of full caches, with n >= s: the block grows by (2s + 2n) / (2s + n)."""
    cost = CostModel(recall, kv_size(recall, 1024, 1024, method="full"), EXAMPLE)
    held = {}
    for schedule in ("zigzag", "diagonal"):
        block = BlockShape(sequences=4, micro_batch=4, prompt_rows=64, schedule=schedule)  # type: ignore[arg-type]
        held[schedule] = cost.bytes(block)["host"][1].shares[PLACES.index("kv host")]
    assert held["zigzag"] / held["diagonal"] == pytest.approx(4 / 3, rel=0.02)


def test_the_bottleneck_is_named(recall: ModelSize) -> None:
    block = BlockShape(sequences=2, micro_batch=2, prompt_rows=64)
    far = {"weights disk": 1.0, "kv host": 1.0}
    for read, name in ((1e6, "disk reads"), (1e13, "compute")):
        cost = replace(cost_of(recall), machine=replace(EXAMPLE, read_per_s=read))
        found = predicted(cost, block, far).prediction
        assert found is not None
        assert found.decode_bound == found.prefill_bound == name
    slow = replace(cost_of(recall), machine=replace(EXAMPLE, read_per_s=1e6))
    found = predicted(slow, block, far).prediction
    assert found is not None
    assert found.decode_s == pytest.approx(63 * recall.layer_bytes / 1e6)
    sweeps = 9  # of the second prompt 63 tokens, since the first answer has a row in each of its sweeps
    assert found.prefill_s == pytest.approx(sweeps * recall.layer_bytes / 1e6)
    assert found.tokens_per_s == pytest.approx(2 * 64 / ((63 + sweeps) * recall.layer_bytes / 1e6))


def test_a_latency_bound_gives_smaller_blocks(recall: ModelSize) -> None:
    cost, memory = cost_of(recall), 64 * MiB
    free = search(cost, Limits(memory=memory)).prediction
    assert free is not None
    bound = search(cost, Limits(memory=memory, latency_s=free.seconds / 2)).prediction
    assert bound is not None
    assert bound.seconds <= free.seconds / 2
    assert bound.tokens_per_s <= free.tokens_per_s * 1.0001
    with pytest.raises(BudgetError, match="the quickest plan takes"):
        search(cost, Limits(memory=memory, latency_s=1e-6))


def test_the_chosen_plan_is_within_3_percent_of_every_block_that_fits(recall: ModelSize) -> None:
    cost, limits = cost_of(recall), Limits(memory=32 * MiB)
    best = search(cost, limits).prediction
    assert best is not None
    for sequences in range(1, 120, 7):
        for rows in (16, 100, 512):
            block = BlockShape(sequences=sequences, micro_batch=sequences, prompt_rows=rows, slots=0)
            shares = solve(cost, block, limits)
            if shares is not None:
                other = predicted(cost, block, shares).prediction
                assert other is not None
                assert other.tokens_per_s <= best.tokens_per_s / 0.96


def test_places_are_named_by_kind_and_tier() -> None:
    assert [place.split() for place in PLACES] == [
        [kind, tier] for kind in ("weights", "kv") for tier in ("device", "host", "disk")
    ]


def test_the_engine_counts_what_stays_in_memory_of_kv_on_a_disk(recall: ModelSize) -> None:
    """Of many layers little stays: positions and scores, a page of each head, and two layers at a time."""
    deep = replace(recall, layers=recall.layers * 8)
    full, h2o = (kv_size(deep, 1024, 64, method=method, budget=b) for method, b in (("full", None), ("h2o", 256)))
    n = len(deep.layers)
    assert 2 / n < full.far_held / full.held < 2 / n + 0.1
    assert full.far_reading < 0.2 * full.reading
    assert h2o.far_held / h2o.held > full.far_held / full.held, "a page of each head is more of a small cache"
    assert (full.overwrites, h2o.overwrites) == (False, True)
    block = BlockShape(sequences=4, micro_batch=4, prompt_rows=64)
    far = {"weights host": 1.0, "kv disk": 1.0}
    seconds = {
        name: {term.name: term.at(far) for term in CostModel(deep, kv, EXAMPLE).decode(block)}
        for name, kv in (("full", full), ("h2o", h2o))
    }
    decoding = CostModel(deep, full, EXAMPLE).sweeps(block).decoding  # 4 at first, fewer once the first have ended
    assert 2 < decoding < 4
    assert seconds["full"]["disk reads"] == pytest.approx(decoding * full.step_bytes / EXAMPLE.read_per_s)
    assert seconds["full"]["disk writes"] == pytest.approx(decoding * full.new_bytes / EXAMPLE.write_per_s)
    assert seconds["h2o"]["disk writes"] == pytest.approx(
        decoding * (h2o.new_bytes + h2o.step_bytes / MAX_PATCHES) / EXAMPLE.write_per_s
    )


def test_what_is_besides_the_products_is_counted(recall: ModelSize) -> None:
    """Each constant of the machine makes a sweep longer, by as much as it is called for."""
    cost, far = cost_of(recall), {"weights disk": 1.0, "kv host": 1.0}
    block = BlockShape(sequences=4, micro_batch=4, prompt_rows=64)
    course, n = cost.sweeps(block), len(recall.layers)

    def compute(machine: MachineConstants) -> tuple[float, float]:
        changed = replace(cost, machine=machine)
        found = [changed.prefill(block), changed.decode(block)]
        prefill, decode = (next(term for term in terms if term.name == "compute").at(far) for terms in found)
        return prefill, decode

    before = compute(EXAMPLE)
    for name, prefill, decode in (
        ("step_s", 1.0, 1.0),
        ("layer_s", n, n),
        ("sequence_s", n * course.meanwhile, n * course.decoding),
        ("piece_s", n * course.pieces, 0.0),
        ("prompt_s", n * course.ends, 0.0),
    ):
        after = compute(replace(EXAMPLE, calls=replace(EXAMPLE.calls, **{name: getattr(EXAMPLE.calls, name) + 1.0})))
        assert [late - early for late, early in zip(after, before, strict=True)] == pytest.approx([prefill, decode])
    assert compute(replace(EXAMPLE, disk_calls=EXAMPLE.calls)) == before, "no KV is on the disk"
    far = {**far, "kv host": 0.0, "kv disk": 1.0}
    near, doubled = compute(EXAMPLE), replace(EXAMPLE.disk_calls, piece_s=2 * EXAMPLE.disk_calls.piece_s)
    assert compute(replace(EXAMPLE, disk_calls=doubled))[0] - near[0] == pytest.approx(n * course.pieces * 5e-3)
    far = {**far, "kv host": 1.0, "kv disk": 0.0}
    slower = compute(replace(EXAMPLE, attention=EXAMPLE.attention / 2))
    assert slower[0] - before[0] == pytest.approx(
        course.prompt_rows * cost.kv.prompt_flops / cost.kv.prompt / EXAMPLE.attention
    )
    idle, busy = (compute(replace(EXAMPLE, read_cpu_s=1e-9, threads=2, cores=cores)) for cores in (3, 2))
    assert busy[1] - idle[1] == pytest.approx(recall.layer_bytes * 1e-9 / 2)


def test_products_of_codes_have_a_rate_of_their_own(recall: ModelSize) -> None:
    slow = replace(EXAMPLE, flops={**EXAMPLE.flops, "int4": {1: 1e9, 1024: 1e9}})
    block = BlockShape(sequences=4, micro_batch=4, prompt_rows=64)
    plain, codes = (
        CostModel(replace(recall, weights=weights), cost_of(recall).kv, slow).prefill(block)[-1].constant
        for weights in (None, "int4")
    )
    assert codes > 5 * plain


def test_answers_of_one_token_end_with_their_prompts(recall: ModelSize) -> None:
    cost = CostModel(recall, kv_size(recall, 64, 1, method="h2o", budget=32), EXAMPLE)
    found = search(cost, Limits(memory=32 * MiB)).prediction
    assert found is not None
    assert found.decode_s == 0 < found.prefill_s


def test_prompts_whose_kv_goes_to_the_disk_take_their_reads_and_writes(recall: ModelSize) -> None:
    """Two prompts of 100 tokens, 40 rows in a sweep, and one answer token each, so that none decodes."""
    kv = replace(
        cost_of(recall).kv,
        prompt=100,
        new=1,
        prompt_bytes=1e8,
        kept_bytes=3e7,
        new_bytes=1e6,
        step_bytes=0.0,
        step_flops=0.0,
        settles=True,
        overwrites=False,
    )
    calls = replace(EXAMPLE.calls, step_s=0.0, layer_s=0.0, sequence_s=0.0, piece_s=0.0, prompt_s=0.0)
    machine = replace(
        EXAMPLE,
        read_per_s=2e8,
        write_per_s=5e7,
        read_cpu_s=0.0,
        calls=calls,
        disk_calls=calls,
        attention=1e30,
        flops={name: {1: 1e30} for name in EXAMPLE.flops},
    )
    block = BlockShape(sequences=2, micro_batch=2, prompt_rows=40)
    far = {"weights host": 1.0, "kv disk": 1.0}

    def seconds(kv: KVSize) -> dict[str, float]:
        return {term.name: term.at(far) for term in CostModel(recall, kv, machine).prefill(block)}

    # Sweeps read tokens 0-40, 40-80, 80-100 and 0-20, 20-60, 60-100: before these 0, 40, 80, 20 and 60 of a prompt.
    course = CostModel(recall, kv, machine).sweeps(block)
    assert (course.prefill, course.prompt_rows, course.again, course.ends) == (5, 40, 40, 0.4)
    came = 40 * 1e6 + 0.4 * 1e8
    left = 40 * 1e6 + 0.4 * 3e7
    planned = seconds(kv)
    assert planned["disk reads"] == pytest.approx(came / 2e8)
    assert planned["disk writes"] == pytest.approx(left / 5e7)
    assert planned["compute"] == pytest.approx((came + left) / 1e9 + 0.4 * 1e8 / 2e8)
    kept = seconds(replace(kv, settles=False))
    assert kept["disk reads"] == pytest.approx(40 * 1e6 / 2e8)
    assert kept["disk writes"] == pytest.approx(40 * 1e6 / 5e7)
    assert kept["compute"] == pytest.approx(80 * 1e6 / 1e9)


def test_the_tier_reads_of_prompts_what_is_counted(recall: ModelSize, tmp_path: Path) -> None:
    """A prompt in pieces: bytes of files beyond the decoded tokens are those of the terms, in whole pages."""
    model = load_model("pond-recall", "bf16")
    for method, budget in (("full", None), ("snapkv", 64)):
        tier = DiskTier(tmp_path, range(len(recall.layers)))
        engine = Engine(model, method=method, budget=budget, max_step_tokens=64, tier=tier)
        params = mp.SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
        engine.add(Request(request_id="a", prompt=tuple(n % 50 + 5 for n in range(256)), params=params))
        for _ in range(4):
            engine.step()
        kv = kv_size(recall, 256, 2, method=method, budget=budget)
        assert kv.settles == (method == "snapkv")
        assert kv.prompt_bytes == 256 * kv.new_bytes
        again = block_sweeps(1, 256, 2, 64).again * 4
        assert again == 64 + 128 + 192
        assert tier.bytes_read == pytest.approx(again * kv.new_bytes + kv.settles * kv.prompt_bytes, rel=0.05)
        assert tier.bytes_written == pytest.approx(kv.prompt_bytes + kv.settles * kv.kept_bytes, rel=0.05)
        engine.close()
