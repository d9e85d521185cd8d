"""Speed of the CPU kernels, as shares of what the memory or torch's own attention allows.

Every group of rows is timed in turns, so that a busy machine slows all of them alike; rows report medians.
Run it: python -m millpond_lab.bench.kernels.attention
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from millpond.kernels import native
from millpond.kernels.args import AttentionShape, DecodeArgs, PageRegions, PrefillArgs, StepRegions
from millpond.kernels.decode_rules import KEEP_ALL, UNBOUNDED, DecodeRule, Evict, Reduce, Signal
from millpond.kernels.pages import PageArrays

SUM = DecodeRule(signal=Signal.SUM)
EVICTING = DecodeRule(signal=Signal.SUM, evict=Evict.ACC)


@dataclass(frozen=True)
class KernelRow:
    """One measurement.

    Attributes:
        share: of the yardstick named in `of` (speed over speed; more is better).
        target: what the share must reach; None: nothing was promised.
    """

    name: str
    ms: float
    gb_per_s: float
    share: float
    of: str
    target: float | None = None

    @property
    def verdict(self) -> str:
        """The target and whether it holds, in words."""
        if self.target is None:
            return ""
        return f"{'holds' if self.share >= self.target else 'missed'} ({self.target:.0%})"


@dataclass(frozen=True)
class DecodeSetup:
    """A pool and the arguments of one decode call: GQA 4:1, 8 KV heads, batch 4, ragged 2k to 8k by default."""

    dtype: torch.dtype
    slots: int
    shuffled: bool = False
    rule: DecodeRule = KEEP_ALL
    n_seq: int = 4
    n_kv_heads: int = 8
    group: int = 4
    dim: int = 128
    lens: tuple[int, ...] = (2048, 4229, 6001, 8100)

    def region_lens(self) -> Tensor:
        """Entries of each region (R,)."""
        return torch.tensor([n for n in self.lens for _ in range(self.n_kv_heads)], dtype=torch.int32)

    def fill(self) -> tuple[PageArrays, Tensor]:
        """A pool of random entries and its page table."""
        n_regions = self.n_seq * self.n_kv_heads
        need = [-(-(int(n) + 1) // self.slots) for n in self.region_lens()]
        pages = PageArrays(
            1 << (sum(need) - 1).bit_length(), self.slots, self.dim, self.dim, self.dtype, torch.device("cpu")
        )
        pages.add_arena()
        order = list(range(sum(need)))
        if self.shuffled:
            random.Random(0).shuffle(order)
        table = torch.zeros(n_regions, max(need), dtype=torch.int32)
        for r, n in enumerate(need):
            table[r, :n] = torch.tensor([order.pop(0) for _ in range(n)], dtype=torch.int32)
        used = sum(need)
        noise = torch.randn(self.slots * 8, self.dim).to(self.dtype)
        for arena in (pages.keys[0], pages.values[0]):
            for page in range(used):
                shift = page % 8 * self.slots
                arena[page] = noise[shift : shift + self.slots]
        pages.scores[0][:used] = torch.rand(used, self.slots)
        for r in range(n_regions):
            for i, page in enumerate(table[r, : need[r]].tolist()):
                pages.positions[0][page] = torch.arange(i * self.slots, (i + 1) * self.slots)
        return pages, table

    def call(self, pages: PageArrays, table: Tensor) -> Callable[[], object]:
        """One decode call over the filled pool; regions are full if the rule evicts."""
        lens = self.region_lens()
        q = torch.randn(self.n_seq, self.n_kv_heads * self.group, self.dim).to(self.dtype)
        new = torch.randn(self.n_seq, self.n_kv_heads, self.dim).to(self.dtype)
        caps = lens.clone() if self.rule.evict is not Evict.NEVER else torch.full_like(lens, UNBOUNDED)
        recent, q_pos = torch.full_like(lens, 32), torch.tensor(self.lens, dtype=torch.int32)
        held = lens.clone()
        plain, shape = PageRegions(pages, table, held), AttentionShape(self.dim**-0.5)
        args = DecodeArgs(q, new, new, StepRegions(plain, caps, recent, q_pos, self.rule, shape))

        def call() -> object:
            held.copy_(lens)
            return native.decode(args)

        return call

    @property
    def n_bytes(self) -> int:
        """Bytes of keys and values that one call reads."""
        item = torch.empty(0, dtype=self.dtype).element_size()
        return sum(self.lens) * self.n_kv_heads * self.dim * 2 * item


def time_in_turns(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median milliseconds of each call, all of them run once per round in shuffled order."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    rng = random.Random(0)
    for turn in range(rounds + 2):
        rng.shuffle(names)
        for name in names:
            start = time.perf_counter()
            calls[name]()
            if turn >= 2:
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(t) for name, t in times.items()}


def read_call(arrays: list[Tensor], n_bytes: int) -> Callable[[], object]:
    """A call that reads the first n_bytes of each array and does nothing else."""
    threads = torch.get_num_threads()

    def call() -> object:
        for array in arrays:
            native.read_bandwidth(array.data_ptr(), n_bytes, threads)
        return None

    return call


DECODE_SETUPS = {
    "bf16 flat": DecodeSetup(torch.bfloat16, 8192, rule=SUM),
    "bf16 flat, no scores": DecodeSetup(torch.bfloat16, 8192),
    "bf16 flat, evicting": DecodeSetup(torch.bfloat16, 8192, rule=EVICTING),
    "bf16 pages of 16": DecodeSetup(torch.bfloat16, 16, rule=SUM),
    "bf16 pages of 32": DecodeSetup(torch.bfloat16, 32, rule=SUM),
    "bf16 pages of 64": DecodeSetup(torch.bfloat16, 64, rule=SUM),
    "bf16 pages of 256": DecodeSetup(torch.bfloat16, 256, rule=SUM),
    "bf16 pages of 16, random": DecodeSetup(torch.bfloat16, 16, shuffled=True, rule=SUM),
    "bf16 pages of 32, random": DecodeSetup(torch.bfloat16, 32, shuffled=True, rule=SUM),
    "bf16 pages of 64, random": DecodeSetup(torch.bfloat16, 64, shuffled=True, rule=SUM),
    "bf16 pages of 256, random": DecodeSetup(torch.bfloat16, 256, shuffled=True, rule=SUM),
    "f32 flat": DecodeSetup(torch.float32, 8192, rule=SUM),
    "f32 flat, no scores": DecodeSetup(torch.float32, 8192),
    "f16 flat": DecodeSetup(torch.float16, 8192, rule=SUM),
}


def decode_rows(rounds: int = 40) -> list[KernelRow]:
    """Decode attention against the speed at which the very memory of its keys and values can be read.

    Setups that differ in the rule alone share their memory: where it lies changes times more than scores do, and one
    process may get memory twice as fast as another.
    """
    calls: dict[str, Callable[[], object]] = {}
    reads: dict[DecodeSetup, str] = {}
    filled: dict[DecodeSetup, tuple[PageArrays, Tensor]] = {}
    for name, setup in DECODE_SETUPS.items():
        memory = replace(setup, rule=KEEP_ALL)
        if memory not in filled:
            filled[memory] = memory.fill()
            pages, reads[memory] = filled[memory][0], f"read {name}"
            calls[reads[memory]] = read_call([pages.keys[0], pages.values[0]], memory.n_bytes // 2)
        calls[name] = setup.call(*filled[memory])
    ms = time_in_turns(calls, rounds)
    speeds = {memory: memory.n_bytes / ms[name] / 1e6 for memory, name in reads.items()}
    typical = statistics.median(speeds.values())
    middle = statistics.median(ms[name] for name in reads.values())
    rows = [KernelRow("read bandwidth, median", middle, typical, 1.0, "itself")]
    for name, setup in DECODE_SETUPS.items():
        rate = setup.n_bytes / ms[name] / 1e6
        rows.append(KernelRow(name, ms[name], rate, rate / speeds[replace(setup, rule=KEEP_ALL)], "reading its memory"))
    return rows


def _prefill_calls(dim: int, n: int, n_heads: int = 8, n_kv_heads: int = 2) -> dict[str, Callable[[], object]]:
    q = torch.randn(n_heads, n, dim).bfloat16()
    k, v = (torch.randn(n_kv_heads, n, dim).bfloat16() for _ in range(2))
    positions, scale = torch.arange(n, dtype=torch.int32), dim**-0.5
    group = n_heads // n_kv_heads

    def ours(colsum: Reduce | None) -> object:
        return native.prefill(PrefillArgs(q, k, v, positions, AttentionShape(scale), colsum=colsum))

    def sdpa(keys: Tensor, values: Tensor, gqa: bool) -> object:
        return scaled_dot_product_attention(q[None], keys[None], values[None], is_causal=True, enable_gqa=gqa)

    return {
        "colsum": lambda: ours(Reduce.MEAN),
        "plain": lambda: ours(None),
        "sdpa enable_gqa": lambda: sdpa(k, v, True),
        "sdpa repeated": lambda: sdpa(k.repeat_interleave(group, 0), v.repeat_interleave(group, 0), False),
    }


def prefill_rows(rounds: int = 7, length: int = 4096) -> list[KernelRow]:
    """Prefill with and without column sums against torch's fused attention in its faster setting."""
    rows = []
    for dim in (128, 64):
        ms = time_in_turns(_prefill_calls(dim, length), rounds)
        best = min(ms["sdpa enable_gqa"], ms["sdpa repeated"])
        rows += [KernelRow(f"prefill {length}, D={dim}: {name}", t, 0.0, best / t, "SDPA") for name, t in ms.items()]
    return rows


def kernel_table(rounds: int = 40) -> list[KernelRow]:
    """All rows, decode first."""
    return decode_rows(rounds) + prefill_rows(max(3, rounds // 6))


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 40
    print(f"isa {native.isa()}, {torch.get_num_threads()} threads, medians of {rounds} rounds in turns")
    for row in kernel_table(rounds):
        rate = f"{row.gb_per_s:6.1f} GB/s" if row.gb_per_s else " " * 11
        print(f"{row.name:32} {row.ms:9.3f} ms {rate} {100 * row.share:6.1f} % of {row.of}")


if __name__ == "__main__":
    main()
