"""What the scheduler tells the workers with a step: evictions, and the queries to remember."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Eviction:
    """One event of one request.

    Attributes:
        request: Id of the request.
        source: Blocks whose entries compete, in the order of the text; packed ones come first.
        target: Blocks that the kept entries fill; they may be the first ones of `source`.
        tail: Newer blocks, which stay as they are.
        computed: Tokens of the request that are computed.
        left_before: Blocks of the text that had left the newest tokens at the event before, which packed the first of
            `source`; 0 if there was none.
        row: The request's blocks after the event, null blocks among them.
        sinks: First positions that stay; None for those of the method.
        keep: Spans (begin, end) of positions that stay in every head.
    """

    request: str
    source: list[int]
    target: list[int]
    tail: list[int]
    computed: int
    left_before: int
    row: list[int]
    sinks: int | None = None
    keep: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Observation:
    """Queries of a request in this step that a later event needs.

    Attributes:
        request: Id of the request.
        first: Position of the first of them.
        slots: Places in the cache of their tokens: block * block size + offset.
    """

    request: str
    first: int
    slots: list[int]


@dataclass(frozen=True, slots=True)
class StepPart:
    """Tokens of a request in this step, whose attention or queries a later event needs.

    Attributes:
        request: Id of the request.
        first: Position of the first of them.
        count: How many they are.
        slot: Place in the cache of the first: block * block size + offset.
    """

    request: str
    first: int
    count: int
    slot: int


@dataclass(slots=True)
class StepOrders:
    """Orders of one step.

    Attributes:
        evictions: Events before the step's tokens are computed.
        observations: Queries to remember while they are computed.
        parts: Tokens to sum over while they are computed; none for methods without sums.
    """

    evictions: list[Eviction] = field(default_factory=list)
    observations: list[Observation] = field(default_factory=list)
    parts: list[StepPart] = field(default_factory=list)
