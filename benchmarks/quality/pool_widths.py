"""How wide SnapKV's pool should be: answers of several tokens after a compressed prompt, for many widths at once.

One pass reads a prompt. From its keys and its last queries every pool makes its own choice of entries, by the package's
score and selection; then all choices decode side by side in transformers' own attention. So the widths answer the same
questions, at a fraction of what runs of their own would cost. Writes the summary to FILE; the answers go into
FILE with .jsonl; an interrupted run continues.

  benchmarks/quality/pool_widths.py --model FOLDER --out benchmarks/results/pool-widths.json [--text FILE]
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from millpond.budget import Budget
from millpond.models.cache_argument import cache_argument
from millpond.models.load import load_model, load_tokenizer
from millpond.policy.scores.attention import WindowAttention
from millpond.policy.selection import keep_best
from millpond.policy.view import View
from millpond_lab.bench.common.machine import describe_machine
from millpond_lab.evals.decoding.batch import encode
from millpond_lab.evals.harness.summary import paired_interval, resampled_interval, share_interval
from millpond_lab.evals.report.leaderboard import markdown_table
from millpond_lab.evals.sample import Question, Sample
from millpond_lab.evals.spec import Spec
from millpond_lab.evals.task import TASKS, Task

FULL, PAPER = "full", "max 7"
#: Tasks (numbers of seven digits and of three) and most samples of each, by protocol. Compressed before
#: the question is known no pool has the number, which a few samples show.
ASKED: dict[str, dict[str, float]] = {
    "niah_single:variant=2:length={length}": {"aware": math.inf, "agnostic": 10},
    "niah_multikey:length={length}": {"aware": math.inf},
    "niah_single:variant=2:digits=3:length={length}": {"aware": math.inf},
    "text:path={text}:context_len={length}:continuation_len=32:stride=2048": {"text": math.inf},
}
#: Tokens beyond those of the reference that an answer may take.
SPARE = 2


@dataclass(frozen=True)
class Pool:
    """A pool by name: "max 7", "avg 13", "none 1"."""

    name: str

    def score(self, window: int) -> WindowAttention:
        kind, width = self.name.split()
        return WindowAttention(window=window, kernel=int(width), pool=kind)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Read:
    """A prompt's keys and values by layer, the attention of its last queries, and the logits behind it."""

    entries: list[tuple[Tensor, Tensor]]
    attention: list[Tensor]  # (KV heads, seen) a layer: the sum over the window, the mean over a group
    logits: Tensor
    seen: int


@dataclass
class Examiner:
    """The model, and the pools that are compared on it."""

    model: PreTrainedModel
    tokenizer: Any
    pools: Sequence[Pool]
    budget: Budget
    window: int

    def read(self, tokens: Sequence[int]) -> Read:
        """One pass over a prompt; its last `window` queries with their attention."""
        cache, seen = DynamicCache(config=self.model.config), len(tokens)
        self.model.set_attn_implementation("sdpa")
        self._pass(cache, [tokens[: -self.window]], 0)
        self.model.set_attn_implementation("eager")
        out = self._pass(cache, [tokens[-self.window :]], seen - self.window, output_attentions=True)
        self.model.set_attn_implementation("sdpa")
        heads = cache.layers[0].keys.shape[1]
        sums = [a[0].float().sum(1).unflatten(0, (heads, -1)).mean(1) for a in out.attentions]
        return Read([(layer.keys, layer.values) for layer in cache.layers], sums, out.logits[0, -1], seen)

    def kept(self, read: Read) -> DynamicCache:
        """A row for each pool, with what it keeps."""
        cache, entries = DynamicCache(config=self.model.config), self.budget.entries(read.seen)
        for layer, ((keys, values), signal) in enumerate(zip(read.entries, read.attention, strict=True)):
            places = torch.stack([self._places(pool, signal, read.seen, layer, entries) for pool in self.pools])
            index = places[..., None].expand(-1, -1, -1, keys.shape[-1])
            rows = len(self.pools), -1, -1, -1
            cache.update(keys.expand(rows).gather(2, index), values.expand(rows).gather(2, index), layer)
        return cache

    def _places(self, pool: Pool, signal: Tensor, seen: int, layer: int, entries: int) -> Tensor:
        """(KV heads, entries) positions that stay: the window, and the best before it."""
        positions = torch.arange(seen, dtype=torch.int32).expand(signal.shape)
        value = pool.score(self.window).score(View(positions, signal, seen, layer), seed=0)
        everything = torch.ones_like(value, dtype=torch.bool)
        counts = torch.full((len(value),), entries)
        keep = keep_best(value, everything, positions >= seen - self.window, counts)
        return keep.nonzero()[:, 1].view(len(value), entries)

    def whole(self, read: Read) -> DynamicCache:
        """One row with everything."""
        cache = DynamicCache(config=self.model.config)
        for layer, (keys, values) in enumerate(read.entries):
            cache.update(keys, values, layer)
        return cache

    def answers(self, cache: DynamicCache, seen: int, following: Sequence[int], most: int) -> list[str]:
        """What each row of the cache says after `following`, greedily."""
        rows = cache.layers[0].keys.shape[0]
        fed, said = [list(following)] * rows, []
        for _ in range(most):
            logits = self._pass(cache, fed, seen).logits[:, -1]
            seen += len(fed[0])
            said.append(logits.argmax(-1).tolist())
            fed = [[token] for token in said[-1]]
        ends = {self.tokenizer.eos_token_id, *_ends(self.model)}
        texts = []
        for row in zip(*said, strict=True):
            stop = next((place for place, token in enumerate(row) if token in ends), len(row))
            texts.append(str(self.tokenizer.decode(row[:stop], skip_special_tokens=True)))
        return texts

    def losses(self, cache: DynamicCache, read: Read, target: Sequence[int]) -> list[float]:
        """Nats a token that each row of the cache gives to the target."""
        rows = cache.layers[0].keys.shape[0]
        later = self._pass(cache, [target[:-1]] * rows, read.seen, logits_to_keep=0).logits
        logits = torch.cat([read.logits.expand(rows, 1, -1), later], 1).float()
        picked = torch.log_softmax(logits, -1).gather(-1, torch.tensor(target).expand(rows, -1)[..., None])
        return [float(value) for value in -picked[..., 0].mean(1)]

    def _pass(self, cache: DynamicCache, tokens: Sequence[Sequence[int]], seen: int, **more: Any) -> Any:
        ids = torch.tensor(tokens)
        positions = torch.arange(seen, seen + ids.shape[1])[None].expand(len(ids), -1)
        settings: dict[str, Any] = {"logits_to_keep": 1, **more}
        return self.model(input_ids=ids, position_ids=positions, **cache_argument(cache), **settings)

    def ids(self, text: str, start: bool = False) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=start)["input_ids"])


def _ends(model: PreTrainedModel) -> set[int]:
    named = model.generation_config.eos_token_id if model.generation_config is not None else None
    return set(named if isinstance(named, list) else [] if named is None else [named])


@torch.inference_mode()
def ask(examiner: Examiner, task: Task, sample: Sample, question: Question, protocol: str) -> dict[str, Any]:
    """The score and the answer by pool; aware: the question is compressed with the context, agnostic: behind it."""
    context, asked = examiner.ids(sample.context, start=True), examiner.ids(question.text)
    tokens = [*context, *asked]
    # Aware as in `millpond eval`: all but the last token.
    read = examiner.read(tokens[:-1] if protocol == "aware" else context)
    most = len(examiner.ids(" ".join(question.references))) + SPARE
    names, rest = [pool.name for pool in examiner.pools], tokens[read.seen :]
    said = examiner.answers(examiner.kept(read), read.seen, rest, most)
    said += examiner.answers(examiner.whole(read), read.seen, rest, most)
    scores = [task.score(question, text) for text in said]
    return {"scores": dict(zip([*names, FULL], scores, strict=True)), "answers": said, "tokens": most - SPARE}


@torch.inference_mode()
def continue_text(examiner: Examiner, sample: Sample) -> dict[str, Any]:
    """Nats a token of what follows a text, by pool."""
    (prompt,) = encode(sample, examiner.tokenizer, "perplexity", "agnostic")
    (asked,) = prompt.asked
    read, target = examiner.read([*prompt.opening, *asked.tokens]), list(asked.targets[0])
    found = examiner.losses(examiner.kept(read), read, target) + examiner.losses(examiner.whole(read), read, target)
    return {"scores": dict(zip([*(pool.name for pool in examiner.pools), FULL], found, strict=True))}


def records(
    examiner: Examiner, asked: Mapping[str, Mapping[str, float]], samples: int, seed: int, done: set[str]
) -> Iterator[dict[str, Any]]:
    """One record for each question that is not done, the tasks in turn, so that all come as far."""
    built = {spec: Spec.parse(spec).build(TASKS) for spec in asked}
    drawn = {spec: list(task.samples(examiner.tokenizer, samples, seed)) for spec, task in built.items()}
    for index in range(samples):
        for spec, task in built.items():
            if index >= len(drawn[spec]):
                continue
            sample = drawn[spec][index]
            for protocol, most in asked[spec].items():
                key = f"{_label(spec)}|{protocol}|{sample.id}"
                if key not in done and index < most:
                    found = (
                        continue_text(examiner, sample)
                        if protocol == "text"
                        else ask(examiner, task, sample, sample.questions[0], protocol)
                    )
                    yield {"key": key, "task": _label(spec), "protocol": protocol, **found}


def _label(spec: str) -> str:
    """A task without the path of its file, which differs from machine to machine."""
    parsed = Spec.parse(spec)
    return str(Spec(parsed.name, {k: v for k, v in parsed.options.items() if k != "path"}))


def summarise(found: Sequence[dict[str, Any]], pools: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each task, protocol and pool: its mean, and its difference to the paper's on the same questions."""
    rows = []
    for task, protocol in dict.fromkeys((one["task"], one["protocol"]) for one in found):
        own = [one["scores"] for one in found if (one["task"], one["protocol"]) == (task, protocol)]
        for pool in pools:
            mine, paper = (np.array([scores[name] for scores in own]) for name in (pool, PAPER))
            mean, more = (
                (resampled_interval(mine, np.ones(len(own)), 7), resampled_interval(mine - paper, np.ones(len(own)), 7))
                if protocol == "text"
                else (share_interval(mine), paired_interval(mine - paper))
            )
            rows.append(
                {"task": task, "protocol": protocol, "pool": pool, "n": len(own), **asdict(mean), "more": asdict(more)}
            )
    return rows


def table(rows: Sequence[dict[str, Any]], pools: Sequence[str]) -> str:
    """For people: pools down, tasks across; in brackets the difference to the paper's pool."""
    places = list(dict.fromkeys((row["task"], row["protocol"]) for row in rows))
    heads = ["pool", *(f"{task.replace(':', ' ')}, {protocol}" for task, protocol in places)]
    by_place = {(row["task"], row["protocol"], row["pool"]): row for row in rows}
    body = [[pool, *(_cell(by_place[*place, pool], pool) for place in places)] for pool in pools]
    counts = ", ".join(f"{by_place[*place, FULL]['n']}" for place in places)
    return f"{markdown_table(heads, body)}\nQuestions, by column: {counts}. Text: nats a token, lower is better.\n"


def _cell(row: dict[str, Any], pool: str) -> str:
    text, more = f"{row['mean']:.3f}", row["more"]
    return text if pool in (PAPER, FULL) else f"{text} ({more['mean']:+.3f}, {more['low']:+.3f} to {more['high']:+.3f})"


def main() -> None:
    """Run the samples that have no answers yet, and write the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--text", help="a file of UTF-8 text, to see what the width does to a language")
    parser.add_argument("--pools", default="max 7,none 1,max 13,max 17,max 21,max 31,avg 7,avg 21")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--budget", default="20%")
    parser.add_argument("--window", type=int, default=32)
    parser.add_argument("--samples", type=int, default=60)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--threads", type=int, default=1)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    names = chosen.pools.split(",")
    if PAPER not in names:
        parser.error(f"--pools must name {PAPER!r}, which the others are compared with")
    model: Any = load_model(chosen.model, chosen.dtype)
    pools = [Pool(name) for name in names]
    examiner = Examiner(model, load_tokenizer(chosen.model), pools, Budget.parse(chosen.budget), chosen.window)
    asked = {
        spec.format(length=chosen.length, text=chosen.text): protocols
        for spec, protocols in ASKED.items()
        if chosen.text or "text" not in protocols
    }
    lines = chosen.out.with_suffix(".jsonl")
    found = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    for record in records(examiner, asked, chosen.samples, chosen.seed, {one["key"] for one in found}):
        found.append(record)
        with lines.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
    rows = summarise(found, [*names, FULL])
    machine = describe_machine()
    told = {name: value for name, value in vars(chosen).items() if name not in ("out", "text", "model")}
    about = {"model": Path(chosen.model).name, **told, "hardware": machine.hardware, "software": machine.software}
    chosen.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    chosen.out.with_suffix(".md").write_text(table(rows, [*names, FULL]))


if __name__ == "__main__":
    main()
