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
    """Return a clock in seconds: of this thread where it computes alone, else of the wall.

    Other processes do not lengthen the time of a thread. The calling thread waits for what several threads compute, and
    its own time says nothing then.
    """
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


#: Layers of the two models: times that grow with them are of a layer, the rest of a step.
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
    """Median seconds of steps.

    Attributes:
        piece: Of a step that reads a piece of a prompt.
        end: Of one that ends a prompt.
        few: Of one token of few sequences.
        many: Of one token of many sequences.
    """

    piece: float
    end: float
    few: float
    many: float


class _Time(NamedTuple):
    """Seconds of a step.

    Attributes:
        computed: By `computing_clock`.
        passed: By the wall.
    """

    computed: float
    passed: float


class _Measured(NamedTuple):
    """Steps of a model.

    Attributes:
        computed: By `computing_clock`.
        passed: By the wall.
    """

    computed: _Steps
    passed: _Steps


def call_times() -> tuple[CallTimes, CallTimes]:
    """Measure the call times, in about 6 s, with the present threads of torch.

    The cache evicts (`h2o`): a method that keeps everything plans faster.

    Returns:
        Times of a step, and times in addition where KV is on a disk: transfers of pages that are waited for.
    """
    in_memory = [_steps(n, on_disk=False) for n in _LAYERS]
    on_disk = [_steps(n, on_disk=True) for n in _LAYERS]
    computed = _per_layer(*(steps.computed for steps in in_memory))
    memory_calls, disk_calls = (_per_layer(*(steps.passed for steps in steps_of)) for steps_of in (in_memory, on_disk))
    added = {
        field.name: max(getattr(disk_calls, field.name) - getattr(memory_calls, field.name), 0.0)
        for field in fields(CallTimes)
    }
    return computed, CallTimes(**added)


def _per_layer(shallow: _Steps, deep: _Steps) -> CallTimes:
    """Return the times per layer and step: those that grow with the layers are of a layer."""
    layers = _LAYERS[1] - _LAYERS[0]
    piece, end, few, many = (
        max(deep_s - shallow_s, 0.0) / layers for shallow_s, deep_s in zip(shallow, deep, strict=True)
    )
    sequence = max(many - few, 0.0) / (_MANY - _FEW)
    return CallTimes(
        step_s=max(shallow.few - _LAYERS[0] * few, 0.0),
        layer_s=max(few - _FEW * sequence, 0.0),
        sequence_s=sequence,
        piece_s=piece,
        prompt_s=max(end - piece, 0.0),
    )


def _steps(n_layers: int, on_disk: bool) -> _Measured:
    """Measure steps of a model with `n_layers` layers, and KV in memory or on a disk."""
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
    """Measure the steps of prompts and answers of some sequences."""
    params = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True)
    for n in range(sequences):
        prompt = tuple((7 * index + n) % _VOCABULARY for index in range(_PIECE * _PIECES))
        engine.add(Request(request_id=str(n), prompt=prompt, params=params))
    times, clock = [], computing_clock()
    while engine.busy:
        began, wall_began = clock(), time.perf_counter()
        engine.step()
        times.append(_Time(clock() - began, time.perf_counter() - wall_began))
    return times


@contextmanager
def _engine(folder: Path, n_layers: int, on_disk: bool) -> Iterator[Engine]:
    """Yield an engine whose layers are all read in every step."""
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
    """Write a Llama with random weights in bf16."""
    draw = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=draw).div_(columns**0.5).bfloat16()

    ones = torch.ones(_WIDTH, dtype=torch.bfloat16)
    tensors = {"model.embed_tokens.weight": matrix(_VOCABULARY, _WIDTH), "model.norm.weight": ones.clone()}
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
        layer |= {f"{name}.weight": ones.clone() for name in ("input_layernorm", "post_attention_layernorm")}
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
BUFFER = 64 * 2**20
#: Bytes of the file that is read; more than a disk's own cache would be better, and takes longer to write.
FILE = 2**30
#: Seconds of a span of reads, and most spans. Disks burst: one span alone was wrong by 2.7 x.
SPAN_S, SPANS = 2.0, 6
#: Two spans that differ by less are a sustained speed.
AGREE = 0.05
#: Seconds in which a product is repeated, and side of its square matrices: together more than caches hold.
PRODUCT_S, SIDE, MATRICES = 0.15, 2048, 4


class Reads(NamedTuple):
    """Speed of a disk.

    Attributes:
        sustained: Bytes per second of reads, sustained.
        burst: Bytes per second of reads in the best span.
        written: Bytes per second of writes.
        settled: Whether two spans agreed.
        cpu_s: Seconds of a core for each byte that is read.
    """

    sustained: float
    burst: float
    written: float
    settled: bool
    cpu_s: float


def measure(folder: Path, report: Report | None = None, file: Path | None = None) -> MachineConstants:
    """Measure the machine, in about 30 s.

    Args:
        folder: Folder whose disk is read; a file of at most 1 GiB is written there and removed.
        report: Called with what is measured and the share done.
        file: File to read in place of one that is written; None if there is none. Writes are not measured then.

    Raises:
        OptionError: the folder is not there, cannot be written, or lacks room.
    """

    def report_progress(part: str, share: float) -> None:
        if report is not None:
            report(f"measuring this machine: {part}", share)

    reads = read_speed(folder, lambda share: report_progress("disk", 0.6 * share), file=file)
    report_progress("memory", 0.6)
    memory = _memory_speed()
    flops: dict[str, dict[int, float]] = {}
    for n, name in enumerate(WEIGHTS):
        flops[name] = {}
        for index, rows in enumerate(ROWS):
            report_progress(f"products in {name}", 0.6 + 0.3 * (n * len(ROWS) + index) / (len(WEIGHTS) * len(ROWS)))
            flops[name][rows] = _product_rate(rows, name)
    report_progress("attention", 0.9)
    attention = _attention_rate()
    report_progress("calls", 0.92)
    calls, disk_calls = call_times()
    report_progress("done", 1.0)
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
    """Return the name of the machine: processor, cores that this process may use, and system."""
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
    """Return the speed of sequential direct reads, until two spans agree, and of writes.

    The writes are those of the file that is read.

    Args:
        folder: Folder on the disk.
        report: Called with the share done.
        file_bytes: Bytes of a file that is written.
        file: Existing file to read in place of it, if it holds `REQUEST` bytes; nothing is written then.

    Raises:
        OptionError: see `measure`.
    """
    if file is not None and file.stat().st_size >= REQUEST:
        file_bytes, opened_file = file.stat().st_size // REQUEST * REQUEST, _file_there(file)
    else:
        file_bytes = file_bytes // REQUEST * REQUEST
        opened_file = _file_in(folder, file_bytes)
    with opened_file as (handle, written):
        spans: list[float] = []
        offset, cpu, total = 0, time.thread_time(), 0
        with mmap.mmap(-1, BUFFER) as pages, memoryview(pages) as buffers:  # pages of its own, so it is aligned
            while len(spans) < 2 or (abs(spans[-1] / spans[-2] - 1) > AGREE and len(spans) < SPANS):
                began, n = time.perf_counter(), 0
                while (elapsed_s := time.perf_counter() - began) < SPAN_S:
                    begin = offset % BUFFER
                    n += _read(handle, buffers[begin : begin + REQUEST], offset)
                    offset = (offset + REQUEST) % file_bytes
                spans.append(n / elapsed_s)
                total += n
                if report is not None:
                    report(len(spans) / SPANS)
        cpu_s = (time.thread_time() - cpu) / total
    settled = abs(spans[-1] / spans[-2] - 1) <= AGREE
    return Reads(statistics.fmean(spans[-2:]), max(spans), written, settled, cpu_s)


def _read(handle: int, buffer: memoryview, offset: int) -> int:
    n = os.preadv(handle, [buffer], offset)
    if n != len(buffer):
        raise OptionError(f"a read of {len(buffer)} bytes at {offset} gave {n}; try another folder")
    return n


@contextmanager
def _file_there(path: Path) -> Iterator[tuple[int, float]]:
    """Yield a file that is read past the page cache, and 0: no bytes a second were written."""
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
    """Yield a file of random bytes without a name, and the speed at which it was written.

    No other process can open it by name.
    """
    check_folder(folder, n_bytes)
    handle, name = tempfile.mkstemp(prefix=".millpond-measure-", dir=folder)
    try:
        os.unlink(name)
        handle = _direct(handle)
        began = time.perf_counter()
        with mmap.mmap(-1, REQUEST) as buffer:
            buffer.write(os.urandom(REQUEST))
            for offset in range(0, n_bytes, REQUEST):
                os.pwrite(handle, buffer, offset)
        os.fsync(handle)
        yield handle, n_bytes / (time.perf_counter() - began)
    except OSError as error:
        raise OptionError(f"{folder}: the disk cannot be measured: {error.strerror or error}") from error
    finally:
        os.close(handle)


def _direct(handle: int) -> int:
    """Return the same file, past the page cache where the system and file system allow that."""
    try:
        import fcntl

        fcntl.fcntl(handle, fcntl.F_SETFL, fcntl.fcntl(handle, fcntl.F_GETFL) | getattr(os, "O_DIRECT", 0))
    except (ImportError, OSError):
        pass
    return handle


def _memory_speed() -> float:
    """Return the bytes per second of one pass over 256 MB, with all threads of torch.

    The median of several passes.
    """
    array = torch.ones(2**26, dtype=torch.float32)
    array.sum()
    times = []
    for _ in range(7):
        began = time.perf_counter()
        array.sum()
        times.append(time.perf_counter() - began)
    return array.nbytes / statistics.median(times)


@torch.no_grad()
def _product_rate(rows: int, name: str) -> float:
    """Return the FLOP per second of products by our own linear layers.

    Each product has another matrix than the one before.

    Args:
        rows: Rows of the product.
        name: One of `WEIGHTS`.
    """
    dtype = torch.float32 if name == "f32" else torch.bfloat16
    weights: list[Weight] = [torch.randn(SIDE, SIDE).to(dtype) for _ in range(MATRICES)]
    if name in FORMATS:
        weights = [
            QuantizedWeight.quantize(matrix, FORMATS[name]) for matrix in weights if isinstance(matrix, torch.Tensor)
        ]
    x = torch.randn(rows, SIDE).to(dtype)
    median = _median_s(lambda n: linear(x, weights[n % MATRICES]))
    return 2 * rows * SIDE * SIDE / median


def _median_s(compute: Callable[[int], object]) -> float:
    """Return the median seconds of calls with 0, 1, ..., in about `PRODUCT_S`.

    At least `MATRICES` calls count, after the first one.
    """
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
    """Return the FLOP per second of the attention of a piece of a prompt; half of it is new."""
    heads, kv_heads, dim, n = 8, 4, 64, 256
    q, k, v = (torch.randn(h, rows, dim).bfloat16() for h, rows in ((heads, n), (kv_heads, 2 * n), (kv_heads, 2 * n)))
    positions = torch.arange(2 * n, dtype=torch.int32)
    args = PrefillArgs(
        q, k, v, positions[n:], AttentionShape(dim**-0.5), positions[:n].expand(kv_heads, -1).contiguous()
    )
    pairs = n * n + n * (n + 1) // 2
    return 4 * dim * heads * pairs / _median_s(lambda _: ops.prefill(args))
