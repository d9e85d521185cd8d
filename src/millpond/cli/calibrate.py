"""`millpond calibrate`: statistics of a model that a codec needs, measured on a text and written to a file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from millpond.cli.console import errors, notes, size
from millpond.cli.options import ModelOptions, expand_groups, optional
from millpond.errors import DataError, OptionError

if TYPE_CHECKING:
    from millpond.hf.calibration.measure import Progress


@expand_groups
def calibrate(
    *,
    text: Annotated[Path, typer.Option(help="A text like those that the model will read, of 16,000 tokens or more.")],
    out: Annotated[Path, typer.Option(help="The file to write (.safetensors).")],
    model: ModelOptions,
    bits: Annotated[str, typer.Option(help="Bits of the codes; several are separated by commas.")] = "2,3,4",
    windows: Annotated[int, typer.Option(min=1, help="Windows of tokens to read, spread over the text.")] = 16,
    length: Annotated[int, typer.Option(min=2, help="Tokens of a window.")] = 1024,
    outliers: Annotated[float, typer.Option(help="Share of outliers that are stored apart from the codes.")] = 0.01,
    sinks: Annotated[int, typer.Option(min=0, help="First entries of a text that are not quantized.")] = 1,
    q_norm: Annotated[
        str | None, optional(help="Bits for which codes keep mean and deviation (Q-Norm), such as '2'.")
    ] = None,
    fisher: Annotated[
        bool, typer.Option("--fisher/--no-fisher", help="Weigh numbers by the gradients of the loss at them.")
    ] = True,
    by_range: Annotated[
        bool,
        typer.Option(
            "--by-range/--no-range", help="Weigh by the squared range of a channel too; the published code does not."
        ),
    ] = True,
) -> None:
    """Measure a model on a text, for the codecs kvquant2, kvquant3 and kvquant4."""
    widths, normalised = parse_bits(bits, "bits"), parse_bits(q_norm or "", "q-norm")
    words = _read(text)
    from millpond.hf.calibration.measure import calibrate as measure

    loaded, tokenizer = model.load()
    ids = tokenizer(words, add_special_tokens=False, return_tensors="pt", verbose=False)["input_ids"][0]
    with notes(), _bar() as progress:
        tables = measure(
            loaded,
            ids,
            bits=widths,
            windows=windows,
            length=length,
            outliers=outliers,
            sinks=sinks,
            fisher=fisher,
            by_range=by_range,
            normalise=normalised,
            progress=progress,
        )
    tables.save(out)
    errors().print(
        f"[dim]{len(tables.layers)} layers · {', '.join(map(str, tables.bits))} bits · {escape(str(out))}: "
        f"{size(out.stat().st_size)}[/]",
        soft_wrap=True,
        highlight=False,
    )


def parse_bits(text: str, name: str) -> list[int]:
    """Return whole numbers separated by commas.

    Raises:
        OptionError: something else.

    Example:
        >>> parse_bits("2,4", "bits")
        [2, 4]
    """
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise OptionError(f"--{name} {text!r}: give whole numbers separated by commas, such as 2,4") from None


def _read(path: Path) -> str:
    try:
        words = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"text {str(path)!r} cannot be read: {error}") from error
    if not words.strip():
        raise DataError(f"text {str(path)!r} is empty")
    return words


@contextmanager
def _bar() -> Iterator[Progress]:
    """Show a bar over the runs of tokens, then the layers; it goes when all is done."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("calibrating"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bars(*columns, console=errors(), transient=True) as bars:
        task = bars.add_task("steps", total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)
