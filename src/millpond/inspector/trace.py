"""The trace format: the entries of every KV head after each step of one generation; `record_trace` fills it.

Step 0 is the cache after the prompt; step s is the cache after s tokens were decoded with it. What changes is kept,
not what stays: a trace of thousands of tokens and a hundred steps takes a few megabytes at most, scores included.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from millpond.errors import DataError, OptionError
from millpond.typed_json import as_type

FORMAT = 1
#: Levels above zero that a score is stored in.
LEVELS = 255


@dataclass(frozen=True, slots=True)
class Change:
    """Change of one head in one step: positions evicted and positions added, each ascending."""

    evicted: tuple[int, ...] = ()
    added: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class HeadTrace:
    """One KV head of one layer.

    Attributes:
        first: Positions held after the prompt, ascending.
        changes: One per decoding step.
        low: Smallest positive score that `levels` speak of; 0 where no score was positive.
        high: Largest positive score that `levels` speak of; 0 where no score was positive.
        levels: One row per `Trace.score_steps`, a level for each position held then, ascending; see `levels_of`.
        merged: (step, position, position that took it in).
        demoted: (step, position, codec that holds it from then on).
    """

    first: tuple[int, ...]
    changes: tuple[Change, ...]
    low: float = 0.0
    high: float = 0.0
    levels: tuple[bytes, ...] = ()
    merged: tuple[tuple[int, int, int], ...] = ()
    demoted: tuple[tuple[int, int, str], ...] = ()

    def kept(self, step: int) -> list[int]:
        """Return the positions held after `step`, ascending."""
        held = set(self.first)
        for change in self.changes[:step]:
            held |= set(change.added)
            held -= set(change.evicted)
        return sorted(held)


@dataclass(frozen=True, slots=True)
class Trace:
    """A generation as its cache saw it.

    Attributes:
        setting: Settings of the run: model, method, budget, codec, and so on, as a person reads it.
        tokens: The text of every token, white space included; joined, they are the text.
        n_prompt: Number of those of the prompt.
        heads: [layer][KV head].
        score_steps: The steps at which scores were written down, ascending, 0 first.
        kv_bytes, full_kv_bytes: per step, bytes held and bytes that a full cache would hold.
    """

    setting: dict[str, str]
    tokens: tuple[str, ...]
    n_prompt: int
    heads: tuple[tuple[HeadTrace, ...], ...]
    score_steps: tuple[int, ...]
    kv_bytes: tuple[int, ...]
    full_kv_bytes: tuple[int, ...]
    special: tuple[int, ...] = field(default=())

    @property
    def n_steps(self) -> int:
        """Decoding steps; there is one more state, that after the prompt."""
        return len(self.kv_bytes) - 1

    def kept(self, layer: int, head: int, step: int) -> list[int]:
        """Return the positions that a head holds after `step`, ascending.

        Raises:
            OptionError: there is no such layer, head or step.
        """
        return self._head(layer, head, step).kept(step)

    def scores(self, layer: int, head: int, step: int) -> dict[int, float]:
        """Return the score of each position, as last recorded at or before `step`.

        Entries written later have none.

        Raises:
            OptionError: there is no such layer, head or step.
        """
        track = self._head(layer, head, step)
        frame = bisect_right(self.score_steps, step) - 1
        if not track.levels:
            return {}
        values = scores_of(np.frombuffer(track.levels[frame], np.uint8), track.low, track.high)
        return dict(zip(track.kept(self.score_steps[frame]), values.tolist(), strict=True))

    def _head(self, layer: int, head: int, step: int) -> HeadTrace:
        for name, value, count in (
            ("layer", layer, len(self.heads)),
            ("head", head, len(self.heads[0])),
            ("step", step, self.n_steps + 1),
        ):
            if not 0 <= value < count:
                raise OptionError(f"{name}={value}: the trace has {name}s 0 to {count - 1}")
        return self.heads[layer][head]

    def write(self, path: Path) -> None:
        """Write the trace as JSON, to be read by `read_trace`."""
        data = {"format": FORMAT, **asdict(self)}
        for layer in data["heads"]:
            for head in layer:
                head["levels"] = [row.hex() for row in head["levels"]]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(data, ensure_ascii=False, separators=(",", ":")), encoding="utf-8")


def read_trace(path: Path) -> Trace:
    """Read a trace that `Trace.write` wrote.

    Raises:
        DataError: the file cannot be read, or is no trace.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data.pop("format") != FORMAT:
            raise ValueError(f"not of format {FORMAT}")
        for head in (head for layer in data["heads"] for head in layer):
            head["levels"] = [bytes.fromhex(row) for row in head["levels"]]
        trace: Trace = as_type(Trace, data)
        return trace
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is no trace ({error}); millpond inspect --trace writes one") from error


def levels_of(scores: npt.NDArray[np.float64], low: float, high: float) -> npt.NDArray[np.uint8]:
    """Return scores as levels: 0 if not positive, else 1 to 255, even in the logarithm.

    The levels 1 to 255 go from `low` to `high`. Scores are sums of attention and spread over orders of magnitude; the
    relative error is at most (high / low) ** (1 / 508) - 1, under 3 % over six orders.
    """
    levels = np.zeros(len(scores), np.uint8)
    positive = scores > 0
    if positive.any() and high > low:
        share = np.log(np.clip(scores[positive], low, high) / low) / math.log(high / low)
        levels[positive] = 1 + np.rint(share * (LEVELS - 1)).astype(np.uint8)
    elif positive.any():
        levels[positive] = LEVELS
    return levels


def scores_of(levels: npt.NDArray[np.uint8], low: float, high: float) -> npt.NDArray[np.float64]:
    """Return the scores that levels represent.

    Example:
        >>> scores_of(levels_of(np.array([0.0, 0.1, 10.0]), 0.1, 10.0), 0.1, 10.0).tolist()
        [0.0, 0.1, 10.0]
    """
    if high <= low:
        return np.where(levels > 0, high, 0.0)
    share = (levels.astype(np.float64) - 1) / (LEVELS - 1)
    return np.where(levels > 0, low * (high / low) ** share, 0.0)


def change_between(before: Sequence[int], after: Sequence[int]) -> Change:
    """Return the change that makes `after` of `before`."""
    return Change(tuple(sorted(set(before) - set(after))), tuple(sorted(set(after) - set(before))))
