"""The pages of the methods: docstrings, options, budgets in bytes and curves."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from generated.blocks_section import blocks_section
from generated.markup import NOTE, cell, left
from generated.options import option_table, paper
from generated.paper_rows import profiles_section, thresholds_section
from generated.trained_sections import gate_section, trained_section
from millpond.kernels.decode_rules import Evict
from millpond.methods import METHODS
from millpond.policy.policy import Policy
from millpond.registry import Entry
from millpond_lab.bench.common.report import markdown_table
from millpond_lab.evals.decoding.record import SummaryRow
from millpond_lab.evals.report.curves import CurvePanel, quality_section

#: What follows the curves on the pages of some methods.
SECTIONS = {
    "infllm": lambda: f"\n{blocks_section()}",
    "attention_gate": gate_section,
    "fastgen": profiles_section,
    "kvmerger": thresholds_section,
    "locret": trained_section,
}


def own_methods() -> list[str]:
    """Names of the package's methods; one that is installed beside it has its own documentation."""
    return [name for name in METHODS.names() if METHODS.get(name).build.__module__.startswith("millpond.")]


def method_table(folder: str) -> str:
    """All methods with paper and first line."""
    rows = []
    for name in own_methods():
        entry = METHODS.get(name)
        rows.append((f"[`{name}`]({folder}{name}.md)", paper(entry) or "baseline", cell(entry.summary)))
    return left(markdown_table(("method", "paper", "what it keeps"), rows))


def method_page(entry: Entry[Any], panels: Mapping[str, CurvePanel], rows: Sequence[SummaryRow]) -> str:
    """One method: its docstring, its options, and its curve where there is one.

    Args:
        entry: The method.
        panels: Its curves by protocol.
        rows: Those that the curves are made of.
    """
    head = f"# `{entry.name}`\n\n" + (f"{paper(entry)}\n\n" if entry.paper else "")
    text = f"{NOTE}{head}{inspect.getdoc(entry.build)}\n\n{in_bytes(entry)}## Options\n\n{options(entry)}"
    quality = quality_section(panels, rows, f"../../images/quality/{entry.name}.svg")
    quality += SECTIONS[entry.name]() if entry.name in SECTIONS else ""
    return f"{text}\n{quality}" if quality else text


def in_bytes(entry: Entry[Any]) -> str:
    """How a method keeps a budget in bytes while it decodes; empty for one without a budget."""
    policy = entry()
    if not policy.takes_budget:
        return ""
    if policy.keeps_all:
        return "## A budget in bytes\n\nRefused: everything is stored. `memory_limit` bounds the bytes.\n\n"
    text, who = "After the prompt the pages of the whole cache never take more.", "When they are full,"
    if not policy.grows_when_decoded and "grow" in getattr(entry.options.get("decode"), "type_name", ""):
        policy, who = entry(decode="grow"), 'When they are full with decode="grow" or "once",'
    if policy.grows_when_decoded:
        text += f" {who} {room(replace(policy, bounded=True))}"
    return f"## A budget in bytes\n\n{text}\n\n"


def room(policy: Policy) -> str:
    """How a policy that grows while decoding evicts at a full budget in bytes."""
    evict = policy.decode_rule(0).evict
    if not evict.by_score:
        return 'each step evicts as decode="evict" does.'
    if evict is Evict.HEAVIEST:
        return "each step evicts the entry of a KV head with the most attention at the end of the last prompt."
    if policy.scores_entries:
        return "each step evicts the entry of a KV head with the lowest score before the newest half."
    attention = "had the least attention at the end of the last prompt"
    order = attention if policy.gathers else "the last plan ranked lowest"
    return (
        f"each step evicts one entry of a KV head: of those before the newest half, the one that {order}. Entries that "
        "were decoded since have no score and are evicted first, oldest first."
    )


def options(entry: Entry[Any]) -> str:
    """The options of a method, and how one of them is given."""
    if not entry.options:
        return "None.\n"
    example = next(iter(entry.options.values()))
    return (
        option_table(entry)
        + f'\nIn Python `mp.compress(model, "{entry.name}", budget="20%", {example.name}={example.default!r})`, '
        + f"on the command line `millpond generate --method {entry.name} -o {example.name}={example.default}`.\n"
    )
