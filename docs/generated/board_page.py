"""The board: the page of its tables, and the table of the README, from the committed rows."""

from __future__ import annotations

from dataclasses import replace

from generated.results import read
from millpond.presets import DEFAULT_PRESET, PRESETS
from millpond_lab.evals.report.board import FULL, Setting, board_page
from millpond_lab.evals.report.board_summary import Summary, summary, summary_table
from millpond_lab.evals.report.default_choice import choice_table, choose
from millpond_lab.evals.report.orders import orders_table

#: Models of the README's table, as it names them.
NAMES = {"smollm2-135m": "SmolLM2-135M", "qwen2.5-coder-0.5b": "Qwen2.5-Coder-0.5B"}

#: Stored forms that the README's table shows.
STORED = (Setting("stored:bits=1.5"), Setting("stored:bits=1"))

#: Settings that evict, shown with the contexts that they have: in the README's table, and in the picture alone.
EVICTING = (Setting("kvzip", "60%", "rotated4"), Setting("h2o", "20%"))
PICTURED = (Setting("snapkv", "20%"),)

#: Families of tasks that each model should have rows of before a default is changed by them.
FAMILIES = 6


def board() -> str:
    """The page: what every setting keeps, and what is chosen by that."""
    report = read("board")
    chosen = choose(report)
    solved = {name: sum(one["model"] == name for one in chosen["tasks"]) for name in NAMES}
    table = choice_table(chosen).replace("# The default", "## What the rule chooses")
    each = " and ".join(f"{count} of {NAMES[name]}" for name, count in solved.items())
    note = (
        f"Tasks of the rule: {each}; it wants {FAMILIES} of each model.\n"
        "Presets are points of fewer and fewer bytes by the mean over tasks, where there is one.\n"
        "The preset `tiny` is not among them: it evicts, and is for a question that comes with the text "
        "([chats](how-to/choose-a-method.md#which-settings-still-state-a-fact))."
    )
    made = "`benchmarks/quality/board.sh` makes the rows, and `board.sh quick` a few of them in minutes."
    orders = (
        "## Orders that papers state\n\n"
        "Differences of mean scores over the same contexts, with 95 % intervals (bootstrap over contexts), on tasks "
        "that the full cache solves.\n"
        "An order holds here where the whole interval is above 0; where these models solve no task of the paper's "
        "kind, or neither side keeps an answer, the command tries it on the paper's own model.\n\n"
        f"{orders_table(report, NAMES)}"
    )
    picture = "![Right answers that are kept over the bytes that are held, for two real models](images/board.svg)"
    return f"{board_page(report, picture)}\n{table}\n{note}\n{made}\n\n{orders}\n"


def board_summary() -> str:
    """The README's table: both models, the full cache, the presets, settings that evict and stored forms."""
    found, shown = in_short(), {FULL, *presets(), *EVICTING, *STORED}
    table = summary_table(replace(found, lines=[line for line in found.lines if line.setting in shown]), NAMES)
    for setting, name in presets().items():
        default = ", the default" if name == DEFAULT_PRESET else ""
        table = table.replace(f"| `{setting}` |", f"| `{setting}`: preset `{name}`{default} |")
    return table


def in_short() -> Summary:
    """What each setting keeps of both models' answers."""
    return summary(read("board"), list(NAMES), (*EVICTING, *PICTURED))


def presets() -> dict[Setting, str]:
    """The presets by their settings."""
    return {Setting(one["method"], one.get("budget", ""), one["codec"]): name for name, one in PRESETS.items()}
