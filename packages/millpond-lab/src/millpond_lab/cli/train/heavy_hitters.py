"""`millpond train heavy-hitters`: the attention of a model as a picture and as a table in a page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from millpond.cli.console import output
from millpond.errors import OptionError
from millpond.optional import require
from millpond_lab.markdown import one_per_line

if TYPE_CHECKING:
    from millpond_lab.train.text.eval import AttentionStatistics

BEGIN, END = "<!-- measured -->", "<!-- /measured -->"


def heavy_hitters(
    text_file: Annotated[Path, typer.Option(help="The text to read; one that the model was not trained on.")],
    page: Annotated[Path, typer.Option(help=f"The table goes between its {BEGIN} and {END}.")],
    picture: Annotated[Path, typer.Option(help="Where the picture goes (PNG).")],
    model: Annotated[str, typer.Option(help="A folder, a bundled model's name or a hub id.")] = "pond-text",
    length: Annotated[int, typer.Option(min=2, help="Tokens of a window.")] = 1024,
    windows: Annotated[int, typer.Option(min=1, help="Spread evenly over the text.")] = 8,
) -> None:
    """Measure heavy hitters, the sink and the sparsity of a model's attention with the full cache."""
    import torch
    from transformers import AutoModelForCausalLM

    require("matplotlib", "plot", "the picture")
    from millpond.models.load import load_tokenizer, resolve
    from millpond_lab.cli.train.heavy_hitters_picture import draw
    from millpond_lab.train.common.progress import no_bars
    from millpond_lab.train.text.data import read_document
    from millpond_lab.train.text.eval import measure_attention, spread_windows

    before = _page(page)
    tokenizer = load_tokenizer(model)
    ids = tokenizer(read_document(text_file), add_special_tokens=False, verbose=False)["input_ids"]
    with no_bars():
        stock = AutoModelForCausalLM.from_pretrained(
            resolve(model), dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
        )
    found = measure_attention(stock.train(False), spread_windows(ids, tokenizer.bos_token_id, length, windows))
    draw(found, picture)
    section = measured(found, model, text_file.name)
    after = re.sub(f"{BEGIN}.*?{END}", lambda _: f"{BEGIN}\n{section}\n{END}", before, flags=re.DOTALL)
    page.write_text(after, encoding="utf-8")
    output().print(f"{page} and {picture}: {found.windows} windows of {found.length:,} tokens", soft_wrap=True)


def _page(page: Path) -> str:
    text = page.read_text(encoding="utf-8") if page.is_file() else ""
    if BEGIN not in text or END not in text:
        raise OptionError(f"page {page} must exist and hold {BEGIN} and {END}, between which the table goes")
    return text


def measured(found: AttentionStatistics, model: str, text: str) -> str:
    """The measurements in Markdown: one row per layer, means over heads (and the least and the greatest head)."""
    small, large = found.top
    lines = [
        f"`{model}` on {found.windows} windows of {found.length:,} tokens of `{text}`, {found.first.shape[1]} query "
        "heads a layer. Each cell: the mean over the heads (least to greatest head).",
        "",
        f"| layer | mass in the top {small:.0%} of columns | mass in the top {large:.0%} | mass on the first token "
        "| entries below 1 % of the row's maximum |",
        "|---|---|---|---|---|",
    ]
    tables = (*found.top.values(), found.first, found.sparsity)
    for layer in range(len(found.first)):
        lines.append(f"| {layer} | " + " | ".join(_cell(table[layer].tolist()) for table in tables) + " |")
    lines.append("| **all** | " + " | ".join(_cell(table.flatten().tolist()) for table in tables) + " |")
    lines.append(
        f"| even attention | {found.even[small]:.1%} | {found.even[large]:.1%} | {_even_first(found):.1%} | 0.0% |"
    )
    return one_per_line("\n".join(lines))


def _cell(values: list[float]) -> str:
    return f"{sum(values) / len(values):.1%} ({min(values):.0%} to {max(values):.0%})"


def _even_first(found: AttentionStatistics) -> float:
    """What the first token would get from the mean later query if it attended to all equally."""
    return sum(1 / (i + 1) for i in range(1, found.length)) / (found.length - 1)
