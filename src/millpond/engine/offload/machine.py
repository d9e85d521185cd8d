"""Constants of a machine for the cost model: bandwidth of a folder and of memory, and rates of our own products."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import exp, log
from typing import Annotated

from millpond.typed_json import Number

#: Rows that products are timed with.
ROWS = (1, 4, 16, 32, 64, 128, 256, 512, 1024)
#: Numbers of the matrices that products are timed with; rows of codes are bf16.
WEIGHTS = ("bf16", "f32", "int8", "int4")
#: Numbers as the file of a machine may hold them; 0 where nothing was measured.
Rate = Annotated[float, Number(above=0)]
Seconds = Annotated[float, Number(at_least=0)]
Count = Annotated[int, Number(at_least=1)]


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """A device that the host has in addition to its own cores.

    Attributes:
        flops: FLOP per second of products. memory_per_s, link_per_s: bytes per second of its memory, and between it
            and the host.
    """

    flops: float
    memory_per_s: float
    link_per_s: float


@dataclass(frozen=True, kw_only=True)
class CallTimes:
    """Seconds that a step takes besides products, attention and reads: calls, small operations, plans of a cache.

    Attributes:
        step_s: of a step. layer_s: of each layer that decodes. sequence_s: of each layer for a sequence that decodes.
        piece_s: of each layer for a piece of a prompt. prompt_s: of each layer for a prompt of which only a budget
            stays, when it ends.
    """

    step_s: Seconds
    layer_s: Seconds
    sequence_s: Seconds
    piece_s: Seconds
    prompt_s: Seconds


@dataclass(frozen=True, kw_only=True)
class MachineConstants:
    """What a machine does in a second.

    Attributes:
        read_per_s, write_per_s: bytes of sequential direct reads and writes in the folder, sustained; 0: not measured.
        burst_per_s: the best span of `SPAN_S` of the reads.
        memory_per_s: bytes that one pass over memory reads.
        flops: FLOP per second by `WEIGHTS`, then by rows of the product: see `rate`.
        attention: FLOP per second of the attention of a prompt.
        read_cpu_s: seconds of a core for each byte that is read. calls: what a step takes besides.
        disk_calls: what it takes in addition where KV lies on a disk.
        settled: whether two spans of reads agreed within 5 %.
        accelerator: None where there is none.
        folder, hardware, date: where, on what, and when it was measured. threads, cores: of torch, and those that this
            process may use.
    """

    read_per_s: Rate
    write_per_s: Seconds
    burst_per_s: Rate
    memory_per_s: Rate
    flops: Mapping[str, Mapping[int, Rate]]
    attention: Rate
    read_cpu_s: Seconds
    calls: CallTimes
    disk_calls: CallTimes
    settled: bool = True
    accelerator: Accelerator | None = None
    folder: str = ""
    hardware: str = ""
    threads: Count = 1
    cores: Count = 1
    date: str = ""
    _sorted: dict[str, list[tuple[int, float]]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def rate(self, dtype: str, rows: float) -> float:
        """FLOP per second of a product of `rows` rows; between measured numbers a straight line of the logarithms.

        Beyond the last one the rate stays.
        """
        table = self._sorted.setdefault(dtype, sorted(self.flops[dtype].items()))
        counts = [n for n, _ in table]
        place = bisect_left(counts, rows)
        if place == 0:
            return table[0][1] * (rows / counts[0] if rows < counts[0] else 1.0)
        if place == len(table):
            return table[-1][1]
        (low, slow), (high, fast) = table[place - 1 : place + 1]
        part = log(rows / low) / log(high / low)
        return exp(log(slow) + part * (log(fast) - log(slow)))
