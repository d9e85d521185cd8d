"""Search for the fastest plan: shares by a linear program for each block, few of them by a lower bound."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Any

from millpond.engine.offload.cost import PLACES, BlockShape, CostModel, Term
from millpond.engine.offload.plan import (
    DEVICE,
    DISK,
    ENGINE,
    HOST,
    SLOTS,
    TIERS,
    Capabilities,
    Ends,
    Plan,
    Prediction,
    Schedule,
    spread,
)
from millpond.errors import BudgetError
from millpond.optional import require

#: Rounding of the programs, whose solutions may be that much below what is exact.
_ROUNDING = 1e-6


def min_seconds(cost: CostModel, block: BlockShape, room: Mapping[str, float], free: Collection[str]) -> float:
    """Return the least seconds that a block takes, whatever its shares.

    Each term of a sweep is made as small as it can be alone: weights and KV each fill the place where they cost it
    least, up to the room that place has for them alone, then the next place. No sweep is shorter than the largest of
    these terms.

    Args:
        cost: Cost model.
        block: Shape of the block.
        room: Bytes of each of `DEVICE` and `HOST`.
        free: Those of `PLACES` that may be more than 0.

    Returns:
        Infinity where a kind finds no room at all.
    """
    bytes_of = cost.bytes(block)
    bytes_left = {tier: room[tier] - sum(term.constant for term in bytes_of[tier]) for tier in (DEVICE, HOST)}
    max_shares = [_max_share(n, bytes_of, bytes_left) if place in free else 0.0 for n, place in enumerate(PLACES)]
    if sum(max_shares[:3]) < 1 - _ROUNDING or sum(max_shares[3:]) < 1 - _ROUNDING:
        return float("inf")
    sweeps_of_block = cost.sweeps(block)
    sweeps = ((sweeps_of_block.prefill, cost.prefill), (sweeps_of_block.decode, cost.decode))
    seconds = sum(n * max(_min_term(term, max_shares) for term in terms(block)) for n, terms in sweeps if n)
    return float(seconds) * (1 - _ROUNDING)


def _max_share(index: int, bytes_of: Mapping[str, list[Term]], free_bytes: Mapping[str, float]) -> float:
    """Return the largest share of a place."""
    tier = PLACES[index].partition(" ")[2]
    if tier == DISK:
        tier = HOST  # a disk has room; what is on its way there takes memory
    n_bytes = sum(term.shares[index] for term in bytes_of[tier])
    if free_bytes[tier] < 0:
        return 0.0
    return 1.0 if n_bytes <= free_bytes[tier] else free_bytes[tier] / n_bytes


def _min_term(term: Term, max_shares: Sequence[float]) -> float:
    """Return a term with the shares that are best for it alone."""
    total = term.constant
    for kind in (range(3), range(3, 6)):
        remaining = 1.0
        for index in sorted(kind, key=lambda at: term.shares[at]):
            share = min(max_shares[index], remaining)
            total += term.shares[index] * share
            remaining -= share
    return total


#: Prompt tokens in a sweep that are tried; and most sequences of a block.
PROMPT_ROWS = (16, 64, 128, 256, 512, 1024, 2048)
MAX_SEQUENCES = 256
#: Micro-batches that are tried besides the whole block.
MICRO_BATCHES = (8, 32, 128)
#: Embeddings and head are tried on the disk where they take more than 1/16 of the memory.
WORTH = 16
#: Of plans whose throughput differs by less, the one whose block ends first is chosen.
INDIFFERENT = 0.03
Shares = Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a plan.

    Attributes:
        memory: Bytes of the host.
        device_memory: Bytes of an accelerator.
        latency_s: Seconds of a block, from its first prompt to its last token; None: any.
        sequences: Most sequences of a block.
        prompt_rows: Most prompt tokens of a sweep.
        kv: Bytes of the KV in the host's memory; None: any.
    """

    memory: int
    device_memory: int = 0
    latency_s: float | None = None
    sequences: int = MAX_SEQUENCES
    prompt_rows: int = PROMPT_ROWS[-1]
    kv: int | None = None

    @property
    def rows(self) -> tuple[int, ...]:
        """Prompt tokens in a sweep that are tried."""
        return tuple(n for n in PROMPT_ROWS if n <= self.prompt_rows) or (self.prompt_rows,)

    def of(self, tier: str) -> float:
        """Return the bytes of a tier."""
        return {DEVICE: float(self.device_memory), HOST: float(self.memory), DISK: inf}[tier]


def search(cost: CostModel, limits: Limits, capabilities: Capabilities = ENGINE) -> Plan:
    """Return the plan of the highest throughput; among plans within 3 % of it the quickest.

    The quickest is the one whose block ends first. Every block size is tried, without the assumption that throughput
    has one peak; only those are solved whose lower bound of time leaves them a chance.

    Args:
        cost: Cost model.
        limits: Limits of the plan.
        capabilities: Placements and schedules that the plan may use.

    Raises:
        BudgetError: nothing fits the memory, with the least that does; or nothing meets the latency, with the least.
        OptionError: scipy is not installed.
    """
    candidates: list[tuple[int, Prediction, Plan]] = []
    min_block_s, max_tokens_per_s = inf, 0.0
    for min_s, index, block in _promising(cost, limits, capabilities):
        is_late = limits.latency_s is not None and min_s > limits.latency_s and min_s >= min_block_s
        if is_late or _too_slow(block.sequences * cost.kv.new, min_s, max_tokens_per_s):
            continue
        shares = solve(cost, block, limits, capabilities)
        if shares is None:
            continue
        plan = predicted(cost, block, shares)
        assert plan.prediction is not None, "a plan that was searched for"
        min_block_s = min(min_block_s, plan.prediction.seconds)
        if limits.latency_s is not None and plan.prediction.seconds > limits.latency_s:
            continue
        max_tokens_per_s = max(max_tokens_per_s, plan.prediction.tokens_per_s)
        candidates.append((index, plan.prediction, plan))
    if not candidates:
        raise _nothing(cost, limits, capabilities, min_block_s)
    near_best = [
        candidate for candidate in candidates if candidate[1].tokens_per_s >= max_tokens_per_s * (1 - INDIFFERENT)
    ]
    return min(near_best, key=lambda candidate: (candidate[1].seconds, candidate[0]))[2]


def _too_slow(tokens: int, min_s: float, max_tokens_per_s: float) -> bool:
    """Return whether a block of at least `min_s` stays clearly below the best throughput."""
    return max_tokens_per_s > 0 and tokens < max_tokens_per_s * (1 - INDIFFERENT) * min_s


def _promising(cost: CostModel, limits: Limits, capabilities: Capabilities) -> list[tuple[float, int, BlockShape]]:
    """Return blocks with their least seconds and indices, the highest throughput first."""
    room = {tier: limits.of(tier) for tier in (DEVICE, HOST)}
    bounds = []
    for index, block in enumerate(blocks(cost, limits, capabilities)):
        in_memory = {"weights host", "kv host"}  # without slots nothing is read
        min_s = min_seconds(
            cost,
            block,
            room,
            {bound for bound in PLACES if is_allowed(bound, capabilities)} if block.slots else in_memory,
        )
        if min_s < inf:
            bounds.append((min_s, index, block))
    return sorted(bounds, key=lambda bound: (bound[0] / bound[2].sequences, bound[1]))


def min_memory(cost: CostModel, capabilities: Capabilities = ENGINE, prompt_rows: int = PROMPT_ROWS[0]) -> int:
    """Return the least bytes of the host with which one sequence runs.

    Args:
        cost: Cost model.
        capabilities: Placements that may be used.
        prompt_rows: Tokens of a prompt that are read at a time.
    """
    blocks = [_smallest(capabilities, prompt_rows, ends) for ends in _ends(capabilities)]
    return min(_min_bytes(cost, block, capabilities) for block in blocks)


def _min_bytes(cost: CostModel, block: BlockShape, capabilities: Capabilities) -> int:
    """Return the least bytes of the host, with everything on the slowest tier allowed."""
    return ceil(
        min(
            sum(term.at(shares) for term in cost.bytes(block)[HOST])
            for shares in _slowest_placements(block, capabilities)
        )
    )


def _slowest_placements(block: BlockShape, capabilities: Capabilities) -> list[dict[str, float]]:
    """Return shares with weights on the slowest tier allowed, and KV on each tier.

    KV on a disk needs windows and slots.
    """
    weights = "weights disk" if block.slots else "weights host"
    places = ["kv host", *(["kv disk"] if DISK in capabilities.kv and block.slots else [])]
    return [{weights: 1.0, place: 1.0} for place in places]


def _smallest(capabilities: Capabilities, prompt_rows: int, ends: Ends = "host") -> BlockShape:
    slots = 2 if DISK in capabilities.weights else 0
    return BlockShape(sequences=1, micro_batch=1, prompt_rows=prompt_rows, slots=slots, ends=ends)


def _ends(capabilities: Capabilities) -> tuple[Ends, ...]:
    """Return the tiers of embeddings and head: a disk where layers may be on one."""
    return capabilities.ends if DISK in capabilities.weights else ("host",)


def solve(cost: CostModel, block: BlockShape, limits: Limits, capabilities: Capabilities = ENGINE) -> Shares | None:
    """Return the shares with which a block takes the least time; None where it does not fit.

    Layers are whole.

    Raises:
        OptionError: scipy is not installed.
    """
    allowed = {place: is_allowed(place, capabilities) for place in PLACES}
    in_memory = {"weights host": 1.0, "kv host": 1.0}
    bytes_of = cost.bytes(block)
    if block.slots == 0:  # nothing is read: only the host's memory says whether it runs
        return (
            in_memory if fits(bytes_of, in_memory, limits) and allowed["weights host"] and allowed["kv host"] else None
        )
    free = [place for place, is_allowed in allowed.items() if is_allowed]
    if set(free) <= {"weights host", "weights disk", "kv host"}:  # one choice: more weights in memory never cost time
        shares: Shares | None = _fill_memory(bytes_of[HOST], limits)
    else:  # KV on a disk takes memory however little it is, which no linear program knows: with it, and without
        choices = [free, [place for place in free if place != "kv disk"]]
        solutions = [
            solve_linear(cost, block, limits, solution) for solution in (choices if "kv disk" in free else [free])
        ]
        fitting = [solution for solution in solutions if solution is not None]
        shares = min(fitting, key=lambda solution: block_seconds(cost, block, solution), default=None)
    return None if shares is None else _whole_layers(cost, shares, bytes_of, limits)


def solve_linear(cost: CostModel, block: BlockShape, limits: Limits, free: Sequence[str]) -> Shares | None:
    """Return the shares with which a block takes the least time, by a linear program.

    Variables are the shares and the times of a prefill and of a decoding sweep, each at least every term of it.

    Args:
        cost: Cost model.
        block: Shape of the block.
        limits: Limits of the plan.
        free: Those of `PLACES` that may be more than 0.

    Returns:
        The shares; None where the block does not fit.

    Raises:
        OptionError: scipy is not installed.
    """
    optimize: Any = require("scipy.optimize", "offload", "the linear program of a plan")
    bytes_of = cost.bytes(block)
    rows, upper_bounds = [], []
    for sweep, terms in enumerate((cost.prefill(block), cost.decode(block))):
        for term in terms:
            rows.append([*term.shares, -float(sweep == 0), -float(sweep == 1)])
            upper_bounds.append(-term.constant)
    for tier in (DEVICE, HOST):
        unit = max(limits.of(tier), 1.0)  # so that all numbers are of one size
        tier_terms = bytes_of[tier]
        rows.append(
            [
                *(sum(column) / unit for column in zip(*(tier_term.shares for tier_term in tier_terms), strict=True)),
                0.0,
                0.0,
            ]
        )
        constant = sum(tier_term.constant + tier_term.with_disk * ("kv disk" in free) for tier_term in tier_terms)
        upper_bounds.append((limits.of(tier) - constant) / unit)
    equalities = [[1.0] * 3 + [0.0] * 5, [0.0] * 3 + [1.0] * 3 + [0.0] * 2]
    bounds = [(0.0, float(place in free)) for place in PLACES] + [(0.0, None)] * 2
    solution = optimize.linprog(
        [0.0] * 6 + list(_sweeps(cost, block)), rows, upper_bounds, equalities, [1.0, 1.0], bounds, method="highs"
    )
    return dict(zip(PLACES, map(float, solution.x[:6]), strict=True)) if solution.success else None


def _fill_memory(terms: Sequence[Term], limits: Limits) -> Shares | None:
    """Keep the most weights in memory that fit with the rest; None: the rest does not fit."""
    free_bytes = limits.memory - sum(term.at({"kv host": 1.0}) for term in terms)
    if free_bytes < 0:
        return None
    host = min(1.0, free_bytes / sum(term.shares[PLACES.index("weights host")] for term in terms))
    return {"weights host": host, "weights disk": 1 - host, "kv host": 1.0}


def predicted(cost: CostModel, block: BlockShape, shares: Shares) -> Plan:
    """Return the plan of a block with these shares, and its predicted figures."""
    n_prefill, n_decode = _sweeps(cost, block)
    prefill, decode = _longest(cost.prefill(block), shares), _longest(cost.decode(block), shares)
    prefill_s, decode_s = n_prefill * prefill[0], n_decode * decode[0]
    prompts, new = block.sequences * cost.kv.prompt, block.sequences * cost.kv.new
    seconds = prefill_s + decode_s
    plan = Plan(
        weights=_of("weights", shares),
        kv=({} if cost.machine.accelerator is None else {DEVICE: 0.0}) | _of("kv", shares),  # a device is named
        schedule=block.schedule,
        micro_batch=min(block.micro_batch, block.sequences),
        block=block.sequences,
        prompt_rows=block.prompt_rows,
        slots=block.slots or SLOTS,
        ends=block.ends,
        model=cost.model.fingerprint,
    )
    prediction = Prediction(
        seconds=seconds,
        prefill_s=prefill_s,
        decode_s=decode_s,
        tokens_per_s=new / seconds,
        prefill_tokens_per_s=prompts / (prefill_s or seconds),
        decode_tokens_per_s=new / (decode_s or seconds),
        prefill_bound=prefill[1],
        decode_bound=decode[1],
        bytes=_bytes(cost, block, shares, plan),
    )
    return replace(plan, prediction=prediction)


def _bytes(cost: CostModel, block: BlockShape, shares: Shares, plan: Plan) -> dict[str, dict[str, int]]:
    """Return bytes by tier and purpose; without an accelerator, those of the very layers."""
    by_tier = {
        tier: {term.name: n for term in terms if (n := round(term.at(shares)))}
        for tier, terms in cost.bytes(block).items()
    }
    if not plan.share("weights", DEVICE):
        layers = cost.model.layers
        for tier, indices in ((HOST, plan.kept_layers(len(layers))), (DISK, plan.streamed_layers(len(layers)))):
            if indices:
                by_tier[tier]["weights"] = sum(layers[index].n_bytes for index in indices)
    return by_tier


def _sweeps(cost: CostModel, block: BlockShape) -> tuple[int, int]:
    """Return the sweeps of a block that read prompts, and those that only decode."""
    sweeps_of_block = cost.sweeps(block)
    return sweeps_of_block.prefill, sweeps_of_block.decode


def block_seconds(cost: CostModel, block: BlockShape, shares: Shares) -> float:
    prefills, decodes = _sweeps(cost, block)
    return prefills * _longest(cost.prefill(block), shares)[0] + decodes * _longest(cost.decode(block), shares)[0]


def _longest(terms: Iterable[Term], shares: Shares) -> tuple[float, str]:
    return max((term.at(shares), term.name) for term in terms)


def _of(kind: str, shares: Shares) -> dict[str, float]:
    by_tier = {tier: shares.get(f"{kind} {tier}", 0.0) for tier in TIERS}
    total = sum(by_tier.values())
    return {tier: share / total for tier, share in by_tier.items() if share > 0}


def is_allowed(place: str, capabilities: Capabilities) -> bool:
    kind, _, tier = place.partition(" ")
    return tier in (capabilities.weights if kind == "weights" else capabilities.kv)


def fits(bytes_of: Mapping[str, list[Term]], shares: Shares, limits: Limits) -> bool:
    return all(sum(term.at(shares) for term in bytes_of[tier]) <= limits.of(tier) for tier in (DEVICE, HOST))


def _whole_layers(cost: CostModel, shares: Shares, bytes_of: Mapping[str, list[Term]], limits: Limits) -> Shares | None:
    """Return the shares with whole layers, the most in fast memory that the share holds.

    None: they do not fit. Layers differ in size, if only by the gap between them and the next page of their file: of
    those that stay in the host's memory the very bytes count.
    """
    layers = cost.model.layers
    n = len(layers)
    in_memory = {f"weights {tier}": int(shares.get(f"weights {tier}", 0.0) * n + 1e-6) / n for tier in (DEVICE, HOST)}
    rounded = {**shares, **in_memory, "weights disk": 1 - sum(in_memory.values())}
    if in_memory["weights device"]:
        return rounded if fits(bytes_of, rounded, limits) else None
    free_bytes = limits.memory - sum(term.at({**rounded, "weights host": 0.0}) for term in bytes_of[HOST])
    kept = round(in_memory["weights host"] * n)
    while kept and sum(layers[index].n_bytes for index in spread(kept, n)) > free_bytes:
        kept -= 1
    return {**rounded, "weights host": kept / n, "weights disk": 1 - kept / n} if free_bytes >= 0 else None


def blocks(cost: CostModel, limits: Limits, capabilities: Capabilities) -> Iterator[BlockShape]:
    """Yield all blocks that are tried and may fit."""
    for schedule in sorted(capabilities.schedules, reverse=True):  # of equals the first is taken: zigzag, row, diagonal
        for index, rows in enumerate(limits.rows):
            for sequences in block_sizes(limits.sequences):
                used_rows = min(rows, sequences * cost.kv.prompt)
                if used_rows < rows and index and used_rows <= limits.rows[index - 1]:
                    continue  # as with fewer rows
                parts = capabilities.micro_batches and schedule != "row"
                micro = {sequences, *(n for n in MICRO_BATCHES if parts and n < sequences)}
                any_fits = False
                for batch in sorted(micro):
                    for slots in (0, 2, SLOTS) if DISK in capabilities.weights else (0,):
                        block = _block(schedule, sequences, batch, rows, slots)
                        for placed in _placed(cost, block, limits, capabilities):
                            any_fits = True
                            yield placed
                if not any_fits:
                    break


def _block(schedule: str, sequences: int, batch: int, rows: int, slots: int) -> BlockShape:
    known_schedule: Schedule = schedule  # type: ignore[assignment]
    return BlockShape(sequences=sequences, micro_batch=batch, prompt_rows=rows, schedule=known_schedule, slots=slots)


def _placed(cost: CostModel, block: BlockShape, limits: Limits, capabilities: Capabilities) -> Iterator[BlockShape]:
    """Yield a block with each placement of embeddings and head that may fit.

    They go to the disk where that saves a part of the memory that counts, or where nothing else fits.
    """
    fits = "host" in capabilities.ends and _may_fit(cost, block, limits, capabilities)
    if fits:
        yield block
    if not block.slots or DISK not in _ends(capabilities):
        return
    on_disk, saved = replace(block, ends="disk"), cost.model.end_bytes - cost.model.ends_on_disk.held_bytes
    if (not fits or saved * WORTH > limits.memory) and _may_fit(cost, on_disk, limits, capabilities):
        yield on_disk


def _may_fit(cost: CostModel, block: BlockShape, limits: Limits, capabilities: Capabilities) -> bool:
    """Return whether a block fits with everything on the slowest tier allowed."""
    terms = cost.bytes(block)[HOST]
    for shares in _slowest_placements(block, capabilities):
        kv = sum(term.at(shares) for term in terms if term.name == "kv")
        if sum(term.at(shares) for term in terms) <= limits.memory and (limits.kv is None or kv <= limits.kv):
            return True
    return False


def block_sizes(max_count: int) -> Iterator[int]:
    """Yield 1, 2, 3, ..., 10, 12, 14, ... up to `max_count`.

    All up to 10, then steps of about a fifth.
    """
    n = 1
    while n <= max_count:
        yield n
        n += max(1, n // 5)


def check_memory(cost: CostModel, limits: Limits, capabilities: Capabilities = ENGINE) -> None:
    """Check that the memory, and the part of it that KV may take, suffice for one sequence.

    Raises:
        BudgetError: one of them is below the smallest that runs.
    """
    if limits.memory < min_memory(cost, capabilities, limits.rows[0]):
        raise _nothing(cost, limits, capabilities, inf)
    block = _smallest(capabilities, limits.rows[0])
    kv = ceil(sum(term.at({"kv host": 1.0}) for term in cost.bytes(block)[HOST] if term.name == "kv"))
    if limits.kv is not None and limits.kv < kv and DISK not in capabilities.kv:
        raise BudgetError(
            f"kv_memory={limits.kv:,} bytes holds no sequence of {cost.kv.prompt} + {cost.kv.new} tokens, which takes "
            f"{kv:,} while its prompt is read; raise it"
        )


def _nothing(cost: CostModel, limits: Limits, capabilities: Capabilities, min_block_s: float) -> BudgetError:
    if min_block_s < inf and limits.latency_s is not None:
        return BudgetError(
            f"latency_s={limits.latency_s:g} s: the quickest plan takes {min_block_s:.3g} s for one block; allow more, "
            "or shorten prompts or answers"
        )
    min_bytes = min_memory(cost, capabilities, limits.rows[0])
    min_rows = limits.rows[0]
    ends = min(_ends(capabilities), key=lambda e: _min_bytes(cost, _smallest(capabilities, min_rows, e), capabilities))
    resident = cost.model.ends_on_disk.held_bytes if ends == DISK else cost.model.end_bytes
    read = f", which are read from the disk, {resident:,} in memory" if ends == DISK else f" {resident:,}"
    smaller = "shorter prompts, a smaller budget, a codec such as int4" + (
        "" if DISK in capabilities.weights else ", or a disk for the weights (disk=DIR)"
    )
    return BudgetError(
        f"memory={limits.memory:,} bytes is below the smallest that runs, {min_bytes:,} bytes for one sequence of "
        f"{cost.kv.prompt} + {cost.kv.new} tokens (KV {cost.kv.most:,}, embeddings and head{read}); "
        f"{smaller} make it smaller"
    )
