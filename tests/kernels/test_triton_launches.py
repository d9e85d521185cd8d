"""How many kernels a decoding step launches on a GPU, layer by layer: torch's, and those in Triton."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

pytest.importorskip("triton", reason="Triton is not installed (pip install 'millpond[gpu]')")

import millpond as mp
from millpond.cache.batch_cache import BatchCache
from millpond.cache.layer.layer_cache import LayerCache
from millpond.cache.pages.memory_limit import MemoryLimit
from millpond.cache.pages.pool_set import PoolSet
from millpond.cache.state.positions import PositionTracker
from millpond.codec import resolve
from millpond.kernels import gpu, linear, ops
from millpond.kernels.args import AttentionShape, EntryRows
from millpond.kernels.decode_rules import KEEP_ALL, DecodeRule, Evict, Reduce, Signal
from millpond.kernels.gpu.common import INTERPRET
from millpond.kernels.packed.layout import Format
from millpond.methods import METHODS
from millpond.models.cache_argument import cache_argument
from millpond.models.lean.decode_graph import DecodeGraph
from millpond.models.lean.describe import describe
from tests.helpers.hf.families import family, text
from tests.helpers.kernels.make import Call, Case
from tests.helpers.kernels.packed_make import PackedCase, side
from tests.kernels.test_triton_window import paged

if not INTERPRET:
    pytest.skip("launches are counted in the interpreter of Triton", allow_module_level=True)

#: Ops of torch that launch nothing, besides views.
NOTHING = {"empty", "empty_like", "_unsafe_view", "promote_types"}
DECODE: Any = importlib.import_module("millpond.kernels.gpu.decode")  # the package shows the function under this name
EXECUTOR: Any = importlib.import_module("triton.runtime.interpreter").GridExecutor


class Launches(TorchDispatchMode):
    """Counts kernels by name; of a product that adds a matrix, the copy of that matrix too."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        is_view = any(out.alias_info is not None and not out.alias_info.is_write for out in func._schema.returns)
        if not is_view and name not in NOTHING:
            self.counts[name] += 1
            if name == "addmm" and args[0].ndim == 2:
                self.counts["copy"] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def launches() -> Iterator[Counter[str]]:
    """Counts what is launched inside."""
    mode, run = Launches(), EXECUTOR.__call__

    def launch(this: Any, *args: Any, **kwargs: Any) -> None:
        mode.counts[this.fn.__name__] += 1
        with _disable_current_modes():
            run(this, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad(), mode:
        patch.setattr(EXECUTOR, "__call__", launch)
        yield mode.counts


def of_a_layer(name: str, **options: Any) -> Counter[str]:
    """Launches of one more layer, outside its attention."""
    found = []
    for layers in (2, 3):
        model = family(name).make(num_hidden_layers=layers, **options)
        decoder, seen = describe(model).decoder, torch.zeros(3, model.config.hidden_size)

        def attend(index: int, q: Tensor, k: Tensor, v: Tensor, seen: Tensor = seen) -> Tensor:
            return seen

        ids = torch.arange(1, 4)
        with launches() as counts:
            decoder.forward(ids, ids + 5, attend, torch.arange(3))
        found.append(counts)
    return found[1] - found[0]


def of_attention(case: Case | PackedCase) -> Counter[str]:
    """Launches of the attention of a layer, its scores and its eviction."""
    call = case.build()
    args = call.args() if isinstance(call, Call) else call.plain.args(call.packed)
    gpu.decode(args)  # tables of the layout are made once
    with launches() as counts:
        gpu.decode(args)
    return counts


PRODUCTS = {"mm": 2, "addmm_": 2}
LAYERS = {
    "llama": {**PRODUCTS, "normalize_rows": 2, "rotate_heads": 1, "gate_rows": 1},
    "qwen2": {"addmm": 1, "mm": 1, "addmm_": 2, "normalize_rows": 2, "rotate_heads": 1, "gate_rows": 1},
    "qwen3": {**PRODUCTS, "normalize_rows": 4, "rotate_heads": 1, "gate_rows": 1},
    "gpt_neox": {"addmm": 4, "add_": 2, "normalize_rows": 2, "rotate_heads": 1, "gate_rows": 1},
    "opt": {"addmm": 4, "add_": 2, "normalize_rows": 2, "gate_rows": 1, "mul": 1},
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_without_its_attention(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLPOND_KERNELS", "gpu")
    assert of_a_layer(name) == LAYERS[name]
    monkeypatch.setenv("MILLPOND_KERNELS", "reference")
    assert not of_a_layer(name).keys() & {"normalize_rows", "rotate_heads", "gate_rows"}


BY_SCORE = DecodeRule(Signal.SUM, Reduce.MEAN, Evict.ACC, sinks=4)
#: Rules, how wide tables are scored by `settle`, and what is launched besides.
RULES = [(KEEP_ALL, 4096, {}), (BY_SCORE, 4096, {"settle": 1}), (BY_SCORE, 0, {"settle": 1, "score": 1})]


@pytest.mark.parametrize(("rule", "whole", "more"), RULES)
def test_attention_over_numbers(
    rule: DecodeRule, whole: int, more: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DECODE, "TUNING", DECODE.TUNING._replace(whole=whole))
    case = Case([40, 40], 2, 1, 4, 64, 64, 16, torch.bfloat16, rule=rule)
    assert of_attention(case) == {"attend": 1, "combine": 1, **more}


def test_attention_over_codes_that_are_read_one_by_one() -> None:
    plain = Case([40, 40], 2, 1, 4, 64, 64, 16, torch.bfloat16)
    counts = of_attention(PackedCase(plain, [64, 64], side(Format.NUQ4, group=32), side(Format.NUQ4, group=16), 32))
    assert counts == {"attend": 1, "attend_packed": 1, "combine": 1}


@pytest.mark.parametrize("format", [Format.INT4, Format.INT8])
@pytest.mark.parametrize(("rule", "whole", "more"), RULES)
def test_attention_over_numbers_and_codes(
    format: Format, rule: DecodeRule, whole: int, more: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DECODE, "TUNING", DECODE.TUNING._replace(whole=whole))
    plain = Case([40, 40], 2, 1, 4, 64, 64, 16, torch.bfloat16, rule=rule)
    counts = of_attention(PackedCase(plain, [96, 96], side(format, group=32), side(format, group=16), 32))
    more = {name: 2 if name == "score" else n for name, n in more.items()}
    assert counts == {"attend_both": 1, "combine": 1, **more}


@pytest.mark.parametrize("given", [{}, {"masses": True, "has_sink": True, "window": 40}])
def test_attention_of_a_few_queries_to_every_entry(given: dict[str, Any]) -> None:
    """Four regions, as of several layers; `_local_scalar_dense` would be the wait for a number."""
    pages = paged(**given)
    entries = pages.over(gpu.read(pages.regions, pages.width))
    known = replace(entries, lse=torch.zeros(entries.q.shape[:2]))
    for op, args, expected in (
        (gpu.window_sums, pages, {"window_parts": 1, "window_shares": 1}),
        (gpu.window_signal, entries, {"window_parts": 1, "window_shares": 1}),
        (gpu.window_signal, known, {"window_shares": 1}),
    ):
        with launches() as counts:
            op(args)
        assert counts == expected


def test_codes_of_a_run_of_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two launches, and one number that is read: whether there are numbers that no code can hold."""
    monkeypatch.setenv("MILLPOND_KERNELS", "gpu")
    plain = Case([40, 40], 2, 1, 4, 64, 64, 16, torch.bfloat16)
    call = PackedCase(plain, [64, 64], side(Format.INT4, True, 32), side(Format.INT4), 64).build()
    index, (start, count) = torch.arange(64).int().repeat(2, 1), np.array([[0, 0], [64, 64]], dtype=np.int32)
    there = torch.from_numpy(start), torch.from_numpy(count)
    rows = EntryRows(*there, index, call.keys, call.values, call.positions, on_host=(start, count))
    with launches() as counts:
        ops.write_packed(call.packed, rows)
    assert counts == {"zeros": 1, "encode": 2, "_local_scalar_dense": 1}


def of_a_prompt(
    monkeypatch: pytest.MonkeyPatch, method: str = "full", n: int = 136, dim: int = 64, **options: Any
) -> tuple[Counter[str], int]:
    """Launches of one more layer that reads a prompt, and how often it waits for the device."""
    found, waits = [], []
    move = Tensor.cpu
    for layers in (2, 3):
        copies = Counter[str]()

        def cpu(self: Tensor, copies: Counter[str] = copies) -> Tensor:
            copies["cpu"] += 1
            return move(self)

        monkeypatch.setattr(Tensor, "cpu", cpu)
        model = family("llama").make(num_hidden_layers=layers, head_dim=dim)
        with mp.compress(model, method, **options) as cache, launches() as counts:
            model(text(1, n), **cache_argument(cache), use_cache=True)
        monkeypatch.setattr(Tensor, "cpu", move)
        found.append(counts)
        waits.append(counts["_local_scalar_dense"] + copies["cpu"])
    return found[1] - found[0], waits[1] - waits[0]


def test_a_prompt_that_is_quantized_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """What that adds to a prompt that stays as it is; `flexgen4` leaves sinks out of the order of entries."""
    monkeypatch.setenv("MILLPOND_KERNELS", "gpu")
    plain, waits = of_a_prompt(monkeypatch, codec="bf16")
    for codec, more in (("int4", 6), ("flexgen4", 17)):
        coded, coded_waits = of_a_prompt(monkeypatch, codec=codec)
        assert coded["encode"] == 2
        assert coded.total() - plain.total() <= more, coded - plain
        assert coded_waits <= waits + 1


#: Of a step besides its layers: embeddings, angles, the last norm, the head and what joins the layers' sums.
OUTSIDE = 20
OF_A_LAYER = {"mm": 2, "addmm_": 2, "normalize_rows": 2, "gate_rows": 1, "combine": 1}


@pytest.mark.parametrize(
    ("rule", "format", "more"),
    [
        (KEEP_ALL, None, {"rotate_heads": 1}),
        (BY_SCORE, None, {"settle": 1}),
        (KEEP_ALL, Format.INT4, {"rotate_heads": 1}),
        (BY_SCORE, Format.INT4, {"rotate_heads": 1, "settle": 1}),
    ],
    ids=["full", "h2o", "int4", "h2o int4"],
)
def test_a_whole_step(
    rule: DecodeRule, format: Format | None, more: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is recorded as a graph; products may launch one more each, to add their parts (two do on an H200)."""
    monkeypatch.setenv("MILLPOND_KERNELS", "gpu")
    monkeypatch.setattr(linear, "_on_cpu", lambda dtype: True)  # else weights are widened first
    totals, found = [], []
    for layers in (2, 3):
        model = family("llama").make(num_hidden_layers=layers, head_dim=32).bfloat16()
        graph, ids = DecodeGraph(describe(model).decoder.forward, record=nothing_recorded), torch.arange(1, 9)
        regions = []
        for layer in range(layers):
            caps = [10 if format is None else 42] * 16
            plain = Case([10] * 16, 8, 2, 2, 32, 32, 16, torch.bfloat16, caps=caps, rule=rule, seed=layer)
            if format is None:
                regions.append(plain.build().args().regions)
            else:
                call = PackedCase(plain, [32] * 16, side(format, group=32), side(format, group=32), 32).build()
                regions.append(call.plain.args(call.packed).regions)
        regions = [replace(one, q_pos=regions[0].q_pos) for one in regions]
        with launches() as counts:
            graph._compute(ids, ids + 100, regions, [None] * layers)
        found.append(counts)
        totals.append(counts.total())
    of_a_layer = {**OF_A_LAYER, "attend" if format is None else "attend_both": 1, **more}
    assert found[1] - found[0] == of_a_layer
    assert sum(of_a_layer.values()) == 10 + (len(more) > 1)
    assert totals[1] <= 3 * 12 + OUTSIDE, found[1]


def nothing_recorded(work: Any, device: torch.device) -> Any:
    raise AssertionError("steps are launched here")


#: Launches of the plans of a prompt in all layers: the choice, the move, and what makes the scores.
OF_ALL_PLANS = {
    "h2o": {"_read_scores": 1, "arange": 1, "select": 1, "move": 1},
    "streaming": {"arange": 1, "_to_copy": 1, "select": 1, "move": 1},
    "snapkv": {"cat": 1, "window_parts": 1, "window_shares": 1, "select": 1, "move": 1},
    "ada": {"cat": 1, "window_parts": 1, "window_shares": 1, "share": 1, "select": 1, "move": 1},
}


@pytest.mark.parametrize("name", OF_ALL_PLANS)
def test_the_plans_of_all_layers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLPOND_KERNELS", "gpu")
    found = []
    for layers in (2, 5):
        batch_cache = prompt_of_layers(name, layers)
        with launches() as counts:
            batch_cache.run_plans()
        found.append(counts)
    assert found[0] == found[1]
    assert "_local_scalar_dense" not in found[0], "the host waits for the device"
    assert found[0].items() >= OF_ALL_PLANS[name].items(), found[0]
    assert found[0].total() <= len(OF_ALL_PLANS[name]) + (name in ("snapkv", "ada")) * 20


@pytest.mark.parametrize(("name", "more"), [("full", {}), ("h2o", {"_read_scores": 1, "select": 1})])
def test_the_codes_of_all_layers(name: str, more: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The host waits once for all of them, to see whether there are numbers that no code can hold."""
    monkeypatch.setenv("MILLPOND_KERNELS", "gpu")
    found = []
    for layers in (2, 4):
        batch_cache = prompt_of_layers(name, layers, "int4", n=160, budget=144)
        with launches() as counts:
            batch_cache.run_plans()
        assert all(one.table is not None and one.table.packed_parts[0].lens.all() for one in batch_cache.layers)
        found.append(counts)
    assert found[0] == found[1]
    assert found[0].items() >= {"_read": 1, "encode": 2, "_local_scalar_dense": 1, "move": 1, **more}.items(), found[0]
    assert found[0].total() <= 10 + len(more), found[0]


#: The most launches of a layer that a prompt takes beyond those of `full`, if it is planned as it is read.
BESIDES_FULL = {"h2o": 8, "window": 8, "snapkv": 20, "ada": 32}
#: Reads of the device: scores are looked at once they are there, and heads that compete tell how much each keeps.
WAITS = {"h2o": 1, "window": 1, "snapkv": 1, "ada": 2}


def test_a_plan_as_a_layer_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLPOND_KERNELS", "gpu")
    plain, waits = of_a_prompt(monkeypatch, n=64, dim=16)
    for name, more in BESIDES_FULL.items():
        planned, planned_waits = of_a_prompt(monkeypatch, name, n=64, dim=16, budget=40)
        assert planned.total() - plain.total() <= more, planned - plain
        assert planned_waits - waits <= WAITS[name]


def prompt_of_layers(name: str, layers: int, codec: str = "bf16", n: int = 60, budget: int = 40) -> BatchCache:
    """A prompt of `n` tokens that every layer has read, its plans waiting."""
    policy, tracker = METHODS.get(name)(), PositionTracker()
    pools = PoolSet(resolve(codec), 16, MemoryLimit(None), masses=False)
    cache = BatchCache(
        [
            LayerCache(
                index,
                policy,
                lambda *_: budget,
                pools.plain,
                tracker,
                between_chunks=False,
                quantized=pools.make_quantized,
                reading=pools.reading,
            )
            for index in range(layers)
        ],
        tracker,
    )
    cache.reading = True
    cache.begin(torch.zeros(1, n, dtype=torch.int64))
    for layer_cache in cache.layers:
        q, k, v = (torch.randn(1, heads, n, 32).bfloat16() for heads in (4, 2, 2))
        layer_cache.attend(q, k, v, None, AttentionShape(0.25))
    return cache
