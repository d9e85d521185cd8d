"""Fidelity tables: costs of budgets and number formats in a model's predictions on a user's own text.

`millpond_lab.fit` measures them. `compress` and the engine read from one which setting is the smallest that keeps a
bound. A table belongs to the weights of a model, and to a method with its options.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from transformers import PreTrainedModel

from millpond.budget import Budget
from millpond.cache.atomic_files import publish, write_part
from millpond.codec import CodecSpec, codec_text, resolve
from millpond.errors import CacheMismatchError, DataError, MillpondError, OptionError
from millpond.hf.calibration.load import model_mark
from millpond.methods import METHODS
from millpond.models.cache_folder import cache_folder
from millpond.scalar import number
from millpond.typed_json import Number, as_type

FORMAT = "millpond fit 1"
#: Budget that is chosen from a table.
AUTO = "auto"
#: Share of windows that keep a bound, and the confidence that at least as many do.
SHARE, CONFIDENCE = 0.95, 0.9
#: Fewest windows that bound the KL of `SHARE` of all windows with `CONFIDENCE`: the largest of fewer is no bound.
MIN_WINDOWS = 45
#: Most bytes of a table's file, most rows, and most windows: beyond what any grid needs.
MAX_BYTES, MAX_ROWS, MAX_WINDOWS = 1 << 26, 10_000, 100_000
WAY_OUT = "measure one with 'millpond fit --text FILE --model MODEL --method METHOD'"


@cache
def tolerance_rank(n: int) -> int:
    """Return the smallest k for which the k-th smallest of n draws bounds 95 % of all.

    It does so with a confidence of 90 %. The k-th smallest is below the quantile p if k or more of the n draws are: the
    probability that a binomial of n and p is k or more. n + 1: no draw is high enough.

    Examples:
        >>> tolerance_rank(44), tolerance_rank(45), tolerance_rank(77)
        (45, 45, 76)
    """
    too_low = 0.0
    for k in range(n, 0, -1):
        ways = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
        too_low += math.exp(ways + k * math.log(SHARE) + (n - k) * math.log1p(-SHARE))
        if too_low > 1 - CONFIDENCE:
            return k + 1
    return n + 1


@dataclass(frozen=True, slots=True)
class FitRow:
    """Row of a table: one setting.

    Attributes:
        budget: Budget as `compress` takes it; None if the method takes none.
        codec: Name of a number format.
        bytes_share: Bytes held after the window, as a share of a full cache in the model's dtype, on average.
        kl: KL(full || setting) in nats of each window, the mean over its tokens.
    """

    budget: str | None
    codec: str
    bytes_share: Annotated[float, Number()]
    kl: tuple[Annotated[float, Number()], ...]

    @property
    def bound(self) -> float:
        """Bound that the KL of at least 95 % of windows of such texts stays below.

        The smallest of the n measured values that is an upper tolerance limit with a confidence of 90 %, whatever the
        distribution (Wilks 1941): of nine in ten sets of n windows, at least 95 % of all windows stay below it.
        Infinite with fewer than 45.
        """
        rank = tolerance_rank(len(self.kl))
        return sorted(self.kl)[rank - 1] if rank <= len(self.kl) else math.inf

    def __str__(self) -> str:
        return f"codec {self.codec}" if self.budget is None else f"budget {self.budget} with codec {self.codec}"


@dataclass(frozen=True, slots=True)
class Fit:
    """Table of one model, method and text.

    Attributes:
        model: Mark of the model.
        name: Class of the model, for people.
        method: Method that was measured.
        options: Options of the method.
        text: Sha256 of the text.
        context: Tokens of a window that are compressed.
        continuation: Tokens of a window that are then fed one by one.
        rows: Rows, one per setting; all have the same windows.
    """

    model: str
    name: str
    method: str
    options: Mapping[str, Any]
    text: str
    context: int
    continuation: int
    rows: tuple[FitRow, ...]

    def choose(self, max_kl: float, codec: CodecSpec | None = None) -> FitRow:
        """Return the row with the fewest bytes whose `bound` is at most `max_kl`.

        Args:
            max_kl: Bound in nats.
            codec: Number format of the row; None for any.

        Raises:
            OptionError: a bound that is not a number above 0, a codec that was not measured, or no such row; it names
                the best row.
        """
        check_bound(AUTO, max_kl)
        rows = self.rows
        windows = min(len(row.kl) for row in rows)
        if windows < MIN_WINDOWS:
            raise OptionError(
                f"this table has {windows} windows, and {MIN_WINDOWS} are needed to say with {CONFIDENCE:.0%} "
                f"confidence what holds in {SHARE:.0%} of them; measure it again"
            )
        if codec is not None:
            codec_spec = resolve(codec)
            rows = tuple(row for row in rows if resolve(row.codec) == codec_spec)
            if not rows:
                measured = ", ".join(dict.fromkeys(row.codec for row in self.rows))
                raise OptionError(
                    f"codec {codec_text(codec)!r} is not in this table, which has {measured}; leave it out, or measure "
                    "it with millpond fit --codec"
                )
        kept_rows = [row for row in rows if row.bound <= max_kl]
        if not kept_rows:
            best = min(rows, key=lambda row: row.bound)
            raise OptionError(
                f"no measured setting of {self.method} keeps KL at or below {max_kl:g} in {SHARE:.0%} of windows; the "
                f"best is {best}, with {best.bound:.3g}; raise max_kl, or measure more budgets and codecs"
            )
        return min(kept_rows, key=lambda row: (row.bytes_share, row.bound))

    def check(self, model: PreTrainedModel, method: str, options: Mapping[str, Any]) -> None:
        """Check that the table is of a model, a method and its options.

        Raises:
            CacheMismatchError: the table is of another model.
            OptionError: of another method, or of other options.
        """
        if self.model != model_mark(model):
            raise CacheMismatchError(
                f"this table was measured on another model ({self.name}) than this {type(model).__name__}, or on other "
                f"weights; {WAY_OUT}"
            )
        if self.method != method:
            raise OptionError(f"this table is of method {self.method!r}, not of {method!r}; {WAY_OUT}")
        if METHODS.get(method)(**self.options) != METHODS.get(method)(**options):
            raise OptionError(
                f"this table is of {method} with {_written(self.options)}, not with {_written(options)}; {WAY_OUT}"
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the table as JSON; an existing file is replaced at once.

        Raises:
            DataError: it cannot be written.
        """
        path = Path(path)
        try:
            text = json.dumps({"format": FORMAT, **asdict(self)}, indent=1)
            path.parent.mkdir(parents=True, exist_ok=True)
            publish(write_part(path, f"{text}\n".encode()), path)
        except (OSError, TypeError) as error:
            raise DataError(f"table {str(path)!r} cannot be written: {error}") from error


#: A table, its file, or None for the path that `millpond fit` writes to.
FitSource = Fit | str | os.PathLike[str] | None


def default_path(model: PreTrainedModel, method: str) -> Path:
    """Return the path of the table of a model and method in the user's cache folder."""
    return cache_folder() / "fits" / f"{model_mark(model)[:32]}-{method}.json"


def load_fit(path: str | os.PathLike[str]) -> Fit:
    """Return a table from its file.

    Raises:
        DataError: it cannot be read, or is not a table.
    """
    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise DataError(f"table {os.fspath(path)!r} has more than {MAX_BYTES} bytes, a table's limit; {WAY_OUT}")
        fields = json.loads(raw)
    except FileNotFoundError:
        raise DataError(f"there is no table {os.fspath(path)!r}; {WAY_OUT}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"table {os.fspath(path)!r} cannot be read: {error}") from error
    try:
        return _table(fields)
    except (KeyError, TypeError, ValueError, OverflowError, MillpondError) as error:
        raise DataError(f"{os.fspath(path)!r} is not a table of millpond fit ({error}); {WAY_OUT}") from error


def chosen(
    model: PreTrainedModel,
    method: object,
    options: Mapping[str, Any],
    codec: CodecSpec | None,
    max_kl: float | None,
    fit: FitSource,
) -> FitRow:
    """Return the setting of `budget="auto"`.

    Args:
        model: Model of the cache.
        method: Name of the method.
        options: Options of the method.
        codec: Number format; "auto" or None for any that was measured.
        max_kl: Bound in nats.
        fit: Table, or its file; None for the default path.

    Raises:
        OptionError: no `max_kl`, a policy in place of a method's name, or as `Fit.choose` and `Fit.check`.
        DataError: there is no table, or it cannot be read.
        CacheMismatchError: it is of another model.
    """
    check_bound(AUTO, max_kl)
    if not isinstance(method, str):
        raise OptionError("budget='auto' reads a table of a named method; give the method by its name, or a budget")
    table = fit if isinstance(fit, Fit) else load_fit(default_path(model, method) if fit is None else fit)
    table.check(model, method, options)
    assert max_kl is not None, "checked above"
    return table.choose(max_kl, None if codec == "auto" else codec)


def is_auto(budget: object) -> bool:
    """Whether a budget is to be chosen from a table."""
    return isinstance(budget, str) and budget.strip() == AUTO


def check_bound(budget: object, max_kl: object) -> None:
    """Check the bound of a budget that is chosen from a table.

    Raises:
        OptionError: a bound that is not a number above 0, or budget='auto' without a bound.
    """
    if max_kl is None:
        if is_auto(budget):
            raise OptionError("budget='auto' needs a bound; give max_kl, such as 0.01 (nats per token)")
        return
    bound = number(max_kl)
    if isinstance(bound, bool) or not isinstance(bound, int | float) or not (math.isfinite(bound) and bound > 0):
        raise OptionError(f"max_kl={max_kl!r} must be a number above 0, in nats per token, such as 0.01")


def check_given(budget: object, max_kl: object, fit: object) -> bool:
    """Whether a budget is to be chosen from a table.

    Raises:
        OptionError: `max_kl` or `fit` with another budget than 'auto'.
    """
    auto = is_auto(budget)
    for name, argument in (("max_kl", max_kl), ("fit", fit)):
        if argument is not None and not auto:
            raise OptionError(f"{name} belongs to budget='auto', and the budget is {budget!r}; leave one of them out")
    check_bound(budget, max_kl)
    return auto


def _table(fields: Any) -> Fit:
    if not isinstance(fields, dict) or fields.pop("format", None) != FORMAT:
        raise ValueError(f"its format is not {FORMAT!r}")
    table: Fit = as_type(Fit, fields)
    if not 0 < len(table.rows) <= MAX_ROWS:
        raise ValueError(f"it has {len(table.rows)} rows; a table has 1 to {MAX_ROWS}")
    for row in table.rows:
        _check_row(row)
    if len({len(row.kl) for row in table.rows}) != 1:
        raise ValueError("its rows have different windows")
    return table


def _check_row(row: FitRow) -> None:
    if row.budget is not None:
        Budget.parse(row.budget)
    resolve(row.codec)
    if not 0 < len(row.kl) <= MAX_WINDOWS:
        raise ValueError(f"a row has {len(row.kl)} windows; it must have 1 to {MAX_WINDOWS}")


def _written(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={option!r}" for name, option in options.items()) or "its defaults"
