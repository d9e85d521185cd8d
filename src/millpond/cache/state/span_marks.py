"""Spans that every head keeps, and spans that keep a share of the budget: see `millpond.policy.fair_shares`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from millpond.cache.state.spans import Span, TextMarks, ascending, tokens_in, united
from millpond.codec.spec import Codec
from millpond.errors import DataError, OptionError
from millpond.kernels.decode_rules import MOST_LEAST, in_spans
from millpond.policy.fair_shares import BEHIND, FairSpans, Floats, Ints, fewest
from millpond.policy.policy import Policy

#: A position is an int32.
_LAST = 2**31 - 1
#: Most spans of one text that do not touch: each decoding step compares every entry with every span.
MOST_KEPT = 64


def kept_spans(spans: Sequence[Sequence[int]], name: str = "spans") -> tuple[Span, ...]:
    """Spans as they are kept: ascending, with those that touch joined, and none of them empty.

    Args:
        spans: [begin, end) of each, in any order. name: what a message calls them.

    Raises:
        OptionError: something else than pairs of whole numbers, a span that ends before it begins, spans that
            overlap, or more than `MOST_KEPT` that do not touch.

    Example:
        >>> kept_spans([(8, 12), (0, 4), (4, 6)])
        ((0, 6), (8, 12))
    """
    given = ascending(spans, name)
    for begin, end in given:
        if not 0 <= begin <= end <= _LAST:
            raise OptionError(f"{name}: {(begin, end)} is no span: give (begin, end) with 0 <= begin <= end")
    joined = united(given)
    if len(joined) > MOST_KEPT:
        raise OptionError(f"{name}: {len(joined)} spans that do not touch are more than {MOST_KEPT}; join some of them")
    return joined


class KeptSpans(TextMarks[Span]):
    """The kept spans of a batch of sequences, and those of the sequences that the next prompt begins."""

    def count(self, sequence: int, first: int = 0) -> int:
        """Positions that one sequence keeps, read or not, those before `first` left out."""
        return tokens_in(self.of(sequence), first)

    def counts(self, first: npt.NDArray[np.int64] | int) -> npt.NDArray[np.int64]:
        """(S,) positions that each sequence keeps, read or not, those before `first` (S,) left out."""
        inside = np.maximum(self._places, np.asarray(first)[..., None, None])
        found: npt.NDArray[np.int64] = (inside[..., 1] - inside[..., 0]).sum(1)
        return found

    def mask(self, sequence: int, positions: Tensor, first: int = 0) -> Tensor | None:
        """(H, N) bool: which positions (H, N), -1 for none, one sequence keeps; None where it keeps none.

        first: positions before it are left out.
        """
        if not self.count(sequence, first):
            return None
        spans = torch.tensor(self.of(sequence), dtype=positions.dtype, device=positions.device)
        return in_spans(positions, spans.expand(len(positions), -1, -1)) & (positions >= first)

    def tensor(self, device: torch.device) -> Tensor | None:
        """(S, n, 2) int32: see `StepRegions.kept`."""
        if not self:
            return None
        if device not in self._tensors:
            self._tensors[device] = torch.from_numpy(self._places.astype(np.int32)).to(device)
        return self._tensors[device]

    def _joined(self, marks: Sequence[Span]) -> tuple[Span, ...]:
        return kept_spans(marks)

    def _set(self, marks: list[tuple[Span, ...]]) -> None:
        super()._set(marks)
        most = max(map(len, marks), default=0)
        rows = [[*spans, *[(0, 0)] * (most - len(spans))] for spans in marks]
        self._places = np.array(rows, dtype=np.int64).reshape(len(marks), most, 2)  # empty ones at the end
        self._tensors: dict[torch.device, Tensor | None] = {}


#: Most spans of one text.
MOST_SHARES = MOST_LEAST
#: [begin, end) in positions of a text, and its share of the budget, above 0 and at most 1.
FairShare = tuple[int, int, float]


def fair_shares(spans: Sequence[Sequence[int]], share: object, name: str = "spans") -> tuple[FairShare, ...]:
    """Spans with one share, ascending and without those that are empty.

    Args:
        spans: [begin, end) of each, in any order. name: what a message calls them.

    Raises:
        OptionError: no share; something else than pairs of whole numbers, a span that ends before it begins, spans
            that overlap, or more than `MOST_SHARES`.

    Example:
        >>> fair_shares([(8, 12), (0, 4), (4, 4)], 0.5)
        ((0, 4, 0.5), (8, 12, 0.5))
    """
    checked = checked_share(share)
    return in_order([(begin, end, checked) for begin, end in ascending(spans, name)], name)


def checked_share(share: object, name: str = "share") -> float:
    """
    Raises:
        OptionError: no number above 0 and up to 1.
    """
    number = isinstance(share, int | float) and not isinstance(share, bool)
    if not number or not math.isfinite(share) or not 0 < share <= 1:  # type: ignore[arg-type, operator]
        raise OptionError(f"{name}={str(share)[:80]} must be a number above 0 and up to 1; leave it out for no share")
    return float(share)  # type: ignore[arg-type]


def in_order(shares: Iterable[Sequence[float]], name: str) -> tuple[FairShare, ...]:
    """Spans with shares of their own, see `fair_shares`.

    Raises:
        OptionError: see `fair_shares`.
    """
    found: dict[Span, float] = {}
    for one in shares:
        given: object = one
        if not isinstance(given, Sequence) or isinstance(given, str | bytes) or len(one) != 3:
            raise OptionError(f"{name}: {str(one)[:80]} is none: give (begin, end, share)")
        begin, end, share = one
        ascending([(begin, end)], name)  # type: ignore[list-item]
        if not 0 <= begin <= end < BEHIND:
            raise OptionError(f"{name}: {(begin, end)} is no span: give (begin, end) with 0 <= begin <= end")
        checked = checked_share(share, f"{name}: share of [{begin}, {end})")
        if begin < end:
            if (int(begin), int(end)) in found:
                raise OptionError(f"{name}: [{begin}, {end}) is there twice; give each token once")
            found[int(begin), int(end)] = checked
    if len(found) > MOST_SHARES:
        raise OptionError(f"{name}: {len(found)} spans are more than {MOST_SHARES}; join some of them")
    return tuple((begin, end, found[begin, end]) for begin, end in ascending(list(found), name))


def shares_of_tensors(spans: Tensor, shares: Tensor) -> tuple[FairShare, ...]:
    """Spans with shares out of a file: spans (m, 2), shares (m,) float64.

    Raises:
        DataError: they are none.
    """
    whole = spans.dtype in (torch.int32, torch.int64) and spans.ndim == 2 and spans.shape[1] == 2
    if not whole or shares.dtype is not torch.float64 or shares.shape != spans.shape[:1] or len(spans) > MOST_SHARES:
        raise DataError("a file has no spans with shares where it should; it is read as missing")
    rows = [(begin, end, share) for (begin, end), share in zip(spans.tolist(), shares.tolist(), strict=True)]
    try:
        return in_order(rows, "a file's spans with shares")
    except OptionError as error:
        raise DataError(f"{error}; the file is read as missing") from None


def fair_refusal(policy: Policy, codecs: Iterable[Codec], rolling: bool = False) -> str | None:
    """Why spans cannot have a share of the budget, and what to do instead; None where they can.

    Args:
        codecs: of the layers. rolling: whether positions move when a text is longer than the context.
    """
    codecs = list(codecs)
    if any(codec.ages for codec in codecs):
        return "entries pass through number formats by age; name one format"
    if any(codec.tiered for codec in codecs):
        return "nothing leaves a cache with a lower tier, to which all goes that is not chosen; use another codec"
    if rolling:
        return "overflow='rolling' moves positions; leave one out"
    return policy.fair_refusal()


class FairShares(TextMarks[FairShare]):
    """The spans with shares of a batch of sequences."""

    def _joined(self, marks: Sequence[FairShare]) -> tuple[FairShare, ...]:
        return in_order(marks, "spans")

    def _set(self, marks: list[tuple[FairShare, ...]]) -> None:
        super()._set(marks)
        most = max(map(len, marks), default=0)
        rows = [[*own, *[(BEHIND, BEHIND, 0.0)] * (most - len(own))] for own in marks]
        numbers = np.array(rows, dtype=np.float64).reshape(len(marks), most, 3)
        self._spans: Ints = numbers[..., :2].astype(np.int64)  # (S, m, 2)
        self._shares: Floats = numbers[..., 2]  # (S, m)

    def _seen(self, begin: Ints, end: Ints) -> Ints:
        """(S, m) tokens of each span among positions begin (S, 1) to end (S, 1)."""
        inside = self._spans.clip(begin[..., None], end[..., None])
        found: Ints = inside[..., 1] - inside[..., 0]
        return found

    def least(self, seen: Ints, budgets: Ints, free: Ints, window: int, device: torch.device) -> Tensor | None:
        """(S, m, 3) int32 of a decoding step: see `StepRegions.least`; None where no sequence has spans.

        Args:
            seen, budgets, free: (S,) tokens of each text, B and F. window: that the layer sees; 0: all.
        """
        if not self:
            return None
        end = seen[:, None]
        visible = np.minimum(end, window) if window else end
        wanted = self._shares * budgets[:, None]
        count = fewest(self._seen(end - visible, end), visible, wanted, free[:, None])
        return torch.from_numpy(np.concatenate([self._spans, count[..., None]], 2).astype(np.int32)).to(device)

    def view(
        self, sequence: int, seen: int, visible: int, budget: int, aside: Tensor | None, positions: Tensor
    ) -> FairSpans | None:
        """The spans of one sequence for a plan; None where it has none.

        Args:
            seen: tokens of the text. visible: of them, those that the layer sees. budget: B.
            aside: (H, N) bool, which of the entries at positions (H, N) stay whatever the plan says; None: none.
        """
        n = len(self.of(sequence))
        if not n:
            return None
        spans, shares = self._spans[sequence, :n], self._shares[sequence, :n]
        end = np.array([[seen]])
        tokens = self._seen(end - visible, end)[sequence, :n]
        held = torch.zeros(len(positions), n, dtype=torch.int64, device=positions.device)
        if aside is not None:
            for place, (begin, last) in enumerate(spans.tolist()):
                held[:, place] = (aside & (positions >= begin) & (positions < last)).sum(1)
        return FairSpans(spans, tokens, visible, shares * budget, held)
