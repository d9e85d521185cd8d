"""Tables of chats and texts, for the pages about choosing a method and number formats."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from generated.markup import left
from generated.results import read
from millpond_lab.bench.common.report import markdown_table


def chat_facts() -> str:
    """How many facts of chats each setting states, of those that the full cache states, model by model."""
    report = read("chat-facts")
    models = report["models"]
    settings = [name for name in next(iter(models.values())) if name != "tokens"]
    head = ("setting", *(f"{name}: stated, of the bytes" for name in models))
    rows = [
        (name, *(f"{one[name]['stated']} of {one[name]['of']}, {one[name]['bytes']:.0%}" for one in models.values()))
        for name in settings
    ]
    longest = max(max(one["tokens"]) for one in models.values())
    return (
        f"{report['chats']} chats of up to {longest:,} tokens, {report['machine']['cpu']}, greedy answers, "
        "`benchmarks/quality/chat_facts.py`; counted are the chats whose fact the full cache states.\n\n"
        f"{left(markdown_table(head, rows))}"
    )


def codec_texts() -> str:
    """KL of number formats on windows of several texts, by model and length."""
    return texts_table("codec-texts", "codec_texts.py")


def texts_table(name: str, script: str) -> str:
    """The tables of a result of `codec_texts.py`, one for each setting, and what made it."""
    report, parts = read(name), []
    for row in report["rows"]:
        texts = list(next(iter(row["kl"].values())))
        rows = [
            (f"`{codec}`", f"{row['bytes'][codec]:.1%}", *(mean_and_error(kl[text]) for text in texts))
            for codec, kl in row["kl"].items()
        ]
        parts.append(
            f"{row['model']}, {row['windows']} windows of each text, {row['prompt']:,} tokens and {row['scored']} "
            f"more{_setting(row)}: KL from the full cache in nats a token, mean and standard error "
            f"(`benchmarks/quality/{script}`, {report['machine']['cpu']}).\n\n"
            f"{left(markdown_table(('format', 'bytes', *texts), rows))}"
        )
    return "\n".join(parts)


def _setting(row: dict[str, Any]) -> str:
    method = "" if row["method"] == "full" else f", `{row['method']}` at {row['budget']}"
    return method + (f", calibrated on {row['calibrated on']}" if row["calibrated on"] else "")


def mean_and_error(numbers: Sequence[float]) -> str:
    """The mean of numbers and its standard error."""
    error = statistics.stdev(numbers) / len(numbers) ** 0.5 if len(numbers) > 1 else 0.0
    return f"{statistics.mean(numbers):.4f} ± {error:.4f}"
