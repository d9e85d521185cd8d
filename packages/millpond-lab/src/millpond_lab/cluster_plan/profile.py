"""Step times of a worker as a function of what a step reads and decodes, published or fitted to measured ones."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import numpy.typing as npt

from millpond.errors import DataError, OptionError


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What one step of a worker does.

    Attributes:
        tokens: of prompts that it reads. squares: growth of the sums of squared lengths of what has been read of each
            of these prompts. ended: prompts whose last token it reads. answers: that get a token.
        entries: of one KV head that these answers attend to, together.
    """

    tokens: int = 0
    squares: int = 0
    ended: int = 0
    answers: int = 0
    entries: int = 0


@dataclass(frozen=True, slots=True)
class DecodeTimes:
    """Seconds of a step that decodes at most `most` answers: base + per_entry * entries + per_answer * answers."""

    most: int | None
    base: float
    per_entry: float
    per_answer: float


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of a step; a mixed one has the larger base once, and both kinds of work.

    Source: DistServe, arXiv:2401.09670, appendix A, in the form that its authors fit: a + b sum(t) + c sum(t^2) for
    prompts, a + b sum(context) + c batch for answers. That a mixed step costs so much is our assumption.

    Attributes:
        read_base, per_token, per_square: of prompts. per_prompt: of each prompt that ends (plan and first token).
        decode: of answers, by batch size, ascending; the last has no limit.
    """

    read_base: float
    per_token: float
    per_square: float
    decode: tuple[DecodeTimes, ...]
    per_prompt: float = 0.0

    def __post_init__(self) -> None:
        limits = [part.most for part in self.decode]
        if not limits or limits[-1] is not None or any(limit is None for limit in limits[:-1]):
            raise OptionError("decode times: the last part has no limit, and no other part may lack one")
        if [limit for limit in limits if limit is not None] != sorted({n for n in limits if n is not None}):
            raise OptionError(f"decode times: limits {limits} must ascend")

    def seconds(self, load: StepLoad) -> float:
        """How long a step takes; 0 for one that does nothing."""
        took = base = 0.0
        if load.tokens:
            base = self.read_base
            took += self.per_token * load.tokens + self.per_square * load.squares + self.per_prompt * load.ended
        if load.answers:
            part = next(p for p in self.decode if p.most is None or load.answers <= p.most)
            base = max(base, part.base)
            took += part.per_entry * load.entries + part.per_answer * load.answers
        return base + took

    def with_overhead(self, seconds: float) -> StepTimes:
        """The same with every step longer by as much, whatever it does."""
        parts = tuple(replace(part, base=part.base + seconds) for part in self.decode)
        return replace(self, read_base=self.read_base + seconds, decode=parts)

    def scaled(self, factor: float) -> StepTimes:
        """The same with every time multiplied."""
        parts = tuple(
            DecodeTimes(part.most, part.base * factor, part.per_entry * factor, part.per_answer * factor)
            for part in self.decode
        )
        return StepTimes(
            self.read_base * factor, self.per_token * factor, self.per_square * factor, parts, self.per_prompt * factor
        )


def _of_a100(reading: Sequence[float], few: Sequence[float], many: Sequence[float]) -> StepTimes:
    """From milliseconds: (base, per token, per square) and twice (base, per entry, per answer)."""
    below = 94  # the authors take the first fit for batches below 95
    base, per_token, per_square = reading
    times = StepTimes(base, per_token, per_square, (DecodeTimes(below, *few), DecodeTimes(None, *many)))
    return times.scaled(1e-3)


#: Coefficients that DistServe's authors measured on one to eight A100 with 80 GB and published with their simulator
#: (LLMServe/DistServe, simdistserve/estimators/profile_data): by model and devices that share each layer.
A100: dict[str, dict[int, StepTimes]] = {
    "opt-13b": {
        1: _of_a100(
            (18.10254647486372, 0.1019122572698738, 7.122264314252114e-06),
            (19.934702624895458, 0.0006269356524350583, 0.03850697740828398),
            (7.1661889468253595, 0.0005798000403396046, 0.15831096191764046),
        ),
        2: _of_a100(
            (14.742973695171262, 0.06857720739764, 2.4495727400243586e-06),
            (13.294796350285385, 0.00034109219700723494, 0.06296393225243659),
            (10.638741913126715, 0.00031183369638295723, 0.08562913604102729),
        ),
        4: _of_a100(
            (12.062297033449054, 0.03808140082550695, 5.226249731787869e-07),
            (10.256231678259395, 0.00018786702316166354, 0.03269273629225551),
            (10.483514938375274, 0.00017120888562939117, 0.04566648525887034),
        ),
    },
    "opt-66b": {
        2: _of_a100(
            (43.05881348288936, 0.2742292870458432, 2.2478042467169447e-05),
            (48.288015489286245, 0.0009424343535737985, 0.12755020094383188),
            (28.727693993711597, 0.00047448475459061987, 0.29617792360743994),
        ),
        4: _of_a100(
            (29.441636037717455, 0.151352180625198, 8.317450765979451e-06),
            (30.760284619429587, 0.000451947603788462, 0.063284195750671),
            (27.47082137429487, 0.0004046845541646486, 0.12480667738300383),
        ),
        8: _of_a100(
            (25.490662375045222, 0.10659177664763161, 3.3910502518615973e-06),
            (23.15511135047022, 0.00022691488497826264, 0.04800638397272423),
            (21.71772781576609, 0.0003758089655762475, 0.08978614175851013),
        ),
    },
}
#: The same for vLLM's kernels of 2024, which they compare with.
A100_VLLM: dict[str, dict[int, StepTimes]] = {
    "opt-13b": {
        1: _of_a100(
            (22.052204789310185, 0.14050923870128956, 8.076584822611088e-06),
            (23.475041008414784, 0.000592934466077393, 0.060726861260369455),
            (20.206356173691958, 0.0004907727036234946, 0.1200031385587413),
        ),
        2: _of_a100(
            (27.440806247810684, 0.0905453268062731, 8.452054313246025e-06),
            (24.54058424191086, 0.00022440145424035404, 0.08715787269447899),
            (17.947769467112806, 0.0004570851465217072, 0.11179075830699213),
        ),
    }
}


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
