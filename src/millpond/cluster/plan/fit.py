"""Step times fitted to measured steps by least squares on the relative error.

Source: DistServe, arXiv:2401.09670 (its authors fit the same terms on the relative error).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

from millpond.cluster.plan.profile import DecodeTimes, StepLoad, StepTimes
from millpond.errors import DataError

#: Steps of each kind (prompts, answers) below which nothing can be said.
LEAST = 8


def fit(steps: Sequence[tuple[StepLoad, float]]) -> tuple[StepTimes, float]:
    """The step times that fit these loads and their seconds best, and the median relative error.

    A mixed step has the larger one of both bases: both choices are fitted, and the better one is taken. A term that
    would be negative is left out.

    Raises:
        DataError: too few steps of a kind, or times that are not above 0.
    """
    reading = sum(load.tokens > 0 for load, _ in steps)
    decoding = sum(load.answers > 0 for load, _ in steps)
    if min(reading, decoding) < LEAST:
        raise DataError(f"{reading} steps that read and {decoding} that decode: a fit needs {LEAST} of each")
    if not all(0 < seconds < float("inf") for _, seconds in steps):
        raise DataError("a step took no time: the clock of this machine is too coarse for this model")
    candidates = [_fit(steps, reading_has_base) for reading_has_base in (True, False)]
    return min(candidates, key=lambda found: found[1])


def _fit(steps: Sequence[tuple[StepLoad, float]], reading_has_base: bool) -> tuple[StepTimes, float]:
    rows = np.array([_row(load, reading_has_base) for load, _ in steps])
    seconds = np.array([took for _, took in steps])
    weighed = rows / seconds[:, None]
    used = list(range(rows.shape[1]))
    found = np.zeros(rows.shape[1])
    while used:
        scale = np.abs(weighed[:, used]).max(0)
        scale[scale == 0] = 1
        solved = np.linalg.lstsq(weighed[:, used] / scale, np.ones(len(seconds)), rcond=None)[0] / scale
        if (solved >= 0).all():
            found[used] = solved
            break
        used.pop(int(np.argmin(solved * scale)))
    read_base, token, square, prompt, base, entry, answer = found.tolist()
    times = StepTimes(read_base, token, square, (DecodeTimes(None, base, entry, answer),), prompt)
    errors = [abs(times.seconds(load) / took - 1) for load, took in steps]
    return times, statistics.median(errors)


def _row(load: StepLoad, reading_has_base: bool) -> list[float]:
    reads, decodes = load.tokens > 0, load.answers > 0
    read_base = reads and (reading_has_base or not decodes)
    base = decodes and (not reading_has_base or not reads)
    return [read_base, load.tokens, load.squares, load.ended, base, load.entries, load.answers]
