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


def least_seconds(cost: CostModel, block: BlockShape, room: Mapping[str, float], free: Collection[str]) -> float:
    """Seconds that a block takes at least, whatever its shares.

    Each term of a sweep is made as small as it can be alone: weights and KV each fill the place where they cost it
    least, as far as that place has room for them alone, then the next place. No sweep is shorter than the largest of
    these terms.

    Args:
        room: bytes of each of `DEVICE` and `HOST`. free: those of `PLACES` that may be more than 0.

    Returns:
        Infinity where a kind finds no room at all.
    """
    bytes_of = cost.bytes(block)
    left = {tier: room[tier] - sum(term.constant for term in bytes_of[tier]) for tier in (DEVICE, HOST)}
    most = [_most(index, bytes_of, left) if place in free else 0.0 for index, place in enumerate(PLACES)]
    if sum(most[:3]) < 1 - _ROUNDING or sum(most[3:]) < 1 - _ROUNDING:
        return float("inf")
    course = cost.course(block)
    sweeps = ((course.prefill, cost.prefill), (course.decode, cost.decode))
    seconds = sum(n * max(_least(term, most) for term in terms(block)) for n, terms in sweeps if n)
    return float(seconds) * (1 - _ROUNDING)


def _most(index: int, bytes_of: Mapping[str, list[Term]], left: Mapping[str, float]) -> float:
    """The largest share of a place."""
    tier = PLACES[index].partition(" ")[2]
    if tier == DISK:
        tier = HOST  # a disk has room; what is on its way there takes memory
    n_bytes = sum(term.shares[index] for term in bytes_of[tier])
    if left[tier] < 0:
        return 0.0
    return 1.0 if n_bytes <= left[tier] else left[tier] / n_bytes


def _least(term: Term, most: Sequence[float]) -> float:
    """A term with the shares that are best for it alone."""
    found = term.constant
    for kind in (range(3), range(3, 6)):
        rest = 1.0
        for index in sorted(kind, key=lambda at: term.shares[at]):
            share = min(most[index], rest)
            found += term.shares[index] * share
            rest -= share
    return found


#: Prompt tokens in a sweep that are tried; and sequences of a block, at most.
PROMPT_ROWS = (16, 64, 128, 256, 512, 1024, 2048)
MOST_SEQUENCES = 256
#: Micro-batches that are tried besides the whole block.
MICRO_BATCHES = (8, 32, 128)
#: Embeddings and head are tried on the disk where they take more than 1/16 of the memory.
WORTH = 16
#: Of plans whose throughput differs by less, the one whose block ends first is chosen.
INDIFFERENT = 0.03
Shares = Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a plan must keep to.

    Attributes:
        memory: bytes of the host. device_memory: of an accelerator. latency_s: of a block, from its first prompt to its
            last token; None: any.
        sequences, prompt_rows: of a block and of a sweep. kv: bytes of the KV in the host's memory; None: any.
    """

    memory: int
    device_memory: int = 0
    latency_s: float | None = None
    sequences: int = MOST_SEQUENCES
    prompt_rows: int = PROMPT_ROWS[-1]
    kv: int | None = None

    @property
    def rows(self) -> tuple[int, ...]:
        """Prompt tokens in a sweep that are tried."""
        return tuple(n for n in PROMPT_ROWS if n <= self.prompt_rows) or (self.prompt_rows,)

    def of(self, tier: str) -> float:
        """Bytes of a tier."""
        return {DEVICE: float(self.device_memory), HOST: float(self.memory), DISK: inf}[tier]


def search(cost: CostModel, limits: Limits, can: Capabilities = ENGINE) -> Plan:
    """The plan of the highest throughput; of those that come within 3 % of it, the one whose block ends first.

    Every block size is tried, without the assumption that throughput has one peak; only those are solved whose lower
    bound of time leaves them a chance.

    Raises:
        BudgetError: nothing fits the memory, with the least that does; or nothing meets the latency, with the least.
        OptionError: scipy is not installed.
    """
    found: list[tuple[int, Prediction, Plan]] = []
    quickest, most = inf, 0.0
    for least, place, block in _promising(cost, limits, can):
        late = limits.latency_s is not None and least > limits.latency_s and least >= quickest
        if late or _too_slow(block.sequences * cost.kv.new, least, most):
            continue
        shares = solve(cost, block, limits, can)
        if shares is None:
            continue
        plan = predicted(cost, block, shares)
        assert plan.prediction is not None, "a plan that was searched for"
        quickest = min(quickest, plan.prediction.seconds)
        if limits.latency_s is not None and plan.prediction.seconds > limits.latency_s:
            continue
        most = max(most, plan.prediction.tokens_per_s)
        found.append((place, plan.prediction, plan))
    if not found:
        raise _nothing(cost, limits, can, quickest)
    near = [one for one in found if one[1].tokens_per_s >= most * (1 - INDIFFERENT)]
    return min(near, key=lambda one: (one[1].seconds, one[0]))[2]


def _too_slow(tokens: int, least_s: float, most_per_s: float) -> bool:
    """Whether a block that takes at least `least_s` for its tokens stays clearly below the best throughput."""
    return most_per_s > 0 and tokens < most_per_s * (1 - INDIFFERENT) * least_s


def _promising(cost: CostModel, limits: Limits, can: Capabilities) -> list[tuple[float, int, BlockShape]]:
    """Blocks with the least seconds that each may take and its place among them, the highest throughput first."""
    room = {tier: limits.of(tier) for tier in (DEVICE, HOST)}
    found = []
    for place, block in enumerate(blocks(cost, limits, can)):
        near = {"weights host", "kv host"}  # without slots nothing is read
        least = least_seconds(cost, block, room, {one for one in PLACES if _may(one, can)} if block.slots else near)
        if least < inf:
            found.append((least, place, block))
    return sorted(found, key=lambda one: (one[0] / one[2].sequences, one[1]))


def least_memory(cost: CostModel, can: Capabilities = ENGINE, prompt_rows: int = PROMPT_ROWS[0]) -> int:
    """Bytes of the host with which one sequence runs, the smallest there are; `prompt_rows` of a prompt at a time."""
    blocks = [_smallest(can, prompt_rows, ends) for ends in _ends(can)]
    return min(_least_bytes(cost, block, can) for block in blocks)


def _least_bytes(cost: CostModel, block: BlockShape, can: Capabilities) -> int:
    """Of the host, with everything as far away as it may be."""
    return ceil(min(sum(term.at(far) for term in cost.bytes(block)[HOST]) for far in _farthest(block, can)))


def _farthest(block: BlockShape, can: Capabilities) -> list[dict[str, float]]:
    """Shares with weights as far away as they may be, and KV in either place: far away it needs windows and slots."""
    weights = "weights disk" if block.slots else "weights host"
    places = ["kv host", *(["kv disk"] if DISK in can.kv and block.slots else [])]
    return [{weights: 1.0, place: 1.0} for place in places]


def _smallest(can: Capabilities, prompt_rows: int, ends: Ends = "host") -> BlockShape:
    slots = 2 if DISK in can.weights else 0
    return BlockShape(sequences=1, micro_batch=1, prompt_rows=prompt_rows, slots=slots, ends=ends)


def _ends(can: Capabilities) -> tuple[Ends, ...]:
    """Where embeddings and head may lie: on a disk where layers may."""
    return can.ends if DISK in can.weights else ("host",)


def solve(cost: CostModel, block: BlockShape, limits: Limits, can: Capabilities = ENGINE) -> Shares | None:
    """The shares with which a block takes the least time; None where it does not fit. Layers are whole.

    Raises:
        OptionError: scipy is not installed.
    """
    within = {place: _may(place, can) for place in PLACES}
    near = {"weights host": 1.0, "kv host": 1.0}
    bytes_of = cost.bytes(block)
    if block.slots == 0:  # nothing is read: only the host's memory says whether it runs
        return near if _fits(bytes_of, near, limits) and within["weights host"] and within["kv host"] else None
    free = [place for place, may in within.items() if may]
    if set(free) <= {"weights host", "weights disk", "kv host"}:  # one choice: more weights in memory never cost time
        shares: Shares | None = _fill_memory(bytes_of[HOST], limits)
    else:  # KV on a disk takes memory however little it is, which no linear program knows: with it, and without
        choices = [free, [place for place in free if place != "kv disk"]]
        tried = [solve_linear(cost, block, limits, one) for one in (choices if "kv disk" in free else [free])]
        found = [one for one in tried if one is not None]
        shares = min(found, key=lambda one: _seconds(cost, block, one), default=None)
    return None if shares is None else _whole_layers(cost, shares, bytes_of, limits)


def solve_linear(cost: CostModel, block: BlockShape, limits: Limits, free: Sequence[str]) -> Shares | None:
    """The shares with which a block takes the least time, by a linear program; None where it does not fit.

    Variables are the shares and the times of a prefill and of a decoding sweep, each at least every term of it.

    Args:
        free: those of `PLACES` that may be more than 0.

    Raises:
        OptionError: scipy is not installed.
    """
    optimize: Any = require("scipy.optimize", "offload", "the linear program of a plan")
    bytes_of = cost.bytes(block)
    rows, most = [], []
    for at, terms in enumerate((cost.prefill(block), cost.decode(block))):
        for term in terms:
            rows.append([*term.shares, -float(at == 0), -float(at == 1)])
            most.append(-term.constant)
    for tier in (DEVICE, HOST):
        unit = max(limits.of(tier), 1.0)  # so that all numbers are of one size
        tier_terms = bytes_of[tier]
        rows.append([*(sum(column) / unit for column in zip(*(t.shares for t in tier_terms), strict=True)), 0.0, 0.0])
        constant = sum(t.constant + t.with_disk * ("kv disk" in free) for t in tier_terms)
        most.append((limits.of(tier) - constant) / unit)
    equal = [[1.0] * 3 + [0.0] * 5, [0.0] * 3 + [1.0] * 3 + [0.0] * 2]
    bounds = [(0.0, float(place in free)) for place in PLACES] + [(0.0, None)] * 2
    found = optimize.linprog(
        [0.0] * 6 + list(_sweeps(cost, block)), rows, most, equal, [1.0, 1.0], bounds, method="highs"
    )
    return dict(zip(PLACES, map(float, found.x[:6]), strict=True)) if found.success else None


def _fill_memory(terms: Sequence[Term], limits: Limits) -> Shares | None:
    """As many weights in memory as fit with the rest, the others on disk; None where the rest does not fit."""
    rest = limits.memory - sum(term.at({"kv host": 1.0}) for term in terms)
    if rest < 0:
        return None
    host = min(1.0, rest / sum(term.shares[PLACES.index("weights host")] for term in terms))
    return {"weights host": host, "weights disk": 1 - host, "kv host": 1.0}


def predicted(cost: CostModel, block: BlockShape, shares: Shares) -> Plan:
    """The plan of a block with these shares, and what it is predicted to do."""
    n_prefill, n_decode = _sweeps(cost, block)
    prefill, decode = _longest(cost.prefill(block), shares), _longest(cost.decode(block), shares)
    prefill_s, decode_s = n_prefill * prefill[0], n_decode * decode[0]
    prompts, new = block.sequences * cost.kv.prompt, block.sequences * cost.kv.new
    seconds = prefill_s + decode_s
    plan = Plan(
        weights=_of("weights", shares),
        kv=_of("kv", shares),
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
    """Bytes by tier and purpose; of weights without an accelerator those of the very layers."""
    found = {
        tier: {term.name: n for term in terms if (n := round(term.at(shares)))}
        for tier, terms in cost.bytes(block).items()
    }
    if not plan.share("weights", DEVICE):
        layers = cost.model.layers
        for tier, indices in ((HOST, plan.kept_layers(len(layers))), (DISK, plan.streamed_layers(len(layers)))):
            if indices:
                found[tier]["weights"] = sum(layers[index].n_bytes for index in indices)
    return found


def _sweeps(cost: CostModel, block: BlockShape) -> tuple[int, int]:
    """Sweeps of a block that read prompts, and those that only decode."""
    course = cost.course(block)
    return course.prefill, course.decode


def _seconds(cost: CostModel, block: BlockShape, shares: Shares) -> float:
    prefills, decodes = _sweeps(cost, block)
    return prefills * _longest(cost.prefill(block), shares)[0] + decodes * _longest(cost.decode(block), shares)[0]


def _longest(terms: Iterable[Term], shares: Shares) -> tuple[float, str]:
    return max((term.at(shares), term.name) for term in terms)


def _of(kind: str, shares: Shares) -> dict[str, float]:
    found = {tier: shares.get(f"{kind} {tier}", 0.0) for tier in TIERS}
    total = sum(found.values())
    return {tier: share / total for tier, share in found.items() if share > 0}


def _may(place: str, can: Capabilities) -> bool:
    kind, _, tier = place.partition(" ")
    return tier in (can.weights if kind == "weights" else can.kv)


def _fits(bytes_of: Mapping[str, list[Term]], shares: Shares, limits: Limits) -> bool:
    return all(sum(term.at(shares) for term in bytes_of[tier]) <= limits.of(tier) for tier in (DEVICE, HOST))


def _whole_layers(cost: CostModel, shares: Shares, bytes_of: Mapping[str, list[Term]], limits: Limits) -> Shares | None:
    """The shares with whole layers, as many of them near as the share holds; None where that is more than fits.

    Layers differ in size, if only by what lies between them and the next page of their file: of those that stay in the
    host's memory the very bytes count.
    """
    layers = cost.model.layers
    n = len(layers)
    near = {f"weights {tier}": int(shares.get(f"weights {tier}", 0.0) * n + 1e-6) / n for tier in (DEVICE, HOST)}
    found = {**shares, **near, "weights disk": 1 - sum(near.values())}
    if near["weights device"]:
        return found if _fits(bytes_of, found, limits) else None
    rest = limits.memory - sum(term.at({**found, "weights host": 0.0}) for term in bytes_of[HOST])
    kept = round(near["weights host"] * n)
    while kept and sum(layers[index].n_bytes for index in spread(kept, n)) > rest:
        kept -= 1
    return {**found, "weights host": kept / n, "weights disk": 1 - kept / n} if rest >= 0 else None


def blocks(cost: CostModel, limits: Limits, can: Capabilities) -> Iterator[BlockShape]:
    """All blocks that are tried and may fit."""
    for schedule in sorted(can.schedules, reverse=True):  # of equals the first is taken: zigzag, row, diagonal
        for at, rows in enumerate(limits.rows):
            for sequences in _counts(limits.sequences):
                whole = min(rows, sequences * cost.kv.prompt)
                if whole < rows and at and whole <= limits.rows[at - 1]:
                    continue  # as with fewer rows
                parts = can.micro_batches and schedule != "row"
                micro = {sequences, *(n for n in MICRO_BATCHES if parts and n < sequences)}
                some = False
                for batch in sorted(micro):
                    for slots in (0, 2, SLOTS) if DISK in can.weights else (0,):
                        block = _block(schedule, sequences, batch, rows, slots)
                        for placed in _placed(cost, block, limits, can):
                            some = True
                            yield placed
                if not some:
                    break


def _block(schedule: str, sequences: int, batch: int, rows: int, slots: int) -> BlockShape:
    chosen: Schedule = schedule  # type: ignore[assignment]
    return BlockShape(sequences=sequences, micro_batch=batch, prompt_rows=rows, schedule=chosen, slots=slots)


def _placed(cost: CostModel, block: BlockShape, limits: Limits, can: Capabilities) -> Iterator[BlockShape]:
    """A block with embeddings and head wherever they may lie and it may fit.

    They go to the disk where that saves a part of the memory that counts, or where nothing else fits.
    """
    fits = "host" in can.ends and _may_fit(cost, block, limits, can)
    if fits:
        yield block
    if not block.slots or DISK not in _ends(can):
        return
    far, saved = replace(block, ends="disk"), cost.model.end_bytes - cost.model.far_ends.held_bytes
    if (not fits or saved * WORTH > limits.memory) and _may_fit(cost, far, limits, can):
        yield far


def _may_fit(cost: CostModel, block: BlockShape, limits: Limits, can: Capabilities) -> bool:
    """Whether it fits with everything as far away as it may be."""
    terms = cost.bytes(block)[HOST]
    for far in _farthest(block, can):
        kv = sum(term.at(far) for term in terms if term.name == "kv")
        if sum(term.at(far) for term in terms) <= limits.memory and (limits.kv is None or kv <= limits.kv):
            return True
    return False


def _counts(most: int) -> Iterator[int]:
    """1, 2, 3, ..., 10, 12, 14, ... up to `most`: all up to 10, then steps of about a fifth."""
    n = 1
    while n <= most:
        yield n
        n += max(1, n // 5)


def check_memory(cost: CostModel, limits: Limits, can: Capabilities = ENGINE) -> None:
    """
    Raises:
        BudgetError: the memory, or the part of it that KV may take, is below the smallest that runs.
    """
    if limits.memory < least_memory(cost, can, limits.rows[0]):
        raise _nothing(cost, limits, can, inf)
    block = _smallest(can, limits.rows[0])
    kv = ceil(sum(term.at({"kv host": 1.0}) for term in cost.bytes(block)[HOST] if term.name == "kv"))
    if limits.kv is not None and limits.kv < kv and DISK not in can.kv:
        raise BudgetError(
            f"kv_memory={limits.kv:,} bytes holds no sequence of {cost.kv.prompt} + {cost.kv.new} tokens, which takes "
            f"{kv:,} while its prompt is read; raise it"
        )


def _nothing(cost: CostModel, limits: Limits, can: Capabilities, quickest: float) -> BudgetError:
    if quickest < inf and limits.latency_s is not None:
        return BudgetError(
            f"latency_s={limits.latency_s:g} s: the quickest plan takes {quickest:.3g} s for one block; allow more, or "
            "shorten prompts or answers"
        )
    least = least_memory(cost, can, limits.rows[0])
    ends = min(_ends(can), key=lambda ends: _least_bytes(cost, _smallest(can, limits.rows[0], ends), can))
    near = cost.model.far_ends.held_bytes if ends == DISK else cost.model.end_bytes
    read = f", which are read from the disk, {near:,} in memory" if ends == DISK else f" {near:,}"
    smaller = "shorter prompts, a smaller budget, a codec such as int4" + (
        "" if DISK in can.weights else ", or a disk for the weights (disk=DIR)"
    )
    return BudgetError(
        f"memory={limits.memory:,} bytes is below the smallest that runs, {least:,} bytes for one sequence of "
        f"{cost.kv.prompt} + {cost.kv.new} tokens (KV {cost.kv.most:,}, embeddings and head{read}); "
        f"{smaller} make it smaller"
    )
