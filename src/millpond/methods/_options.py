"""Common options of methods, each with its help."""

from __future__ import annotations

from typing import Annotated, Literal

from millpond.option_ranges import POSITIONS, SHARE, SOME_POSITIONS

Sinks = Annotated[int, "first positions that always stay", POSITIONS]
SinksAdded = Annotated[int, "first positions that always stay; the paper has none", POSITIONS]
Recent = Annotated[
    int | float, "newest entries that stay: a share of the budget (0.1) or a count (16)", POSITIONS, SHARE
]
GroupReduce = Annotated[Literal["mean", "max", "sum"], "query heads of a GQA group to their KV head"]

#: Methods that plan once, at the prompt's end.
Grow = Annotated[
    Literal["grow", "once", "evict"],
    "after the prompt: grow until the next one ends, never evict again, or evict at each step",
]
GrowInPaper = Annotated[
    Literal["grow", "once", "evict"],
    "after the prompt: grow until the next one ends (the paper), never evict again, or evict at each step",
]
GrowOrEvict = Annotated[Literal["grow", "evict"], "after the prompt: grow (the paper), or evict at each step"]

#: Methods that keep the budget at each step.
EvictAlways = Annotated[
    Literal["evict", "grow", "once"],
    "after the prompt: evict at each step, grow until the next prompt ends, or never evict again",
]
EvictInPaper = Annotated[
    Literal["evict", "grow", "once"],
    "after the prompt: evict at each step (the paper), grow until the next prompt ends, or never evict again",
]

#: Methods whose score needs no later query.
ChunkedPrefill = Annotated[
    Literal["once", "chunks"],
    "plan once, at the prompt's end, or evict behind every chunk, so that no more than budget + chunk is ever held",
]
Chunk = Annotated[int, "tokens between two evictions, with prefill=chunks", SOME_POSITIONS]

Across = Annotated[
    bool, "the heads of all layers compete for one budget; else every layer has its own, and each head of it the same"
]

#: Methods that plan while they decode, once some entries have gathered.
PromptStays = Annotated[
    bool, "the whole prompt stays, where it leaves a place free besides the newest entries; else it competes"
]
RoundLength = Annotated[
    int, "while decoding: entries that gather beyond the budget before the next plan", SOME_POSITIONS
]
PlannedDecode = Annotated[Literal["evict", "grow"], "after the prompt: evict what has gathered, or grow"]
