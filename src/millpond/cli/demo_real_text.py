"""The demo on a real model: one text, the perplexity of what follows it, and an answer, under several caches."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape
from rich.table import Table
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from millpond.cli.console import notes, output, size
from millpond.errors import DataError
from millpond.hf.compress import compress
from millpond.models.cache_argument import cache_argument
from millpond.models.chat_template import around_user, end_ids, has_template

#: Tokens of the text that are predicted, and tokens of an answer.
FOLLOWING, ANSWER = 128, 24


@dataclass(frozen=True, slots=True)
class DemoSetting:
    """One row of the table: a method and its budget (None: it takes none), or a preset."""

    method: str | None = None
    budget: str | None = None
    preset: str | None = None

    def __str__(self) -> str:
        return " ".join(part for part in (self.preset, self.method, self.budget) if part)

    @property
    def arguments(self) -> dict[str, Any]:
        """For `compress`."""
        if self.preset is not None:
            return {"preset": self.preset}
        return {"method": self.method, "budget": self.budget}


def settings_for(budget: str) -> list[DemoSetting]:
    """Return the rows: all entries, all in fewer bits, evicted, and the window.

    The window shows what eviction can cost.
    """
    return [
        DemoSetting("full"),
        DemoSetting(preset="light"),
        DemoSetting(preset="balanced"),
        DemoSetting("h2o", budget),
        DemoSetting("snapkv", budget),
        DemoSetting("window", budget),
    ]


@dataclass(frozen=True, slots=True)
class Reading:
    """Result of one setting on the text.

    Attributes:
        setting: The setting.
        perplexity: Perplexity of the `FOLLOWING` tokens after the text, each predicted from the compressed cache.
        step_ms: Milliseconds of the fastest decoding step.
        answer: Answer to the question, with text and question compressed together.
    """

    setting: DemoSetting
    perplexity: float
    kv_bytes: int
    full_kv_bytes: int
    step_ms: float
    answer: str


@dataclass(frozen=True)
class TextTask:
    """A text of a file in tokens, those that follow it, and a question about it."""

    ids: torch.Tensor  # (1, L)
    following: torch.Tensor  # (1, FOLLOWING)
    prompt: torch.Tensor  # (1, P) text and question in the model's chat template

    @classmethod
    def read(cls, path: Path, tokenizer: PreTrainedTokenizerBase, length: int, question: str) -> TextTask:
        """Return a task of the first tokens of a file.

        Raises:
            DataError: it cannot be read as UTF-8, or is too short.
        """
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{path} cannot be read as UTF-8 text: {error}") from error
        ids = torch.tensor([tokenizer.encode(text[: 16 * (length + FOLLOWING)], add_special_tokens=False)])
        if ids.shape[1] < length + FOLLOWING:
            raise DataError(
                f"{path} has {ids.shape[1]:,} tokens, and {length + FOLLOWING:,} are needed; name a longer text, or "
                f"lower --length to {max(0, ids.shape[1] - FOLLOWING)}"
            )
        asked = f"{tokenizer.decode(ids[0, :length])}\n\n{question}"
        if has_template(tokenizer):
            around = around_user(tokenizer)
            asked = around.before + asked + around.behind
        prompt = torch.tensor([tokenizer.encode(asked, add_special_tokens=False)])
        return cls(ids[:, :length], ids[:, length : length + FOLLOWING], prompt)


def show(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    path: Path,
    length: int,
    budget: str,
    question: str,
) -> None:
    """Run every setting, and print the table, the answers and one sentence."""
    task, screen = TextTask.read(path, tokenizer, length, question), output()
    screen.print(
        f"[bold]{escape(name)}[/] reads {length:,} tokens of {escape(str(path))}, and its cache is compressed. Then "
        f"the next {FOLLOWING} tokens of the text are predicted one by one, and a question about it is answered.\n"
    )
    with notes(), screen.status("running") as status:
        readings = []
        for setting in settings_for(budget):
            status.update(f"running {setting}")
            readings.append(read_text(model, tokenizer, task, setting))
    screen.print(_table(readings))
    screen.print(f"\n[bold]{escape(question)}[/]")
    for reading in readings:
        screen.print(f"  [bold]{reading.setting!s:<14}[/] {escape(reading.answer)}", highlight=False)
    screen.print(f"\n{_lesson(readings)}", highlight=False)


@torch.inference_mode()
def read_text(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, task: TextTask, setting: DemoSetting
) -> Reading:
    """Return the numbers of one setting."""
    runs: Any = model
    with compress(model, tokenizer=tokenizer, **setting.arguments) as cache:
        logits = runs(task.ids, **cache_argument(cache), logits_to_keep=1).logits
        loss, steps = 0.0, []
        for token in task.following[0].tolist():
            loss -= float(logits[0, -1].float().log_softmax(-1)[token])
            begin = time.perf_counter()
            logits = runs(torch.tensor([[token]]), **cache_argument(cache)).logits
            steps.append(time.perf_counter() - begin)
        stats = cache.stats()
        cache.reset()
        out = runs.generate(
            task.prompt,
            attention_mask=torch.ones_like(task.prompt),
            **cache_argument(cache),
            max_new_tokens=ANSWER,
            do_sample=False,
            eos_token_id=end_ids(model, tokenizer),
            pad_token_id=0,
        )
    answer = tokenizer.decode(out[0, task.prompt.shape[1] :], skip_special_tokens=True)
    return Reading(
        setting,
        math.exp(loss / FOLLOWING),
        stats.kv_bytes,
        stats.full_kv_bytes,
        1e3 * min(steps),
        " ".join(str(answer).split()),
    )


def _table(readings: list[Reading]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("method", style="bold")
    for heading in ("perplexity", "change", "KV held", "of full", "ms per token"):
        table.add_column(heading, justify="right")
    for one in readings:
        more = one.perplexity / readings[0].perplexity - 1
        colour = "green" if more < 0.05 else "yellow" if more < 0.3 else "red"
        table.add_row(
            str(one.setting),
            f"{one.perplexity:.2f}",
            f"[{colour}]{more:+.1%}[/]",
            size(one.kv_bytes),
            f"{one.kv_bytes / one.full_kv_bytes:.0%}",
            f"{one.step_ms:.1f}",
        )
    return table


def _lesson(readings: list[Reading]) -> str:
    """Return the lesson of the table in one sentence."""
    small = sorted(readings[1:], key=lambda one: one.perplexity)
    best, worst, full = small[0], small[-1], readings[0]
    return (
        f"On this text {best.setting} predicts {_change(best, full)} in {best.kv_bytes / full.kv_bytes:.0%} of the "
        f"bytes, and {worst.setting} {_change(worst, full)} in {worst.kv_bytes / full.kv_bytes:.0%}: one text of one "
        "model; the leaderboard has many, with intervals."
    )


def _change(one: Reading, full: Reading) -> str:
    share = one.perplexity / full.perplexity - 1
    return f"{abs(share):.1%} {'worse' if share >= 0 else 'better'} than the full cache"
