"""Options for the texts that networks on a frozen model are trained on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from millpond.errors import OptionError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from millpond_lab.train.retain.texts import Texts

DATA_HELP = (
    "'recall' for rows of pond-recall's families, 'recall:sparse' for long ones with few facts, 'recall:mixed' "
    "for both by turns; a text file; or .jsonl, whose lines have 'text', or 'context', 'question' and 'answer', or "
    "'messages'."
)
DataLength = Annotated[str, typer.Option(help="Tokens of a cut of a file's text: least,most.")]
Without = Annotated[str, typer.Option(help="Kinds of facts that --data recall leaves out, separated by commas.")]


def pair_of(text: str, name: str, example: str) -> tuple[int, int]:
    """Two whole numbers above 0, separated by a comma."""
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != 2 or not all(part.isdecimal() and int(part) for part in parts):
        raise OptionError(f"{name} {text!r}: give two whole numbers above 0, such as {example}")
    return int(parts[0]), int(parts[1])


def texts_of(data: str, tokenizer: PreTrainedTokenizerBase, length: str, without: str) -> Texts:
    """The texts that --data, --length and --without name."""
    from millpond_lab.evals.data.pond_tasks import speaks_pond
    from millpond_lab.train.retain.texts import (
        MIXED,
        RECALL,
        SPARSE,
        FileTexts,
        MixedRecallTexts,
        RecallTexts,
        SparseRecallTexts,
    )

    shortest, longest = pair_of(length, "--length", "256,1024")
    left_out = [kind.strip() for kind in without.split(",") if kind.strip()]
    if data in (RECALL, SPARSE, MIXED) and not speaks_pond(tokenizer):
        raise OptionError(f"--data {data} is in the words of pond-recall, which this model does not know; name a file")
    if data == RECALL:
        return RecallTexts(left_out)
    if left_out:
        raise OptionError("--without is of --data recall; leave it out")
    if data == SPARSE:
        return SparseRecallTexts()
    if data == MIXED:
        return MixedRecallTexts()
    if shortest > longest:
        raise OptionError(f"--length {shortest},{longest}: the shortest cut comes first")

    def tokenize(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    return FileTexts(Path(data), tokenize, shortest, longest)
