"""`millpond demo`: one long text, many questions, one budget, several methods; a table and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from millpond.cli.console import notes, output, size
from millpond.cli.options import optional
from millpond.errors import OptionError
from millpond.optional import require

if TYPE_CHECKING:
    from millpond.cli.demo.task import DemoOutcome

METHODS = "full,keydiff,kvzip,h2o,snapkv,streaming,window"
#: What each method is recommended for, as the README says.
USES = {
    "keydiff": "later questions",
    "kvzip": "later questions",
    "h2o": "a strict budget",
    "snapkv": "a known question",
    "streaming": "endless text",
}
PICTURE = "kept-positions.png"
QUESTION = "What is this text about? Answer in one sentence."
PROTOCOL = (
    "The text is compressed before any question is seen; each question then continues from its own copy of the cache."
)


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the picture.")] = Path("millpond-demo"),
    seed: Annotated[
        int,
        typer.Option(
            help="Seed of the text, which the model was not trained on; seeds other than 0 need millpond-lab."
        ),
    ] = 0,
    budget: Annotated[str, typer.Option(help="Budget of every method but full.")] = "20%",
    length: Annotated[
        int,
        typer.Option(
            min=64,
            max=4000,
            help="Words of the text (numbers other than 2,048 need millpond-lab); with --model, tokens.",
        ),
    ] = 2048,
    questions: Annotated[int, typer.Option(help="Questions, one for each of the first N of 32 pairs.")] = 32,
    methods: Annotated[str, typer.Option(help="Methods, separated by commas.")] = METHODS,
    model_name: Annotated[
        str, typer.Option("--model", help="A real model, as in `millpond chat`: the demo on a text of yours.")
    ] = "pond-recall",
    text: Annotated[Path | None, optional(help="With --model: a file of UTF-8 text.")] = None,
    question: Annotated[str, typer.Option(help="With --model: the question about the text.")] = QUESTION,
) -> None:
    """Compare methods at one small budget on the bundled model, and draw what each head kept; or on a real model."""
    if model_name != "pond-recall" or text is not None:
        _on_real_text(model_name, text, length, budget, question)
        return
    require("matplotlib", "plot", "the picture")
    from millpond.cli.demo.picture import draw
    from millpond.cli.demo.task import PAIRS, DemoTask, run_method
    from millpond.methods import METHODS as registry
    from millpond.models.installed import OWN
    from millpond.models.load import load_model

    names = [registry.get(name.strip()).name for name in methods.split(",")]
    model = load_model("pond-recall")
    task = DemoTask.draw(length, questions, seed)
    screen = output()
    screen.print(
        f"[bold]pond-recall[/] is {OWN['pond-recall']}.\n"
        f"It reads {task.length:,} tokens with {PAIRS} (name, thing) pairs hidden in filler. "
        f"{PROTOCOL} Budget: {budget} for every method but full. Seed {seed}.\n"
    )
    with notes():
        run_method(model, task.beginning(128), "full", budget)  # the first call pays for start-up
        with screen.status("running") as status:
            outcomes = []
            for name in names:
                status.update(f"running {name}")
                outcomes.append(run_method(model, task, name, budget))
    screen.print(_table(outcomes))
    screen.print(f"\n[dim]tok/s: all {questions} questions at once, the fastest decoding step.[/]")
    screen.print(_lesson(outcomes))
    draw(outcomes, task.pairs, task.length, out / PICTURE, f"What is kept of {task.length:,} tokens at {budget}")
    screen.print(f"Which positions each head kept: {out / PICTURE}", soft_wrap=True)
    screen.print("A real model: 'make demo-real' in a checkout, or 'millpond models get smollm2-135m'", highlight=False)


def _on_real_text(name: str, text: Path | None, length: int, budget: str, question: str) -> None:
    if name == "pond-recall" or text is None:
        raise OptionError("--model and --text go together: a real model, and a file for it to read")
    from millpond.cli.demo_real_text import show
    from millpond.models.load import load_model, load_tokenizer

    show(load_model(name), load_tokenizer(name), name, text, length, budget, question)


def _lesson(outcomes: list[DemoOutcome]) -> str:
    """Return the lesson of the table in one sentence."""
    small = [one for one in outcomes if one.share < 0.9]
    first = max(small or outcomes, key=lambda one: one.right)
    last = min(small or outcomes, key=lambda one: one.right)
    if first.right == last.right:
        return f"Every compressed cache answers {first.right} of {first.asked}."
    return (
        f"In about the same memory {first.method} answers {first.right} of {first.asked} and {last.method} "
        f"{last.right}: the choice of entries counts, and these questions came after the text."
    )


def _table(outcomes: list[DemoOutcome]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("method", style="bold")
    for heading in ("answers right", "KV held", "of full", "tok/s"):
        table.add_column(heading, justify="right")
    table.add_column("recommended for")
    for outcome in outcomes:
        right = outcome.right / outcome.asked
        colour = "green" if right >= 0.8 else "yellow" if right >= 0.5 else "red"
        table.add_row(
            outcome.method,
            f"[{colour}]{outcome.right} of {outcome.asked}[/]",
            size(outcome.kv_bytes),
            f"{outcome.share:.0%}",
            f"{outcome.tokens_per_s:,.0f}",
            USES.get(outcome.method, ""),
        )
    return table
