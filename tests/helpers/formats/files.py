"""Kept files of measurements, plans and trained parts: how each is written, and what is in it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load
from torch import Tensor

import millpond as mp
from millpond.budget import Budget
from millpond.cache.paging.predictor import N_WEIGHTS, load_weights, save_weights
from millpond.cli.chat import ChatSession
from millpond.cluster.layout_file import load_plan as load_workers
from millpond.codec.calibration import Calibration, Numbers, load_calibration
from millpond.engine.offload.machine import ROWS, WEIGHTS, CallTimes, MachineConstants
from millpond.engine.offload.machine_file import read as read_machine
from millpond.engine.offload.machine_file import write as write_machine
from millpond.engine.offload.plan import load_plan, save_plan
from millpond.hf.calibration.load import model_mark
from millpond.hf.calibration.measure import calibrate
from millpond.hf.fit import Fit, FitRow, load_fit
from millpond.hf.offline import find_patterns, save_filters
from millpond.inspector.trace import Change, HeadTrace, Trace, read_trace
from millpond.policy.trained.file import gates_of, heads_of, save_heads
from millpond.policy.trained.networks import Gates, LayerGate, LayerHeads, RetainingHeads
from millpond_lab.cluster_plan.layout import CacheSize, ClusterLayout, MoveTimes, WorkerPlan
from millpond_lab.cluster_plan.place import Goodput
from millpond_lab.cluster_plan.profile import DecodeTimes, StepTimes
from millpond_lab.cluster_plan.profile_file import Profile, load_profile, save_profile
from millpond_lab.cluster_plan.report import Verdict
from millpond_lab.cluster_plan.report import save_plan as save_workers
from tests.helpers.formats.documents import CALIBRATION, GATE
from tests.helpers.formats.engine_files import PLAN
from tests.helpers.formats.model import DATA, ids, of_heads, prompt

MARK = "m" * 64


@dataclass(frozen=True)
class Kept:
    """A kept file.

    Attributes:
        write: makes it. values: what is in it, as JSON has it. again: writes what was read from one to another place;
            None: nothing reads it whole, but a method.
    """

    write: Callable[[Path], object]
    values: Callable[[Path], Any]
    again: Callable[[Path, Path], object] | None


def parts(data: bytes) -> tuple[Any, dict[str, Tensor]]:
    """What a safetensors file says of itself, without what is drawn from the rest, and its tensors."""
    n = int.from_bytes(data[:8], "little")
    said: dict[str, str] = json.loads(data[8 : 8 + n]).get("__metadata__") or {}
    about = {name: text for name, text in said.items() if name != "seal"}
    if "about" in about:  # of a chunk
        return json.loads(about["about"]), load(data)
    return about, load(data)


def same(one: bytes, other: bytes) -> bool:
    """Whether two files hold the same; safetensors writes their headers in any order."""
    if one[8:9] != b"{":
        return one == other
    (said, tensors), (also, others) = parts(one), parts(other)
    return (
        said == also
        and tensors.keys() == others.keys()
        and all(
            tensor.dtype == others[name].dtype and torch.equal(tensor, others[name]) for name, tensor in tensors.items()
        )
    )


# ---------------------------------------------------------------------- plans and constants


def _machine() -> MachineConstants:
    return MachineConstants(
        read_per_s=1e9,
        write_per_s=2e9,
        burst_per_s=3e9,
        memory_per_s=4e9,
        attention=5e10,
        read_cpu_s=6e-10,
        flops={name: {rows: 1e9 * rows for rows in ROWS} for name in WEIGHTS},
        calls=CallTimes(step_s=1e-3, layer_s=2e-3, sequence_s=3e-3, piece_s=4e-3, prompt_s=5e-3),
        disk_calls=CallTimes(step_s=6e-3, layer_s=7e-3, sequence_s=8e-3, piece_s=9e-3, prompt_s=1e-2),
        settled=False,
        folder="models",
        hardware="a machine",
        threads=2,
        cores=3,
        date="2026-11-27",
    )


def _machine_values(path: Path) -> Any:
    found = read_machine(path)
    assert found is not None
    calls = [
        [one.step_s, one.layer_s, one.sequence_s, one.piece_s, one.prompt_s] for one in (found.calls, found.disk_calls)
    ]
    rates = [
        found.read_per_s,
        found.write_per_s,
        found.burst_per_s,
        found.memory_per_s,
        found.attention,
        found.read_cpu_s,
    ]
    rows = {name: found.rate(name, 64) for name in WEIGHTS}
    return [rates, calls, rows, found.settled, found.folder, found.hardware, found.threads, found.cores, found.date]


def _read_machine_again(path: Path, to: Path) -> None:
    found = read_machine(path)
    assert found is not None
    write_machine(to, found)


def _plan_values(path: Path) -> Any:
    found = load_plan(path)
    told = found.prediction
    assert told is not None
    return [
        dict(found.weights),
        dict(found.kv),
        found.ends,
        found.schedule,
        found.micro_batch,
        found.block,
        found.prompt_rows,
        found.slots,
        found.model,
        told.seconds,
        told.prefill_s,
        told.decode_s,
        told.tokens_per_s,
        told.prefill_tokens_per_s,
        told.decode_tokens_per_s,
        told.prefill_bound,
        told.decode_bound,
        {tier: dict(of) for tier, of in told.bytes.items()},
        dict(told.what_if),
    ]


def _profile() -> Profile:
    decode = (DecodeTimes(16, 0.01, 1e-7, 1e-4), DecodeTimes(None, 0.02, 2e-7, 2e-4))
    times = {n: StepTimes(0.005 / n, 1e-5 / n, 1e-9, decode, 0.002) for n in (1, 2)}
    cache = CacheSize(4096.0, 1024.0, Budget.parse("25%"), False)
    return Profile("kept", times, cache, 64, True, "by hand", 300, MoveTimes(0.004, 1e-8, 0.002, 2e-8))


def _profile_values(path: Path) -> Any:
    found = load_profile(str(path))
    times = [
        [n, one.read_base, one.per_token, one.per_square, one.per_prompt]
        + [[part.most, part.base, part.per_entry, part.per_answer] for part in one.decode]
        for n, one in sorted(found.times.items())
    ]
    cache, moves = found.cache, found.moves
    return [
        found.name,
        times,
        cache.entry_bytes,
        cache.stored_bytes,
        str(cache.budget),
        cache.grows,
        found.head_dim,
        found.fixed,
        found.note,
        found.step_tokens,
        moves.packing(1000),
        moves.taking_in(1000),
    ]


def _write_workers(path: Path) -> None:
    times = StepTimes(1.0, 0.1, 0.0, (DecodeTimes(None, 1.0, 0.0, 0.0),), 0.0)
    best = Goodput(ClusterLayout(tuple(WorkerPlan(role, times) for role in ("prefill", "decode"))), (1.0, 1.5), 8.0)  # type: ignore[arg-type]
    save_workers(path, [best], Verdict(best, True, ("Split: twice per device.",)), 4)


def _workers_values(path: Path) -> Any:
    found = load_workers(str(path))
    said = json.loads(path.read_text(encoding="utf-8"))
    return [found.replicas, found.prefill, found.decode, found.devices, said]


# ---------------------------------------------------------------------- measured on a model


def _fit() -> Fit:
    rows = tuple(
        FitRow(budget, codec, share, tuple(round(kl * (1 + i / 45), 9) for i in range(45)))
        for budget, codec, share, kl in (
            ("16", "int4", 0.2, 0.25),
            ("50%", "bf16", 0.5, 0.0625),
            (None, "int8", 0.75, 0.01),
        )
    )
    return Fit(model_mark(of_heads(8)), "LlamaForCausalLM", "h2o", {"sinks": 2}, "t" * 64, 150, 5, rows)


def _fit_values(path: Path) -> Any:
    found = load_fit(path)
    with mp.compress(of_heads(8), "h2o", "auto", max_kl=0.125, fit=path, sinks=2) as cache:
        chosen = str(cache.budget)
    rows = [[row.budget, row.codec, row.bytes_share, list(row.kl)] for row in found.rows]
    texts = [found.model, found.name, found.method, dict(found.options), found.text]
    return [*texts, found.context, found.continuation, rows, chosen]


def _write_calibration(path: Path) -> None:
    found = calibrate(of_heads(32, 1, 1), torch.tensor(prompt(400, 5)), bits=(4,), windows=2, length=100)
    (layer,) = found.layers
    table = layer.values[4].table
    cuts = tuple((a + b) / 2 for a, b in itertools.pairwise(table))
    replace(found, layers=(replace(layer, values={4: Numbers(table, cuts)}),), outliers=0.015625, sinks=2).save(path)


def _calibration_values(path: Path) -> Any:
    found: Calibration = load_calibration(path)
    (layer,) = found.layers
    tables = [[list(one[4].table), list(one[4].cuts)] for one in (layer.keys, layer.values)]
    ranges = [layer.key_scale.tolist(), layer.key_zero.tolist()]
    return [found.model, found.name, found.outliers, found.sinks, found.bits, ranges, tables, found.digest()]


def _steps(*shape: int) -> Tensor:
    """Numbers of a trained part, which bfloat16 holds."""
    n = int(np.prod(shape))
    return ((torch.arange(n) * 7 % 23 - 11) / 32).reshape(shape)


def _write_heads(path: Path) -> None:
    layers = [
        LayerHeads(_steps(4, 64), _steps(4), _steps(2, 4), _steps(2), torch.linspace(-3, 3, 257).repeat(2, 1))
        for _ in range(2)
    ]
    save_heads(RetainingHeads(layers, model_mark(of_heads(8)), "LlamaForCausalLM", {"data": "none", "steps": 3}), path)


def _write_gate(path: Path) -> None:
    layers = [
        LayerGate(_steps(8, 64), _steps(4, 64), _steps(4, 64), _steps(4, 72), _steps(4), _steps(2, 4), _steps(2))
        for _ in range(2)
    ]
    save_heads(Gates(layers, model_mark(of_heads(8)), "LlamaForCausalLM", {"steps": 4}), path)


def _read_heads(path: Path) -> RetainingHeads | Gates:
    return (gates_of if path.name == GATE else heads_of)(path.read_bytes(), path.name)


def _heads_values(path: Path) -> Any:
    found = _read_heads(path)
    parts = [
        layer.w1[0, :3].tolist() + layer.b1.tolist() + layer.w2[1].tolist() + layer.b2.tolist()
        for layer in found.layers
    ]
    more = [
        layer.quantiles[1, :2].tolist()
        if isinstance(layer, LayerHeads)
        else [layer.wq[5, :3].tolist(), layer.wk[1, :3].tolist(), layer.wv[2, :3].tolist()]
        for layer in found.layers
    ]
    return [found.model, found.name, dict(found.facts), parts, more]


@torch.no_grad()
def _written_by(method: str, budget: int | None, **options: Any) -> Any:
    """Positions that a method keeps with its file, and what is written behind a prompt."""
    call: Any = of_heads(8)
    with mp.compress(call, method, budget, page_slots=8, **options) as cache:
        logits = call(ids(60), cache=cache).logits[0, -1]
        return [cache.positions(0), cache.positions(1), int(logits.argmax())]


@torch.no_grad()
def _write_filters(path: Path) -> None:
    call: Any = of_heads(8)
    with mp.compress(call, "qfilters", 24) as cache:
        call(ids(60, 8), cache=cache)
        save_filters(cache, path)


def _write_patterns(path: Path) -> None:
    find_patterns(of_heads(8), ids(60, 8), path, candidates=(("a_shape", 4, 8), ("vertical_slash", 4, 8)), after=20)


def _trace() -> Trace:
    head = HeadTrace(
        (0, 2, 3),
        (Change((2,), (4,)), Change((), (5,))),
        0.5,
        2.0,
        (bytes([1, 0, 255]),),
        ((1, 2, 3),),
        ((2, 0, "int4"),),
    )
    return Trace(
        {"method": "h2o"},
        ("an", "na", " ", "w"),
        2,
        ((head,), (replace(head, first=(0, 1, 2)),)),
        (0,),
        (10, 20, 30),
        (40, 50, 60),
        (1,),
    )


def _trace_values(path: Path) -> Any:
    found = read_trace(path)
    head = found.heads[0][0]
    return [
        found.setting,
        list(found.tokens),
        found.n_prompt,
        found.n_steps,
        list(found.kv_bytes),
        list(found.full_kv_bytes),
        list(found.special),
        [found.kept(1, 0, step) for step in range(3)],
        sorted(found.scores(0, 0, 1).items()),
        [list(one) for one in (*head.merged, *head.demoted)],
    ]


def _pager(path: Path) -> None:
    save_weights(path, (np.arange(N_WEIGHTS) % 8 / 8).astype(np.float32), "nothing")


#: By the name of the file.
KEPT = {
    "machine.json": Kept(lambda path: write_machine(path, _machine()), _machine_values, _read_machine_again),
    PLAN.name: Kept(lambda path: None, _plan_values, lambda path, to: save_plan(load_plan(path), to)),
    "cluster-profile.json": Kept(
        lambda path: save_profile(_profile(), path),
        _profile_values,
        lambda path, to: save_profile(load_profile(str(path)), to),
    ),
    "cluster-plan.json": Kept(_write_workers, _workers_values, lambda path, to: _write_workers(to)),
    "fit.json": Kept(lambda path: _fit().save(path), _fit_values, lambda path, to: load_fit(path).save(to)),
    CALIBRATION: Kept(_write_calibration, _calibration_values, lambda path, to: load_calibration(path).save(to)),
    "heads.safetensors": Kept(_write_heads, _heads_values, lambda path, to: save_heads(_read_heads(path), to)),
    GATE: Kept(_write_gate, _heads_values, lambda path, to: save_heads(_read_heads(path), to)),
    "pager.safetensors": Kept(
        _pager,
        lambda path: load_weights(path).tolist(),
        lambda path, to: save_weights(to, load_weights(path), "nothing"),
    ),
    "filters.safetensors": Kept(_write_filters, lambda path: _written_by("qfilters", 24, filters=str(path)), None),
    "patterns.json": Kept(_write_patterns, lambda path: _written_by("minference", None, patterns=str(path)), None),
    "trace.json": Kept(lambda path: _trace().write(path), _trace_values, lambda path, to: read_trace(path).write(to)),
}


def write_files() -> dict[str, Any]:
    """Write all of them, and say what is in each."""
    for name, kept in KEPT.items():
        kept.write(DATA / name)
    return {name: kept.values(DATA / name) for name, kept in KEPT.items()}


def write_chat() -> None:
    """Write a conversation of `millpond chat`."""
    ChatSession(DATA / "chats", "kept").save([{"role": "user", "content": "old stone"}])
    (DATA / "chats" / "kept" / "cache").rmdir()


def chat(home: Path) -> Any:
    """The conversation in a folder."""
    return ChatSession(home, "kept").load(None)
