"""Constants of a machine for the cost model: bandwidth of a folder and of memory, and rates of our own products."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import exp, log
from typing import Annotated

from millpond.typed_json import Number

#: Rows of the products that are timed.
ROWS = (1, 4, 16, 32, 64, 128, 256, 512, 1024)
#: Number formats of the matrices of the products that are timed; rows of codes are bf16.
WEIGHTS = ("bf16", "f32", "int8", "int4")
#: Numbers as the file of a machine may hold them; 0 where nothing was measured.
Rate = Annotated[float, Number(above=0)]
Seconds = Annotated[float, Number(at_least=0)]
Count = Annotated[int, Number(at_least=1)]


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """A device that the host has in addition to its own cores.

    Attributes:
        flops: FLOP per second of products.
        memory_per_s: Bytes per second of its memory.
        link_per_s: Bytes per second between it and the host.
    """

    flops: float
    memory_per_s: float
    link_per_s: float


@dataclass(frozen=True, kw_only=True)
class CallTimes:
    """Seconds of a step besides products, attention and reads.

    They are those of calls, small operations, and plans of a cache.

    Attributes:
        step_s: Of a step.
        layer_s: Of each layer that decodes.
        sequence_s: Of each layer for a sequence that decodes.
        piece_s: Of each layer for a piece of a prompt.
        prompt_s: Of each layer for a prompt of which only a budget stays, when it ends.
    """

    step_s: Seconds
    layer_s: Seconds
    sequence_s: Seconds
    piece_s: Seconds
    prompt_s: Seconds


@dataclass(frozen=True, kw_only=True)
class MachineConstants:
    """Speeds of a machine.

    Attributes:
        read_per_s: Bytes per second of sequential direct reads in the folder, sustained.
        write_per_s: Bytes per second of such writes; 0: not measured.
        burst_per_s: Bytes per second in the best span of `SPAN_S` of the reads.
        memory_per_s: Bytes per second that one pass over memory reads.
        flops: FLOP per second by `WEIGHTS`, then by rows of the product: see `rate`.
        attention: FLOP per second of the attention of a prompt.
        read_cpu_s: Seconds of a core for each byte that is read.
        calls: Seconds of a step besides.
        disk_calls: Seconds of a step in addition where KV is on a disk.
        settled: Whether two spans of reads agreed within 5 %.
        accelerator: Speeds of the accelerator; None if there is none.
        folder: Folder whose disk was measured.
        hardware: Name of the machine that was measured.
        threads: Threads of torch.
        cores: Cores that this process may use.
        date: When it was measured.
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
        """Return the FLOP per second of a product of `rows` rows.

        Between measured numbers of rows it is a straight line of the logarithms. Beyond the last one the rate stays.
        """
        table = self._sorted.setdefault(dtype, sorted(self.flops[dtype].items()))
        counts = [n for n, _ in table]
        index = bisect_left(counts, rows)
        if index == 0:
            return table[0][1] * (rows / counts[0] if rows < counts[0] else 1.0)
        if index == len(table):
            return table[-1][1]
        (low, slow), (high, fast) = table[index - 1 : index + 1]
        part = log(rows / low) / log(high / low)
        return exp(log(slow) + part * (log(fast) - log(slow)))
