"""Course of a block: what the scheduler runs in each sweep while the prompts of a block are read, and after them."""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from typing import NamedTuple

from millpond.engine.scheduler import MOST_PIECES, READING_SHARE


class BlockCourse(NamedTuple):
    """Sweeps of a block whose sequences are alike, and what one of them runs on average.

    Attributes:
        prefill: sweeps that read prompts; sequences whose prompts have ended decode in them. decode: sweeps after them.
        prompt_rows, pieces, ends: of a sweep that reads prompts: tokens, pieces of different prompts, and prompts that
            end. meanwhile: sequences that decode in it. decoding: in a sweep after them.
        again: tokens that earlier sweeps have read of the prompts of a sweep; from a disk their KV comes back.
    """

    prefill: int
    decode: int
    prompt_rows: float
    pieces: float
    ends: float
    meanwhile: float
    decoding: float
    again: float


@lru_cache(maxsize=4096)
def block_course(sequences: int, prompt: int, new: int, step_tokens: int) -> BlockCourse:
    """The sweeps of `sequences` prompts of `prompt` tokens, each with `new` tokens of answer, all there at once.

    Args:
        step_tokens: rows of a step while prompts are read. Those that decode are among them, but an eighth is left for
            prompts: see `Scheduler`.
    """
    few, total = max(step_tokens // READING_SHARE, 1), sequences * prompt
    ends: deque[int] = deque()  # the sweep in which a sequence decodes no more
    sweep = read = pieces = meanwhile = again = 0
    while read < total:
        while ends and ends[0] <= sweep:
            ends.popleft()
        first = read // prompt
        again += read % prompt
        read = min(read + max(step_tokens - len(ends), few), (first + MOST_PIECES) * prompt, total)
        pieces += (read - 1) // prompt - first + 1
        meanwhile += len(ends)
        ends.extend([sweep + new] * (read // prompt - first))
        sweep += 1
    rest = sum(end - sweep for end in ends)
    decode = new - 1
    return BlockCourse(
        prefill=sweep,
        decode=decode,
        prompt_rows=total / sweep,
        pieces=pieces / sweep,
        ends=sequences / sweep,
        meanwhile=meanwhile / sweep,
        decoding=rest / decode if decode else 0.0,
        again=again / sweep,
    )
