"""Measurement of a fidelity table: KL against the full cache per window of a text, over budgets and number formats."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from millpond.budget import Budget
from millpond.codec import codecs_of, resolve
from millpond.errors import BudgetError, DataError, OptionError
from millpond.hf.cache_spec import policy_of
from millpond.hf.calibration.load import model_mark
from millpond.hf.compress import compress
from millpond.hf.fit import MAX_WINDOWS, MIN_WINDOWS, Fit, FitRow, default_path
from millpond.hf.model_support import unwrapped
from millpond.policy.policy import Policy
from millpond_lab.evals.data.data_files import read_text
from millpond_lab.evals.decoding.batch import BatchReader, Tokens
from millpond_lab.evals.decoding.likelihood import RecordedLogits, compare
from millpond_lab.evals.tasks.text import fidelity

#: The grid where none is given: shares of the prompt, and formats.
BUDGETS = ("5%", "10%", "20%", "35%", "50%", "75%", "100%")
CODECS = ("auto", "int8", "int4")
#: Called after each setting of a batch of windows: how many are done, of how many.
Progress = Callable[[int, int], None]


def fit(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str | os.PathLike[str],
    method: str = "h2o",
    *,
    budgets: Sequence[str] = BUDGETS,
    codecs: Sequence[str] = CODECS,
    context: int = 512,
    continuation: int = 64,
    windows: int = 80,
    batch: int = 4,
    seed: int = 0,
    out: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Fit:
    """Measure a model on a text, and write the table that `budget="auto"` reads.

    Each window has a context that is compressed, and a continuation that is fed token by token; the KL of its
    predictions against the full cache's is averaged over the continuation. A budget that is a share also keeps as many
    entries of shorter prompts as it does of the context, since that is what was measured.

    Args:
        text: a file of UTF-8 text like those that the model will read; may end in .gz.
        method: what is kept. options: of the method, as `compress` takes them.
        budgets: shares of the prompt, as "20%", or tokens; a method that takes none is measured without.
        codecs: names of number formats, as `compress` takes them.
        context: tokens of a window that are read and compressed.
        continuation: tokens of a window that are fed one by one.
        windows: how many, at least 45, spread over the text.
        batch: windows that are read together. seed: where in the text the windows begin.
        out: the file to write; None: in the user's cache folder, where `compress` and the engine look for it.

    Raises:
        OptionError: a number out of range, a budget in bytes, an unknown method or codec, or one that the method
            refuses. BudgetError: no budget. DataError: a text that is too short or cannot be read, or a file that
            cannot be written.
    """
    model = unwrapped(model)
    _check(windows, context, continuation, batch)
    policy = policy_of(method, options)
    grid = _grid(policy, budgets, codecs, context)
    samples = list(fidelity(str(text), context, continuation, context + continuation).samples(tokenizer, windows, seed))
    if len(samples) < MIN_WINDOWS:
        raise DataError(
            f"{os.fspath(text)} has {len(samples)} windows of {context + continuation} tokens, and {MIN_WINDOWS} are "
            "needed to tell what holds in 95 % of them; name a longer text, or lower the context or the continuation"
        )
    kl: list[list[float]] = [[] for _ in grid]
    held: list[list[float]] = [[] for _ in grid]
    groups = [samples[begin : begin + batch] for begin in range(0, len(samples), batch)]
    for number, group in enumerate(groups):
        openings = [sample.tokens or () for sample in group]
        targets: list[Tokens] = [sample.questions[0].tokens or () for sample in group]
        measured = _measure(model, tokenizer, method, options, grid, openings, targets)
        for place, (divergences, shares) in enumerate(measured):
            kl[place] += divergences
            held[place] += shares
            if progress is not None:
                progress(number * len(grid) + place + 1, len(groups) * len(grid))
    rows = [
        FitRow(budget, codec, sum(shares) / len(shares), tuple(found))
        for (budget, codec), found, shares in zip(grid, kl, held, strict=True)
    ]
    digest = hashlib.sha256(read_text(str(text)).encode()).hexdigest()
    table = Fit(model_mark(model), type(model).__name__, method, options, digest, context, continuation, tuple(rows))
    table.save(default_path(model, method) if out is None else out)
    return table


def _measure(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    method: str,
    options: dict[str, Any],
    grid: list[tuple[str | None, str]],
    openings: list[tuple[int, ...]],
    targets: list[Tokens],
) -> Iterator[tuple[list[float], list[float]]]:
    """Of each setting, the KL of each window, and the bytes that it holds as a share of the full cache's."""
    with torch.inference_mode():
        with compress(model, "full") as whole:
            full = RecordedLogits(BatchReader(model, whole, openings), targets)
        for budget, codec in grid:
            full.rewind()
            with compress(model, method, budget, codec, tokenizer=tokenizer, **options) as cache:
                reader = BatchReader(model, cache, openings)
                found = compare(full, reader, targets)
                shares = [row.kv_bytes / row.full_kv_bytes for row in reader.held()]
            yield [one.kl for one in found if one is not None], shares


def _grid(policy: Policy, budgets: Sequence[str], codecs: Sequence[str], context: int) -> list[tuple[str | None, str]]:
    """All settings, those that repeat left out."""
    if not codecs or (policy.takes_budget and not budgets):
        raise OptionError("a table has at least one budget and one codec; name some")
    for codec in codecs:
        for one in codecs_of(resolve(codec)):
            policy.check_codec(one)
            if one.calibrated:
                raise OptionError(f"codec {codec!r} needs a calibration, which a table does not take; leave it out")
    kept = [_named(budget, context) for budget in budgets] if policy.takes_budget else [None]
    return list(dict.fromkeys((budget, codec) for budget in kept for codec in codecs))


def _named(text: str, context: int) -> str:
    """A budget that keeps of a shorter prompt what it keeps of the context."""
    budget = Budget.parse(text)
    if budget.kind == "bytes":
        raise BudgetError(
            f"budget {text!r}: what bytes hold depends on the length of a prompt, which a table does not know; give "
            "shares or tokens"
        )
    if budget.kind == "tokens" or budget.at_least:
        return str(budget).removesuffix(" tokens")
    return f"{budget}, at least {budget.entries(context)}"


def _check(windows: int, context: int, continuation: int, batch: int) -> None:
    for name, value, least, most in (
        ("windows", windows, MIN_WINDOWS, MAX_WINDOWS),
        ("context", context, 2, 1 << 24),
        ("continuation", continuation, 1, 1 << 20),
        ("batch", batch, 1, 4096),
    ):
        if not least <= value <= most:
            raise OptionError(f"{name}={value} must be {least} to {most}")
