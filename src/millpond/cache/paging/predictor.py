"""Discard bits: features of an access, labels of past accesses, and the predictor refitted at each request."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

from millpond.cache.paging.page_directory import KeyTable
from millpond.cache.paging.rule import PageFacts
from millpond.errors import DataError

#: Accesses that share one count of the pages that the best rule holds.
_QUANTUM_BITS = 4


class DiscardLabels:
    """Count of the pages that the best rule holds at each time: OPTgen (Jain and Lin, 2016).

    A page that is used again is a hit of the best rule if from its last use until now a place was free at every time;
    then it takes that place. Costs one look at the counts in between, at most `window` / 16 numbers of 4 bytes.

    Args:
        window: Accesses that are looked back at, a multiple of 16.
    """

    def __init__(self, window: int) -> None:
        self._window = window >> _QUANTUM_BITS
        self._held = np.zeros(2 * self._window, np.int32)
        self._begin = 0  # of the counts, in quanta

    def discards(self, last: int, now: int, pages: int | None) -> bool:
        """Whether the best rule evicts a page between its uses at `last` and `now`.

        Args:
            last: Number of the previous access, less than `window` before `now`.
            now: Number of this access; it never decreases.
            pages: Pages of the cache; None for any number.
        """
        first_quantum, end_quantum = (last >> _QUANTUM_BITS), (now >> _QUANTUM_BITS)
        if end_quantum - self._begin > len(self._held):
            self._forget(end_quantum)
        counts = self._held[max(first_quantum - self._begin, 0) : end_quantum - self._begin]
        if pages is not None and counts.size and counts.max() >= pages:
            return True
        counts += 1
        return False

    def _forget(self, now: int) -> None:
        """Move the counts so that the last `window` accesses before `now` stay."""
        shift = min(now - self._window - self._begin, len(self._held))
        self._held[: len(self._held) - shift] = self._held[shift:].copy()
        self._held[len(self._held) - shift :] = 0
        self._begin = now - self._window


#: Each number and its steps; a weight belongs to each step.
STEPS = {
    "depth": 12,
    "length": 12,
    "rest": 12,
    "accesses": 10,
    "gap": 13,
    "gap_before": 13,
    "known": 12,
    "new": 12,
    "is_known": 2,
    "beyond_known": 12,
    "within_known": 12,
}
N_FEATURES, N_WEIGHTS = len(STEPS), sum(STEPS.values())
#: The first weight of each number.
FIRST_WEIGHT = tuple(sum(list(STEPS.values())[:at]) for at in range(N_FEATURES))
_DEPTH, _LENGTH, _REST, _ACCESSES, _GAP, _GAP_BEFORE, _KNOWN, _NEW, _IS_KNOWN, _BEYOND, _WITHIN = FIRST_WEIGHT
#: Steps from this number of accesses on are one.
MAX_ACCESSES = STEPS["accesses"] - 1
#: Steps of a gap, the first for none.
_GAP_STEPS = STEPS["gap"]


def gap_step(gap: int) -> int:
    """Return the step of a gap between two accesses of a page: 1 up to 127, 2 up to 255, ...

    The gap is counted in accesses of all pages.
    """
    return min(max(gap.bit_length() - 6, 1), _GAP_STEPS - 1)


def steps_of(facts: PageFacts, accesses: int, gap: int, gap_before: int) -> tuple[int, ...]:
    """Return the weight of each number of an access: N_FEATURES indices below N_WEIGHTS.

    Args:
        facts: Facts of the access.
        accesses: Accesses of this page before, at most MAX_ACCESSES.
        gap: Step of the time since the last one, 0 for none.
        gap_before: Step of the time before that.
    """
    _, _, _, depth, length, known, *_ = facts
    beyond = depth - known
    return (
        _DEPTH + _log(depth),
        _LENGTH + _log(length),
        _REST + _log(length - depth),
        _ACCESSES + accesses,
        _GAP + gap,
        _GAP_BEFORE + gap_before,
        _KNOWN + _log(known),
        _NEW + _log(length - known),
        _IS_KNOWN + (beyond < 0),
        _BEYOND + (_log(beyond) if beyond > 0 else 0),
        _WITHIN + (_log(-beyond) if beyond < 0 else 0),
    )


def _log(number: int) -> int:
    """Return 0 for 0, 1 for 1, 2 for 2 and 3, ..., 11 from 1,024 on."""
    return min(number.bit_length(), 11)


#: Accesses whose features are kept: 1.6 MB.
WINDOW = 1 << 17
#: Accesses of one step of the fit, drawn from the window: about 0.1 ms.
_BATCH = 256
#: Accesses seen before weights move.
_MIN_SEEN = 2 * _BATCH
_RATE = 0.5
#: Label of an access whose page was not used again so far.
_OPEN = -1.0
Weights = npt.NDArray[np.float32]


class DiscardPredictor:
    """Log odds that the best rule evicts a page before its next use.

    They are the sum of the weights of its features.

    Args:
        weights: N_WEIGHTS initial weights, copied.
        learns: Whether they are fitted to accesses.
        seed: Seed of the choice of accesses to fit to.
    """

    def __init__(self, weights: Weights, *, learns: bool = True, seed: int = 0) -> None:
        self._weights = weights.astype(np.float64)
        self._table: list[float] = self._weights.tolist()
        self._squares = np.full(N_WEIGHTS, 0.05)  # of past gradients (AdaGrad)
        self._learns = learns
        self._random = np.random.default_rng(seed)
        self._features = np.zeros((WINDOW, N_FEATURES), np.uint8)
        self._discards = np.full(WINDOW, _OPEN, np.float32)
        self._seen = 0
        self._pages: int | None = None
        self._labels = DiscardLabels(WINDOW)

    @property
    def weights(self) -> Weights:
        """Copy of the current weights."""
        return self._weights.astype(np.float32)

    def log_odds(self, steps: tuple[int, ...]) -> float:
        """Return the log odds that the page of an access with these features is safe to discard."""
        table = self._table
        a, b, c, d, e, f, g, h, i, j, k = steps
        return (
            table[a]
            + table[b]
            + table[c]
            + table[d]
            + table[e]
            + table[f]
            + table[g]
            + table[h]
            + table[i]
            + table[j]
            + table[k]
        )

    def seen(self, now: int, steps: tuple[int, ...], last: int | None, pages: int | None) -> None:
        """Record an access: its features, and the label of the previous access of the page.

        Args:
            now: Number of the access.
            steps: Features of the access, see `steps_of`.
            last: Number of the previous access, less than WINDOW before; None if there was none.
            pages: Pages of the cache; None if it was never full.
        """
        if not self._learns:
            return
        if last is not None:
            self._discards[last % WINDOW] = self._labels.discards(last, now, pages)
        self._features[now % WINDOW] = steps
        self._discards[now % WINDOW] = _OPEN
        self._seen, self._pages = now + 1, pages

    def fit(self) -> None:
        """Run one step of the fit, on accesses drawn from the window.

        A page that was not used again counts as discarded once as many accesses have passed as the cache has pages;
        younger ones are left out.
        """
        if not self._learns or self._pages is None or self._seen < _MIN_SEEN:
            return
        sampled = self._random.integers(0, min(self._seen, WINDOW), _BATCH)
        discards = self._discards[sampled]
        decided = (discards != _OPEN) | ((self._seen - 1 - sampled) % WINDOW >= self._pages)
        if decided.any():
            self._move(self._features[sampled[decided]], np.abs(discards[decided]))
            self._table = self._weights.tolist()

    def _move(self, steps: npt.NDArray[np.uint8], discards: npt.NDArray[np.float32]) -> None:
        gradient = slope(self._weights, steps, discards)
        self._squares += gradient**2
        self._weights -= _RATE * gradient / np.sqrt(self._squares)


def log_odds_of(weights: npt.NDArray[np.float64], steps: npt.NDArray[np.uint8]) -> npt.NDArray[np.float64]:
    """Return the log odds of many accesses at once: steps (accesses, N_FEATURES)."""
    return np.asarray(weights[steps].sum(1))


def slope(
    weights: npt.NDArray[np.float64], steps: npt.NDArray[np.uint8], discards: npt.NDArray[np.float32]
) -> npt.NDArray[np.float64]:
    """Return the gradient of the mean logistic loss of accesses.

    Args:
        weights: Weights, (N_WEIGHTS,).
        steps: Features, (accesses, N_FEATURES).
        discards: Labels of 0 and 1, (accesses,).
    """
    wrong = 1 / (1 + np.exp(-log_odds_of(weights, steps))) - discards
    return np.bincount(steps.ravel(), np.repeat(wrong, N_FEATURES), minlength=N_WEIGHTS) / len(steps)


#: What bits mean: that the best rule evicts the page before its next use, or that it is not used in the next phase.
Label = Literal["belady", "phase"]


def save_weights(file: Path, weights: Weights, note: str, label: Label = "belady") -> None:
    """Write weights with the layout of their features.

    `note` says what they were fitted on, `label` to which bits.
    """
    about = {"format": _FORMAT, "fitted_on": note} | ({} if label == "belady" else {"label": label})
    save_file({"weights": weights.astype(np.float32)}, file, about)


def label_of(file: Path) -> Label:
    """Return the bits that weights of a file were fitted to; Belady's if it does not say.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        with safe_open(file, "np") as weights:
            label = (weights.metadata() or {}).get("label")
    except (OSError, SafetensorError) as error:
        raise DataError(f"pager {file}: cannot be read: {error}; make one with millpond train pager") from None
    return "phase" if label == "phase" else "belady"


def load_weights(file: Path) -> Weights:
    """Return the weights that `save_weights` wrote.

    Raises:
        DataError: the file cannot be read, or holds no weights for these features.
    """
    try:
        weights = load_file(file).get("weights")
    except (OSError, SafetensorError) as error:
        raise DataError(f"pager {file}: cannot be read: {error}; make one with millpond train pager") from None
    if weights is None or weights.shape != (N_WEIGHTS,) or not np.isfinite(weights).all():
        shape = "none" if weights is None else f"{weights.shape}"
        raise DataError(
            f"pager {file}: weights {shape} must be {N_WEIGHTS} finite numbers; make one with millpond train pager"
        )
    return weights.astype(np.float32)


_FORMAT = "millpond pager 1: " + " ".join(f"{name}={steps}" for name, steps in STEPS.items())


class Past(NamedTuple):
    """History of a page before an access.

    Attributes:
        accesses: Accesses before, 9 for more.
        last: Number of the last one; None if there was none.
        gap: Step of the time since.
        gap_before: Step of the time before that.
    """

    accesses: int
    last: int | None
    gap: int
    gap_before: int


class AccessHistory:
    """Pages of the last `window` accesses, whether the cache holds them or not.

    At most 22 bytes for each access of the window. Accesses have slots in turn, and a page is filed under the slot of
    its last access.
    """

    def __init__(self, window: int) -> None:
        self._window = window
        self._slots = KeyTable()
        self._gaps, self._accesses = bytearray(), bytearray()  # by slot; no accesses: the page has a later one
        self.clock = 0

    def access(self, key: int) -> Past:
        """Record an access, the `clock`-th, and return the history before it."""
        now, slot = self.clock, self.clock % self._window
        self.clock += 1
        earlier = self._slots.get(key)
        if slot == len(self._gaps):
            self._gaps.append(0)
            self._accesses.append(0)
        elif self._accesses[slot]:  # the last access of its page leaves the window
            self._slots.remove(slot)
            if earlier == slot:
                earlier = None
        if earlier is None:
            past = Past(0, None, 0, 0)
            self._slots.add(key, slot)
        else:
            last = now - (slot - earlier) % self._window
            past = Past(self._accesses[earlier], last, gap_step(now - last), self._gaps[earlier])
            self._slots.move(earlier, slot)
            self._accesses[earlier] = 0
        self._gaps[slot] = past.gap
        self._accesses[slot] = min(past.accesses + 1, MAX_ACCESSES)
        return past


#: Log odds above which a page counts as safe to discard, a probability of 0.75: see docs/how-to/prefix-cache.md.
THRESHOLD = 1.0986
_SHIPPED = Path(__file__).parent / "pager.safetensors"


class PredictedBits:
    """Bits of accesses: those of the facts if they have one, otherwise those of the predictor.

    Args:
        predictor: Predictor of the bits.

    Attributes:
        pages: Pages of the cache, for labels; None if not known yet.
    """

    def __init__(self, predictor: DiscardPredictor) -> None:
        self._predictor = predictor
        self._history = AccessHistory(WINDOW)
        self._request = -1
        self.pages: int | None = None

    @classmethod
    def of_file(cls, file: str, labels: tuple[Label, ...] = ("belady",)) -> PredictedBits:
        """Return bits with the weights of a file, or with those of the package.

        Weights of phases are used as they are; others are refitted while pages come and go.

        Args:
            file: File of weights; empty for those of the package.
            labels: Meanings of bits that the caller can use.

        Raises:
            DataError: the file cannot be read, holds other weights, or bits of another meaning.
        """
        if not file:
            return cls(DiscardPredictor(shipped_weights()))
        weights, label = load_weights(Path(file)), label_of(Path(file))
        if label not in labels:
            raise DataError(
                f"pager {file}: its bits are those of phases (--label phase), which rule mark_predict takes; make "
                "another with millpond train pager --label belady"
            )
        return cls(DiscardPredictor(weights, learns=label == "belady"))

    def bit(self, facts: PageFacts) -> bool:
        """Whether a page that is used now is safe to discard afterwards."""
        if facts.bit is not None:
            return facts.bit
        if facts.request != self._request:
            self._request = facts.request
            self._predictor.fit()
        now = self._history.clock
        past = self._history.access(facts.key)
        steps = steps_of(facts, past.accesses, past.gap, past.gap_before)
        self._predictor.seen(now, steps, past.last, self.pages)
        return self._predictor.log_odds(steps) > THRESHOLD


@cache
def shipped_weights() -> Weights:
    """Return the weights that come with the package."""
    return load_weights(_SHIPPED)
