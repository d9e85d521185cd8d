"""FlexGen's official cost model and policy search, for comparison (Sheng et al., ICML 2023, arXiv:2303.06865).

The equations are those of its released cost model for OPT in 16 bits, which differ from the paper's Appendix A.3: links
in the same direction add up in prefill, and uploads to the GPU do not overlap in decoding. Tiers: g, c and n are GPU,
CPU and disk. It knows neither grouped KV heads nor eviction; `cost.py` is the model of our own sweep.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import log2
from typing import Any

import numpy as np

from millpond.errors import BudgetError, OptionError
from millpond.optional import require

#: Its gigabytes, of capacities and of bandwidths, are binary.
GB, TERA = 2**30, 1e12
#: Placement variables: shares of weights, cache and hidden states on GPU, CPU and disk.
PLACES = ("wg", "wc", "wn", "cg", "cc", "cn", "hg", "hc", "hn")


@dataclass(frozen=True, kw_only=True)
class T4:
    """Fitted constants; the defaults are those released for an NVIDIA T4 (16 GB) on a host of 208 GB.

    Attributes:
        ctog, gtoc_cache, gtoc_hidden, dtoc, ctod_cache_p, ctod_hidden_p, ctod_g: bytes per second between tiers, of
            caches, hidden states, and in prefill or decoding.
        mm_p, mm_g, bmm_p, bmm_g, cpu: FLOP per second of products of weights and of attention. c1, c2, c3: how the
            CPU's rate depends on batch and width.
        gpu_bytes, cpu_bytes, disk_bytes: capacities.
        alpha_g, alpha_c, alpha_n: share of each capacity that may be planned with.
    """

    ctog: float = 12.89 * GB
    gtoc_cache: float = 0.97 * GB
    gtoc_hidden: float = 4.82 * GB
    dtoc: float = 0.473 * GB
    ctod_cache_p: float = 0.746 * GB
    ctod_hidden_p: float = 2.015 * GB
    ctod_g: float = 2.015 * GB
    mm_p: float = 21.24 * TERA
    mm_g: float = 4.3 * TERA
    bmm_p: float = 9.97 * TERA
    bmm_g: float = 0.079 * TERA
    cpu: float = 0.0123 * TERA
    c1: float = 0.0168
    c2: float = 0.0328
    c3: float = 0.0621
    gpu_bytes: float = 15 * GB
    cpu_bytes: float = 204 * GB
    disk_bytes: float = 1500 * GB
    alpha_g: float = 0.8
    alpha_c: float = 0.8
    alpha_n: float = 0.8


@dataclass(frozen=True, kw_only=True)
class OptWorkload:
    """An OPT model and what it reads and writes; the defaults are OPT-30B with 512 + 32 tokens.

    Attributes:
        layers, width, ffn, heads: l, h1, h2 and nh of the equations. prompt, new: s and n, tokens.
    """

    layers: int = 48
    width: int = 7168
    ffn: int = 4 * 7168
    heads: int = 56
    prompt: int = 512
    new: int = 32


@dataclass(frozen=True, kw_only=True)
class PolicyTime:
    """A policy with its time.

    Attributes:
        gpu_batch, n_batches: sequences of a GPU batch, and GPU batches of a block. shares: by the names of `PLACES`.
        prefill_s, decode_s: of one block. new: tokens of each sequence.
    """

    gpu_batch: int
    n_batches: int
    shares: dict[str, float]
    prefill_s: float
    decode_s: float
    new: int

    @property
    def seconds(self) -> float:
        """T, of one block."""
        return self.prefill_s + self.decode_s

    @property
    def tokens_per_s(self) -> float:
        """New tokens of one block over its time."""
        return self.gpu_batch * self.n_batches * self.new / self.seconds


class _Rows:
    """Linear expressions of the places: a row of coefficients and a constant each."""

    def __init__(self, load: OptWorkload, machine: T4, gpu_batch: int, n_batches: int) -> None:
        self._load, self._machine = load, machine
        self._gbs, self._bls = gpu_batch, gpu_batch * n_batches
        self._wi = 8 * load.width**2 + 4 * load.width * load.ffn  # bytes of a layer

    def prefill(self) -> list[np.ndarray]:
        """Times whose largest is that of a layer in prefill, seconds: upload, download, compute."""
        s, h1, h2, bls, wi, m = self._load.prompt, self._load.width, self._load.ffn, self._bls, self._wi, self._machine
        hidden, cache = 2 * s * h1 * bls, 4 * (s + 1) * h1 * bls
        ctog = _row(wc=wi, wn=wi, hc=hidden, hn=hidden) / m.ctog
        gtoc = _row(cc=cache, cn=cache) / m.gtoc_cache + _row(hc=hidden, hn=hidden) / m.gtoc_hidden
        dtoc = _row(wn=wi, hn=hidden) / m.dtoc
        ctod = _row(cn=cache) / m.ctod_cache_p + _row(hn=hidden) / m.ctod_hidden_p
        comp = bls * (8 * s * h1**2 + 4 * s * h1 * h2) / m.mm_p + 4 * bls * s**2 * h1 / m.bmm_p
        return [ctog + dtoc, gtoc + ctod, _row(constant=comp)]

    def decode(self) -> list[np.ndarray]:
        """As `prefill` for a decoding step, each with the upload that nothing hides."""
        load, m, bls, wi = self._load, self._machine, self._bls, self._wi
        h1, h2, seen = load.width, load.ffn, load.prompt + load.new / 2
        hidden, cache = 2 * h1 * bls, 4 * bls * seen * h1
        ctog = _row(wc=wi, wn=wi, hc=hidden, hn=hidden) / m.ctog
        gtoc = _row(hc=hidden, hn=hidden) / m.gtoc_hidden
        dtoc = _row(cn=cache, hn=hidden) / m.dtoc + _row(wn=wi) / (0.95 * m.dtoc)
        ctod = _row(cn=4 * bls * h1, hn=hidden) / m.ctod_g
        attend = _row(cg=cache / m.bmm_g, cc=cache / self._cpu_rate(), cn=cache / self._cpu_rate())
        comp = attend + _row(constant=bls * (8 * h1**2 + 4 * h1 * h2) / m.mm_g)
        return [ctog + part for part in (gtoc, dtoc, ctod, comp)]

    def _cpu_rate(self) -> float:
        m = self._machine
        a, b = max(0.0, log2(64 / self._gbs)), max(0.0, log2(4096 / self._load.width))
        return m.cpu * max(0.1, 1 + m.c1 * a * b - m.c2 * a - m.c3 * b)

    def memory(self) -> Iterator[tuple[np.ndarray, float]]:
        """What lies in GPU, CPU and disk at the peak, with its capacity: bytes."""
        load, m, gbs, bls, wi = self._load, self._machine, self._gbs, self._bls, self._wi
        s, n, layers, h1, h2, nh = load.prompt, load.new, load.layers, load.width, load.ffn, load.heads
        cache, lane = 4 * (s + n) * h1 * bls * layers, 2 * h1 * gbs
        inter_p = gbs * (8 * s * h1 + 2 * s * h1 + 2 * nh * s**2 + 2 * s * h1 + 4 * s * h1 + 2 * s * h2 + 2 * s * h1)
        inter_g = 8 * gbs * h1 + 4 * gbs * h1 + 2 * gbs * h2 + 2 * gbs * h1
        attend = gbs * (2 * h1 + 2 * (s + n) * h1 + 2 * nh * (s + n)) + gbs * (2 * (s + n) * h1 + 2 * h1)
        gpu = m.alpha_g * m.gpu_bytes
        weights = _row(wg=wi * layers - 2 * wi, constant=2 * wi)
        yield weights + _row(hg=2 * s * h1 * bls - s * lane, cg=cache, constant=s * lane + inter_p), gpu
        own = 4 * gbs * (s + n) * h1 + attend
        yield weights + _row(hg=2 * h1 * bls - lane, cg=cache + own, constant=lane + inter_g), gpu
        cpu = m.alpha_c * m.cpu_bytes
        p = _row(wc=wi * layers, hc=2 * s * h1 * bls, cc=4 * s * h1 * bls * layers)
        yield p + _row(wg=-wi, hg=-s * lane, constant=wi + s * lane), cpu
        g = _row(wc=wi * layers, wn=wi, hc=2 * h1 * bls, hn=4 * h1 * gbs, cc=cache, cn=8 * (s + n) * h1 * gbs)
        yield g + _row(constant=2 * nh * (s + n) * gbs + lane), cpu
        disk = _row(wn=wi * layers, hn=2 * s * h1 * bls, cn=cache)
        yield disk, m.alpha_n * m.disk_bytes


def estimate(
    shares: dict[str, float], gpu_batch: int, n_batches: int, load: OptWorkload | None = None, machine: T4 | None = None
) -> PolicyTime:
    """Time of a given policy.

    Args:
        shares: by the names of `PLACES`, 0 to 1; names left out are 0.

    Raises:
        OptionError: a name not in `PLACES`, or a batch below 1. BudgetError: the policy does not fit the machine.

    Example:
        >>> fixed = {"wg": 0.2, "wc": 0.8, "cc": 1, "hc": 1}
        >>> machine = T4(gpu_bytes=16 * GB, alpha_g=1.2, alpha_c=1.2)
        >>> round(estimate(fixed, 48, 3, machine=machine).tokens_per_s, 3)
        7.136
    """
    load, machine = load or OptWorkload(), machine or T4()
    if unknown_names := set(shares) - set(PLACES):
        raise OptionError(f"unknown places {sorted(unknown_names)}; known: {', '.join(PLACES)}")
    rows = _rows(load, machine, gpu_batch, n_batches)
    x = np.array([*(shares.get(place, 0.0) for place in PLACES), 1.0])
    for needed, capacity in rows.memory():
        if needed @ x > capacity:
            raise BudgetError(f"the policy needs {needed @ x / GB:.1f} GB of a tier that has {capacity / GB:.1f} GB")
    return _outcome(rows, x, gpu_batch, n_batches, load)


def solve(
    gpu_batch: int, n_batches: int, load: OptWorkload | None = None, machine: T4 | None = None
) -> PolicyTime | None:
    """The fastest placement of a block, by a linear program; None where none fits.

    The optimum is degenerate: several placements take the same time.

    Raises:
        OptionError: a batch below 1, or scipy is not installed.
    """
    load, machine = load or OptWorkload(), machine or T4()
    optimize: Any = require("scipy.optimize", "offload", "the linear program of a plan")
    rows = _rows(load, machine, gpu_batch, n_batches)
    upper, bounds = [], []
    for time, at in [*((row, 0) for row in rows.prefill()), *((row, 1) for row in rows.decode())]:
        upper.append([*time[:-1], -float(at == 0), -float(at == 1)])
        bounds.append(-time[-1])
    for needed, capacity in rows.memory():  # in GB, so that all numbers are of one size
        upper.append([*(needed[:-1] / GB), 0.0, 0.0])
        bounds.append((capacity - needed[-1]) / GB)
    equal = np.zeros((3, 11))
    for kind in range(3):
        equal[kind, 3 * kind : 3 * kind + 3] = 1
    limits = [*[(0, 1)] * 8, (0, 0), (0, None), (0, None)]  # hidden states never lie on disk there
    cost = [*[0.0] * 9, load.layers, load.layers * (load.new - 1)]
    found = optimize.linprog(cost, np.array(upper), np.array(bounds), equal, np.ones(3), limits, method="highs")
    if not found.success:
        return None
    return _outcome(rows, np.array([*found.x[:9], 1.0]), gpu_batch, n_batches, load)


def search(load: OptWorkload | None = None, machine: T4 | None = None, *, largest: int = 64) -> PolicyTime:
    """The policy of the highest throughput over GPU batches 1 to 4 and multiples of 8 up to `largest`, and the numbers
    of GPU batches that fit: all up to 16, then in steps of an eighth.

    The official search stops where throughput first falls; this one goes on.

    Raises:
        BudgetError: no policy fits. OptionError: scipy is not installed.
    """
    found: list[PolicyTime] = []
    for gpu_batch in (1, 2, 3, 4, *range(8, largest + 1, 8)):
        n_batches = 1
        while (outcome := solve(gpu_batch, n_batches, load, machine)) is not None:
            found.append(outcome)
            n_batches += 1 + n_batches // 16 * 2
    if not found:
        raise BudgetError("no policy of this model fits the machine; raise a capacity or an alpha")
    return max(found, key=lambda outcome: outcome.tokens_per_s)


def _row(constant: float = 0.0, **coefficients: float) -> np.ndarray:
    return np.array([*(coefficients.get(place, 0.0) for place in PLACES), constant], dtype=np.float64)


def _rows(load: OptWorkload, machine: T4, gpu_batch: int, n_batches: int) -> _Rows:
    if gpu_batch < 1 or n_batches < 1:
        raise OptionError(f"a block of {n_batches} batches of {gpu_batch} sequences holds none; give at least 1")
    return _Rows(load, machine, gpu_batch, n_batches)


def _outcome(rows: _Rows, x: np.ndarray, gpu_batch: int, n_batches: int, load: OptWorkload) -> PolicyTime:
    prefill, decode = (max(float(time @ x) for time in times) for times in (rows.prefill(), rows.decode()))
    return PolicyTime(
        gpu_batch=gpu_batch,
        n_batches=n_batches,
        shares=dict(zip(PLACES, x[:9].tolist(), strict=True)),
        prefill_s=load.layers * prefill,
        decode_s=load.layers * (load.new - 1) * decode,
        new=load.new,
    )
