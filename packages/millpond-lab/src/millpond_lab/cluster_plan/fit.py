"""Step times and those of moves, fitted to measured ones by least squares on the relative error.

Source: DistServe, arXiv:2401.09670: its authors fit the same terms on the relative error, and answers of small batches
apart from those of large ones. Ours differs in the weights: an error counts by the fitted time and not by the measured
one, in several rounds, since a step that happened to be slow would count less and the fit be too low in the mean.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import product

import numpy as np
import numpy.typing as npt

from millpond.errors import DataError
from millpond_lab.cluster_plan.profile import DecodeTimes, StepLoad, StepTimes

#: Steps of each kind (prompts, answers) below which nothing can be said.
LEAST = 8
#: Rounds in which the weights follow the fit.
ROUNDS = 8
#: Two kinds of batches count as two only if the mean relative error is less than this share of that of one kind.
WORTH = 0.9


def fit(steps: Sequence[tuple[StepLoad, float]]) -> tuple[StepTimes, float]:
    """The step times that fit these loads and their seconds best, and the median relative error.

    A mixed step has the larger one of both bases: both choices are fitted, and the better one is taken. So are all
    sizes of a batch above which answers have times of their own. A term that would be negative is left out.

    Raises:
        DataError: too few steps of a kind, or times that are not above 0.
    """
    reading = sum(load.tokens > 0 for load, _ in steps)
    decoding = sum(load.answers > 0 for load, _ in steps)
    if min(reading, decoding) < LEAST:
        raise DataError(f"{reading} steps that read and {decoding} that decode: a fit needs {LEAST} of each")
    if not all(0 < seconds < float("inf") for _, seconds in steps):
        raise DataError("a step took no time: the clock of this machine is too coarse for this model")
    one = min((_fit(steps, has_base, None) for has_base in (True, False)), key=lambda found: found[1])
    parts = [_fit(steps, has_base, size) for has_base, size in product((True, False), _sizes(steps))]
    best = min(parts, key=lambda found: found[1], default=one)
    times = best[0] if best[1] < WORTH * one[1] else one[0]
    return times, statistics.median(abs(times.seconds(load) / took - 1) for load, took in steps)


def fit_moves(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Seconds of a move and of each of its bytes that fit best, by the relative error; neither is negative.

    Where all moves have one size, all of it counts for the move.

    Args:
        sizes: bytes of each move.
        seconds: that each took, above 0.
    """
    if len(set(sizes)) == 1:
        return statistics.fmean(seconds), 0.0
    wanted = np.array(seconds)
    rows = np.array([[1.0, size] for size in sizes])
    base, per_byte = _solve(rows / wanted[:, None], np.ones(len(wanted))).tolist()
    return base, per_byte


def _sizes(steps: Sequence[tuple[StepLoad, float]]) -> list[int]:
    """Sizes of a batch with enough steps, of more than one size each, up to them and above."""
    answers = [load.answers for load, _ in steps if load.answers and not load.tokens]
    found = []
    for size in sorted(set(answers)):
        few, many = [n for n in answers if n <= size], [n for n in answers if n > size]
        if min(len(few), len(many)) >= LEAST and min(len(set(few)), len(set(many))) > 1:
            found.append(size)
    return found


def _fit(steps: Sequence[tuple[StepLoad, float]], reading_has_base: bool, size: int | None) -> tuple[StepTimes, float]:
    """The times, and the mean relative error."""
    rows = np.array([_row(load, reading_has_base, size) for load, _ in steps])
    seconds = np.array([took for _, took in steps])
    found, weights = np.zeros(rows.shape[1]), 1 / seconds
    for _ in range(ROUNDS):
        found = _solve(rows * weights[:, None], seconds * weights)
        fitted = rows @ found
        weights = 1 / np.where(fitted > 0, fitted, seconds)
    read_base, token, square, prompt, *answers = found.tolist()
    limits: tuple[int | None, ...] = (None,) if size is None else (size, None)
    decode = tuple(DecodeTimes(most, *answers[3 * n : 3 * n + 3]) for n, most in enumerate(limits))
    times = StepTimes(read_base, token, square, decode, prompt)
    return times, statistics.fmean(abs(times.seconds(load) / took - 1) for load, took in steps)


def _solve(rows: npt.NDArray[np.float64], wanted: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Least squares in which no term is negative."""
    used = list(range(rows.shape[1]))
    found = np.zeros(rows.shape[1])
    while used:
        scale = np.abs(rows[:, used]).max(0)
        scale[scale == 0] = 1
        solved = np.linalg.lstsq(rows[:, used] / scale, wanted, rcond=None)[0] / scale
        if (solved >= 0).all():
            found[used] = solved
            break
        used.pop(int(np.argmin(solved * scale)))
    return found


def _row(load: StepLoad, reading_has_base: bool, size: int | None) -> list[float]:
    reads, decodes = load.tokens > 0, load.answers > 0
    read_base = reads and (reading_has_base or not decodes)
    base = decodes and (not reading_has_base or not reads)
    answers = [float(base), load.entries, load.answers]
    none = [0.0, 0.0, 0.0]
    if size is not None:
        answers = answers + none if load.answers <= size else none + answers
    return [read_base, load.tokens, load.squares, load.ended, *answers]
