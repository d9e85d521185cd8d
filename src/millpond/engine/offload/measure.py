"""Measurement of a machine's constants: direct reads until they settle, memory, products, attention, calls."""

from __future__ import annotations

import json
import mmap
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from millpond.cache.tiered.disk_tier import DiskTier
from millpond.engine.config import EngineConfig
from millpond.engine.engine import Engine
from millpond.engine.offload.machine import ROWS, WEIGHTS, CallTimes, MachineConstants
from millpond.engine.request import Request
from millpond.engine.sampling.params import SamplingParams
from millpond.errors import OptionError
from millpond.kernels import ops
from millpond.kernels.args import AttentionShape, PrefillArgs
from millpond.kernels.linear import linear
from millpond.kernels.quantized_weight import FORMATS, QuantizedWeight, Weight
from millpond.models.cache_folder import check_folder
from millpond.models.weights.packed_file import Report
from millpond.models.weights.sizes import WeightSizes
from millpond.models.weights.skeleton import Skeleton
from millpond.models.weights.streamed import StreamedLayers
from millpond.tiers.ledger import Ledger, Tier


def computing_clock() -> Callable[[], float]:
    """Seconds: of this thread where it computes alone, so that other processes do not lengthen them; else of the wall.

    What several threads compute is waited for by the calling one, whose own time says nothing then.
    """
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


#: Layers of the two models: what grows with them is of a layer, the rest of a step.
_LAYERS = (2, 10)
#: So small that products take next to nothing; heads as in models of a billion parameters.
_WIDTH, _HEADS, _KV_HEADS, _HEAD_DIM, _VOCABULARY = 64, 8, 4, 64, 128
#: Tokens of a piece of a prompt, more than kernels for few rows take; pieces of a prompt; and entries that are kept.
_PIECE, _PIECES, _BUDGET = 48, 3, 64
#: Sequences that decode, few and many, and their steps.
_FEW, _MANY, _STEPS = 1, 16, 16
#: Prompts that are read alone.
_PROMPTS = 4


class _Steps(NamedTuple):
    """Median seconds of steps: a piece of a prompt, one that ends it, and one token of few and of many sequences."""

    piece: float
    end: float
    few: float
    many: float


class _Time(NamedTuple):
    """Seconds of a step: of `computing_clock`, and of the wall."""

    computed: float
    passed: float


class _Measured(NamedTuple):
    """Steps by `computing_clock`, and by the wall."""

    computed: _Steps
    passed: _Steps


def call_times() -> tuple[CallTimes, CallTimes]:
    """Measure, in about 6 s, with the threads that torch has now.

    The cache evicts (`h2o`): a method that keeps everything plans faster.

    Returns:
        What a step takes, and what it takes more where KV lies on a disk: the way of pages, waited for.
    """
    here = [_steps(n, on_disk=False) for n in _LAYERS]
    away = [_steps(n, on_disk=True) for n in _LAYERS]
    computed = _per_layer(*(steps.computed for steps in here))
    near, far = (_per_layer(*(steps.passed for steps in steps_of)) for steps_of in (here, away))
    more = {field.name: max(getattr(far, field.name) - getattr(near, field.name), 0.0) for field in fields(CallTimes)}
    return computed, CallTimes(**more)


def _per_layer(shallow: _Steps, deep: _Steps) -> CallTimes:
    """What grows with the layers is of a layer."""
    layers = _LAYERS[1] - _LAYERS[0]
    piece, end, few, many = (max(more - less, 0.0) / layers for less, more in zip(shallow, deep, strict=True))
    sequence = max(many - few, 0.0) / (_MANY - _FEW)
    return CallTimes(
        step_s=max(shallow.few - _LAYERS[0] * few, 0.0),
        layer_s=max(few - _FEW * sequence, 0.0),
        sequence_s=sequence,
        piece_s=piece,
        prompt_s=max(end - piece, 0.0),
    )


def _steps(n_layers: int, on_disk: bool) -> _Measured:
    """Steps of a model with as many layers, and KV in memory or on a disk."""
    ends: list[_Time] = []
    pieces: list[_Time] = []
    with (
        tempfile.TemporaryDirectory(prefix="millpond-calls-") as folder,
        _engine(Path(folder), n_layers, on_disk) as engine,
    ):
        for _ in range(_PROMPTS):
            times = _timed(engine, sequences=1, new=2)  # with one token nothing is kept, so nothing is planned
            pieces += times[: _PIECES - 1]
            ends.append(times[_PIECES - 1])
        few, many = (_timed(engine, sequences=n, new=_STEPS)[-_STEPS // 2 :] for n in (_FEW, _MANY))
    kinds = (pieces, ends, few, many)
    computed, passed = (_Steps(*(statistics.median(time[n] for time in kind) for kind in kinds)) for n in (0, 1))
    return _Measured(computed, passed)


def _timed(engine: Engine, sequences: int, new: int) -> list[_Time]:
    """The steps that prompts and answers of some sequences take."""
    params = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True)
    for n in range(sequences):
        prompt = tuple((7 * place + n) % _VOCABULARY for place in range(_PIECE * _PIECES))
        engine.add(Request(request_id=str(n), prompt=prompt, params=params))
    times, clock = [], computing_clock()
    while engine.busy:
        began, at = clock(), time.perf_counter()
        engine.step()
        times.append(_Time(clock() - began, time.perf_counter() - at))
    return times


@contextmanager
def _engine(folder: Path, n_layers: int, on_disk: bool) -> Iterator[Engine]:
    """An engine whose layers are all read in every step."""
    _write_model(folder, n_layers)
    skeleton, ledger = Skeleton.of(folder), Ledger([Tier("host", "host")])
    streamed = StreamedLayers(skeleton, WeightSizes(skeleton), ledger)
    tier = DiskTier(folder, range(n_layers), micro_batch=_MANY) if on_disk else None
    config = EngineConfig(method="h2o", budget=_BUDGET, max_step_tokens=_PIECE)
    engine = Engine(streamed.model, None, config, streamed=streamed, tier=tier)
    try:
        yield engine
    finally:
        engine.close()


def _write_model(folder: Path, n_layers: int) -> None:
    """A Llama with random weights in bf16."""
    draw = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=draw).div_(columns**0.5).bfloat16()

    one = torch.ones(_WIDTH, dtype=torch.bfloat16)
    tensors = {"model.embed_tokens.weight": matrix(_VOCABULARY, _WIDTH), "model.norm.weight": one.clone()}
    for index in range(n_layers):
        shapes = {
            "self_attn.q_proj": (_HEADS * _HEAD_DIM, _WIDTH),
            "self_attn.k_proj": (_KV_HEADS * _HEAD_DIM, _WIDTH),
            "self_attn.v_proj": (_KV_HEADS * _HEAD_DIM, _WIDTH),
            "self_attn.o_proj": (_WIDTH, _HEADS * _HEAD_DIM),
            "mlp.gate_proj": (_WIDTH, _WIDTH),
            "mlp.up_proj": (_WIDTH, _WIDTH),
            "mlp.down_proj": (_WIDTH, _WIDTH),
        }
        layer = {f"{name}.weight": matrix(*shape) for name, shape in shapes.items()}
        layer |= {f"{name}.weight": one.clone() for name in ("input_layernorm", "post_attention_layernorm")}
        tensors |= {f"model.layers.{index}.{name}": tensor for name, tensor in layer.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_size": _WIDTH,
        "intermediate_size": _WIDTH,
        "num_hidden_layers": n_layers,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_DIM,
        "vocab_size": _VOCABULARY,
        "max_position_embeddings": 2 * _PIECE * _PIECES,
        "tie_word_embeddings": True,
        "eos_token_id": None,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


#: Bytes of one direct read or write.
REQUEST = 4 * 2**20
#: Bytes of memory that is read into in turn: one buffer alone stays in the processor's cache, and reads were 1.4 times
#: as fast as those of a sweep.
ROOM = 64 * 2**20
#: Bytes of the file that is read; more than a disk's own cache would be better, and takes longer to write.
FILE = 2**30
#: Seconds of a span of reads, and most spans. Disks burst: one span alone was wrong by 2.7 x.
SPAN_S, SPANS = 2.0, 6
#: Two spans that differ by less are a sustained speed.
AGREE = 0.05
#: Seconds in which a product is repeated, and side of its square matrices: together more than caches hold.
PRODUCT_S, SIDE, MATRICES = 0.15, 2048, 4


class Reads(NamedTuple):
    """Bytes per second: sustained, in the best span, and of writes; whether two spans agreed; seconds of a core for
    each byte that is read."""

    sustained: float
    burst: float
    written: float
    settled: bool
    cpu_s: float


def measure(folder: Path, report: Report | None = None, file: Path | None = None) -> MachineConstants:
    """Measure the machine, in about 30 s.

    Args:
        folder: where the disk is read; a file of at most 1 GiB is written there and removed. report: shown what is
            measured and how far it is.
        file: that is read in place of one that is written; None where there is none. Writes are not measured then.

    Raises:
        OptionError: the folder is not there, cannot be written, or lacks room.
    """

    def say(what: str, share: float) -> None:
        if report is not None:
            report(f"measuring this machine: {what}", share)

    reads = read_speed(folder, lambda share: say("disk", 0.6 * share), file=file)
    say("memory", 0.6)
    memory = _memory_speed()
    flops: dict[str, dict[int, float]] = {}
    for n, name in enumerate(WEIGHTS):
        flops[name] = {}
        for at, rows in enumerate(ROWS):
            say(f"products in {name}", 0.6 + 0.3 * (n * len(ROWS) + at) / (len(WEIGHTS) * len(ROWS)))
            flops[name][rows] = _product_rate(rows, name)
    say("attention", 0.9)
    attention = _attention_rate()
    say("calls", 0.92)
    calls, disk_calls = call_times()
    say("done", 1.0)
    return MachineConstants(
        read_per_s=reads.sustained,
        write_per_s=reads.written,
        burst_per_s=reads.burst,
        settled=reads.settled,
        memory_per_s=memory,
        flops=flops,
        attention=attention,
        read_cpu_s=reads.cpu_s,
        calls=calls,
        disk_calls=disk_calls,
        folder=str(folder.resolve()),
        hardware=hardware(),
        threads=torch.get_num_threads(),
        cores=_cores(),
        date=datetime.now().astimezone().isoformat(timespec="seconds"),
    )


def hardware() -> str:
    """What the machine is, as far as it says: processor, its cores that this process may use, and system."""
    return f"{_processor()}, {_cores()} cores, {platform.system()}"


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def read_speed(
    folder: Path, report: Callable[[float], None] | None = None, *, file_bytes: int = FILE, file: Path | None = None
) -> Reads:
    """Speed of sequential direct reads, until two spans agree, and of the writes of the file that is read.

    Args:
        file: one that is there is read, and nothing written, if it holds `REQUEST` bytes.

    Raises:
        OptionError: see `measure`.
    """
    if file is not None and file.stat().st_size >= REQUEST:
        file_bytes, place = file.stat().st_size // REQUEST * REQUEST, _file_there(file)
    else:
        file_bytes = file_bytes // REQUEST * REQUEST
        place = _file_in(folder, file_bytes)
    with place as (handle, written):
        spans: list[float] = []
        at, cpu, total = 0, time.thread_time(), 0
        with mmap.mmap(-1, ROOM) as pages, memoryview(pages) as room:  # pages of its own, so it is aligned
            while len(spans) < 2 or (abs(spans[-1] / spans[-2] - 1) > AGREE and len(spans) < SPANS):
                began, n = time.perf_counter(), 0
                while (passed := time.perf_counter() - began) < SPAN_S:
                    begin = at % ROOM
                    n += _read(handle, room[begin : begin + REQUEST], at)
                    at = (at + REQUEST) % file_bytes
                spans.append(n / passed)
                total += n
                if report is not None:
                    report(len(spans) / SPANS)
        cpu_s = (time.thread_time() - cpu) / total
    settled = abs(spans[-1] / spans[-2] - 1) <= AGREE
    return Reads(statistics.fmean(spans[-2:]), max(spans), written, settled, cpu_s)


def _read(handle: int, buffer: memoryview, at: int) -> int:
    n = os.preadv(handle, [buffer], at)
    if n != len(buffer):
        raise OptionError(f"a read of {len(buffer)} bytes at {at} gave {n}; try another folder")
    return n


@contextmanager
def _file_there(path: Path) -> Iterator[tuple[int, float]]:
    """A file that is read past the page cache; no bytes a second were written."""
    handle = -1
    try:
        handle = _direct(os.open(path, os.O_RDONLY))
        yield handle, 0.0
    except OSError as error:
        raise OptionError(f"{path}: the disk cannot be measured: {error.strerror or error}") from error
    finally:
        if handle >= 0:
            os.close(handle)


@contextmanager
def _file_in(folder: Path, n_bytes: int) -> Iterator[tuple[int, float]]:
    """A file of random bytes that no other process can open by name, and the speed at which it was written."""
    check_folder(folder, n_bytes)
    handle, name = tempfile.mkstemp(prefix=".millpond-measure-", dir=folder)
    try:
        os.unlink(name)
        handle = _direct(handle)
        began = time.perf_counter()
        with mmap.mmap(-1, REQUEST) as buffer:
            buffer.write(os.urandom(REQUEST))
            for at in range(0, n_bytes, REQUEST):
                os.pwrite(handle, buffer, at)
        os.fsync(handle)
        yield handle, n_bytes / (time.perf_counter() - began)
    except OSError as error:
        raise OptionError(f"{folder}: the disk cannot be measured: {error.strerror or error}") from error
    finally:
        os.close(handle)


def _direct(handle: int) -> int:
    """The same file, past the page cache where the system and its file system allow that."""
    try:
        import fcntl

        fcntl.fcntl(handle, fcntl.F_SETFL, fcntl.fcntl(handle, fcntl.F_GETFL) | getattr(os, "O_DIRECT", 0))
    except (ImportError, OSError):
        pass
    return handle


def _memory_speed() -> float:
    """Bytes per second of one pass over 256 MB, with all threads of torch: the median of several."""
    there = torch.ones(2**26, dtype=torch.float32)
    there.sum()
    times = []
    for _ in range(7):
        began = time.perf_counter()
        there.sum()
        times.append(time.perf_counter() - began)
    return there.nbytes / statistics.median(times)


@torch.no_grad()
def _product_rate(rows: int, name: str) -> float:
    """FLOP per second of products by our own linear layers, each with another matrix than the one before.

    Args:
        name: one of `WEIGHTS`.
    """
    dtype = torch.float32 if name == "f32" else torch.bfloat16
    weights: list[Weight] = [torch.randn(SIDE, SIDE).to(dtype) for _ in range(MATRICES)]
    if name in FORMATS:
        weights = [QuantizedWeight.quantize(one, FORMATS[name]) for one in weights if isinstance(one, torch.Tensor)]
    x = torch.randn(rows, SIDE).to(dtype)
    median = _median_s(lambda n: linear(x, weights[n % MATRICES]))
    return 2 * rows * SIDE * SIDE / median


def _median_s(compute: Callable[[int], object]) -> float:
    """Median seconds of calls with 0, 1, ..., of at least `MATRICES` after the first one, in about `PRODUCT_S`."""
    times: list[float] = []
    clock, began = computing_clock(), time.perf_counter()
    compute(MATRICES - 1)
    while time.perf_counter() - began < PRODUCT_S or len(times) < MATRICES:
        start = clock()
        compute(len(times))
        times.append(clock() - start)
    return statistics.median(times)


@torch.no_grad()
def _attention_rate() -> float:
    """FLOP per second of the attention of a piece of a prompt, half of which is new."""
    heads, kv_heads, dim, n = 8, 4, 64, 256
    q, k, v = (torch.randn(h, rows, dim).bfloat16() for h, rows in ((heads, n), (kv_heads, 2 * n), (kv_heads, 2 * n)))
    places = torch.arange(2 * n, dtype=torch.int32)
    args = PrefillArgs(q, k, v, places[n:], AttentionShape(dim**-0.5), places[:n].expand(kv_heads, -1).contiguous())
    pairs = n * n + n * (n + 1) // 2
    return 4 * dim * heads * pairs / _median_s(lambda _: ops.prefill(args))
