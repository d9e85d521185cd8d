"""Predictor of discard bits: a logistic function of the features of an access, refitted a little at each request."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from millpond.cache.paging.discard_labels import DiscardLabels
from millpond.cache.paging.features import N_FEATURES, N_WEIGHTS, STEPS
from millpond.errors import DataError

#: Accesses whose features are kept: 1.6 MB.
WINDOW = 1 << 17
#: Accesses of one step of the fit, drawn from the window: about 0.1 ms.
_BATCH = 256
#: Accesses seen before weights move.
_WARM = 2 * _BATCH
_RATE = 0.5
#: Label of an access whose page was not used again so far.
_OPEN = -1.0
Weights = npt.NDArray[np.float32]


class DiscardPredictor:
    """Log odds that the best rule evicts a page before its next use: the sum of the weights of its features.

    Args:
        weights: N_WEIGHTS to begin with, copied. learns: whether they are fitted to what is seen.
        seed: of the choice of accesses to fit to.
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
        """A copy of the weights as they are."""
        return self._weights.astype(np.float32)

    def log_odds(self, steps: tuple[int, ...]) -> float:
        """Log odds that the page of an access with these features is safe to discard."""
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
        """Note an access: its features, and what it tells about the access of the same page before.

        now: its number. last: that of the access before, less than WINDOW before; None: there was none. pages: of the
        cache; None: no end was met.
        """
        if not self._learns:
            return
        if last is not None:
            self._discards[last % WINDOW] = self._labels.discards(last, now, pages)
        self._features[now % WINDOW] = steps
        self._discards[now % WINDOW] = _OPEN
        self._seen, self._pages = now + 1, pages

    def fit(self) -> None:
        """One step of the fit, on accesses drawn from the window.

        A page that was not used again counts as discarded once as many accesses have passed as the cache has pages;
        younger ones are left out.
        """
        if not self._learns or self._pages is None or self._seen < _WARM:
            return
        chosen = self._random.integers(0, min(self._seen, WINDOW), _BATCH)
        discards = self._discards[chosen]
        decided = (discards != _OPEN) | ((self._seen - 1 - chosen) % WINDOW >= self._pages)
        if decided.any():
            self._move(self._features[chosen[decided]], np.abs(discards[decided]))
            self._table = self._weights.tolist()

    def _move(self, steps: npt.NDArray[np.uint8], discards: npt.NDArray[np.float32]) -> None:
        gradient = slope(self._weights, steps, discards)
        self._squares += gradient**2
        self._weights -= _RATE * gradient / np.sqrt(self._squares)


def log_odds_of(weights: npt.NDArray[np.float64], steps: npt.NDArray[np.uint8]) -> npt.NDArray[np.float64]:
    """Log odds of many accesses at once: steps (accesses, N_FEATURES)."""
    return np.asarray(weights[steps].sum(1))


def slope(
    weights: npt.NDArray[np.float64], steps: npt.NDArray[np.uint8], discards: npt.NDArray[np.float32]
) -> npt.NDArray[np.float64]:
    """Gradient of the mean logistic loss of accesses: steps (accesses, N_FEATURES), discards (accesses,) of 0 and 1."""
    wrong = 1 / (1 + np.exp(-log_odds_of(weights, steps))) - discards
    return np.bincount(steps.ravel(), np.repeat(wrong, N_FEATURES), minlength=N_WEIGHTS) / len(steps)


def save_weights(file: Path, weights: Weights, note: str) -> None:
    """Write weights with the layout of their features. note: what they were fitted on."""
    save_file({"weights": weights.astype(np.float32)}, file, {"format": _FORMAT, "fitted_on": note})


def load_weights(file: Path) -> Weights:
    """Weights that `save_weights` wrote.

    Raises:
        DataError: the file cannot be read, or holds no weights for these features.
    """
    try:
        weights = load_file(file).get("weights")
    except (OSError, SafetensorError) as error:
        raise DataError(f"pager {file}: cannot be read: {error}; make one with millpond train pager") from None
    if weights is None or weights.shape != (N_WEIGHTS,) or not np.isfinite(weights).all():
        found = "none" if weights is None else f"{weights.shape}"
        raise DataError(
            f"pager {file}: weights {found} must be {N_WEIGHTS} finite numbers; make one with millpond train pager"
        )
    return weights.astype(np.float32)


_FORMAT = "millpond pager 1: " + " ".join(f"{name}={steps}" for name, steps in STEPS.items())
