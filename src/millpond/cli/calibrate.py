"""`millpond calibrate`: statistics of a model that a codec needs, measured on texts and written to a file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from millpond.cli.console import errors, notes, size
from millpond.cli.options import ModelOptions, OptionGroup, expand_groups, optional
from millpond.errors import OptionError, unknown

if TYPE_CHECKING:
    from millpond.hf.calibration.measure import Progress

#: Codecs whose files this command makes.
KVQUANT, TRANSFORM = "kvquant", "transform"
#: The method whose file this command makes.
TRIATTENTION = "triattention"


@dataclass(frozen=True, kw_only=True)
class KvquantChoice(OptionGroup):
    """Options of the codecs kvquant2, kvquant3 and kvquant4."""

    bits: Annotated[str, typer.Option(help="Bits of the codes; several are separated by commas (kvquant).")] = "2,3,4"
    outliers: Annotated[
        float, typer.Option(help="Share of outliers that are stored apart from the codes (kvquant).")
    ] = 0.01
    sinks: Annotated[int, typer.Option(min=0, help="First entries of a text that are not quantized (kvquant).")] = 1
    q_norm: Annotated[
        str | None, optional(help="Bits for which codes keep mean and deviation (Q-Norm), such as '2' (kvquant).")
    ] = None
    fisher: Annotated[
        bool, typer.Option("--fisher/--no-fisher", help="Weigh numbers by the gradients of the loss at them (kvquant).")
    ] = True
    by_range: Annotated[
        bool,
        typer.Option(
            "--by-range/--no-range",
            help="Weigh by the squared range of a channel too; the published code does not (kvquant).",
        ),
    ] = True


@dataclass(frozen=True, kw_only=True)
class TransformChoice(OptionGroup):
    """Options of the storage codec `transform`."""

    default_text: Annotated[
        bool,
        typer.Option(
            "--default-text/--no-default-text",
            help="Read the standard library's sources, Millpond's docs and texts sampled of the model (transform).",
        ),
    ] = True
    most_bits: Annotated[
        float, typer.Option(help="Most bits a number that the file supports; fewer make it smaller (transform).")
    ] = 4.0
    most_head_bits: Annotated[
        float | None,
        optional(help="The same of parts for caches that evict; 0: no parts. Default: --most-bits (transform)."),
    ] = None


@expand_groups
def calibrate(
    *,
    out: Annotated[Path, typer.Option(help="The file to write (.safetensors).")],
    model: ModelOptions,
    codec: Annotated[
        str,
        typer.Option(
            help="kvquant: codecs kvquant2 to kvquant4; transform: the storage codec transform:BITS; triattention: "
            "query centres of that method."
        ),
    ] = KVQUANT,
    text: Annotated[
        list[Path] | None,
        optional(help="A text like those that the model will read; transform takes several, and has texts of its own."),
    ] = None,
    windows: Annotated[int, typer.Option(min=1, help="Windows of tokens to read of a text, spread over it.")] = 16,
    length: Annotated[int, typer.Option(min=2, help="Tokens of a window.")] = 1024,
    kvquant: KvquantChoice,
    transform: TransformChoice,
) -> None:
    """Measure a model on texts, for kvquant, the codec transform or triattention.

    For kvquant a text has 16,000 tokens or more. For transform it takes minutes and no gradients; an interrupted run
    continues from OUT.resume when it is started again.
    """
    groups = {KVQUANT: kvquant, TRANSFORM: transform, TRIATTENTION: None}
    if codec not in groups:
        raise unknown("codec to calibrate", codec, groups)
    for other, group in groups.items():
        for name in sorted(group.given) if group is not None and other != codec else ():
            raise OptionError(f"--{name.replace('_', '-')} is no option of codec {codec}; leave it out")
    texts = text or []
    if codec == KVQUANT:
        if len(texts) != 1:
            raise OptionError("codec kvquant is calibrated on one text: give --text once")
        about = _kvquant(model, texts[0], out, windows, length, kvquant)
    elif codec == TRIATTENTION:
        about = _triattention(model, texts, out, windows, length)
    else:
        about = _transform(model, texts, out, windows, length, transform)
    errors().print(f"[dim]{about} · {escape(str(out))}: {size(out.stat().st_size)}[/]", soft_wrap=True, highlight=False)


def _kvquant(model: ModelOptions, text: Path, out: Path, windows: int, length: int, choice: KvquantChoice) -> str:
    """Write tables for kvquant; returns words about them."""
    widths, normalised = parse_bits(choice.bits, "bits"), parse_bits(choice.q_norm or "", "q-norm")
    from millpond.hf.calibration.measure import calibrate as measure
    from millpond.hf.calibration.texts import read_text, tokens_of

    words = read_text(text)
    loaded, tokenizer = model.load()
    with notes(), _bar("calibrating") as progress:
        tables = measure(
            loaded,
            tokens_of(tokenizer, words),
            bits=widths,
            windows=windows,
            length=length,
            outliers=choice.outliers,
            sinks=choice.sinks,
            fisher=choice.fisher,
            by_range=choice.by_range,
            normalise=normalised,
            progress=progress,
        )
    tables.save(out)
    return f"{len(tables.layers)} layers · {', '.join(map(str, tables.bits))} bits"


def _transform(
    model: ModelOptions, texts: list[Path], out: Path, windows: int, length: int, choice: TransformChoice
) -> str:
    """Write a transform file; returns words about it."""
    if not texts and not choice.default_text:
        raise OptionError("--no-default-text leaves nothing to read: give --text")
    from millpond.codec.transform.allocation import check_bits
    from millpond.hf.calibration.texts import default_texts, given_texts
    from millpond.hf.calibration.transform import RESUME, calibrate_transform, checked_head_bits

    checked_head_bits(check_bits(choice.most_bits), choice.most_head_bits)
    loaded, tokenizer = model.load()
    given = given_texts(tokenizer, texts, windows, length)
    resume = out.with_name(out.name + RESUME)
    with notes():
        usual: list[Any] = []
        if choice.default_text:
            with _bar("sampling texts") as progress:
                usual = default_texts(loaded, tokenizer, length, progress)
        with _bar("calibrating") as progress:
            found = calibrate_transform(
                loaded,
                [*given, *usual],
                length=length,
                most_bits=choice.most_bits,
                most_head_bits=choice.most_head_bits,
                resume=resume,
                progress=progress,
            )
    found.save(out)
    return f"{len(found.layers)} layers · {found.calibrated.tokens:,} tokens"


def _triattention(model: ModelOptions, texts: list[Path], out: Path, windows: int, length: int) -> str:
    """Write the query centres of a model; returns words about them."""
    from millpond.hf.calibration.query_centres import measure_centres
    from millpond.hf.calibration.texts import default_texts, given_texts

    loaded, tokenizer = model.load()
    given = given_texts(tokenizer, texts, windows, length)
    with notes():
        if not given:
            with _bar("sampling texts") as progress:
                given = default_texts(loaded, tokenizer, length, progress)
        with _bar("measuring") as progress:
            centres = measure_centres(loaded, given, progress)
    out.write_bytes(centres.content())
    return f"{len(centres.mean)} layers · {sum(ids.numel() for ids in given):,} tokens"


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


@contextmanager
def _bar(what: str) -> Iterator[Progress]:
    """Show a bar over the steps of something; it goes when all is done."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Bars(*columns, console=errors(), transient=True) as bars:
        task = bars.add_task("steps", total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)
