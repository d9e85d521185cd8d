"""Why H2O is weak on single facts of pond-recall: one layer looks the fact up, and there its sum is too small to stay.

For every layer, in the KV head that attends to the fact most: how much of what is attended to after the prompt goes
to it, the share of the entries that may leave whose sum of attention is smaller, and how often H2O keeps it. Then the
same questions with the fact forced to stay in one layer, in all, and in all but the one that looks it up. Scores are
of decoded answers, differences are paired. Writes FILE, and a table next to it.

  benchmarks/quality/fact_layer.py --out benchmarks/results/fact-layer.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from millpond.hf.cache import MillpondCache
from millpond.hf.compress import compress
from millpond.kernels.decode_rules import Evict, Signal
from millpond.methods import METHODS
from millpond.models.load import load_model, load_tokenizer
from millpond.policy.policy import Policy
from millpond.policy.scores.attention import Queries
from millpond.policy.view import View
from millpond_lab.bench.common.machine import describe_machine
from millpond_lab.evals.candidates.candidate import Compressed
from millpond_lab.evals.candidates.oracle import later_attention, run_ahead
from millpond_lab.evals.decoding.batch import EncodedPrompt, PromptBatch, batches, encode
from millpond_lab.evals.decoding.record import Protocol, Record
from millpond_lab.evals.harness.evaluator import Evaluator
from millpond_lab.evals.harness.summary import difference, share_interval
from millpond_lab.evals.report.leaderboard import markdown_table
from millpond_lab.evals.spec import Spec
from millpond_lab.evals.task import TASKS

MODEL, METHOD, CODEC = "pond-recall", "h2o", "auto"
TASK = "recall:length=1024"
#: Protocols and budgets of the questions.
SETTINGS: tuple[tuple[Protocol, str], ...] = (("aware", "20%"), ("agnostic", "20%"))


@dataclass
class Seen:
    """What is seen of the facts when prompts are planned, a number for each prompt and KV head of a layer.

    Attributes:
        below: of the entries that may leave, the share with a smaller sum than the fact's. kept: 1 where it stays.
    """

    below: dict[int, list[float]] = field(default_factory=dict)
    kept: dict[int, list[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class SumsAndFacts:
    """H2O's sums of attention; in some layers the facts stay whatever their sum.

    Attributes:
        prompts: tokens and fact of each sequence.
    """

    prompts: Sequence[tuple[int, int]]
    layers: frozenset[int]
    seen: Seen
    queries: Queries = "all"
    window: int = 0
    signal: Signal = Signal.SUM
    evict: Evict | None = None  # planned at each step, by `score`

    def score(self, view: View, seed: int) -> Tensor:
        """(H, N) sums, infinity for the fact in the layers where it stays."""
        assert view.signal is not None
        length, place = self.prompts[view.sequence]
        fact = view.positions == place
        if view.seen == length and view.pinned is not None:
            self._note(view.layer, view.signal, fact, ~view.pinned & (view.positions >= 0), view.budget)
        return view.signal.masked_fill(fact, torch.inf) if view.layer in self.layers else view.signal

    def _note(self, layer: int, sums: Tensor, fact: Tensor, free: Tensor, budget: int) -> None:
        for own, here, may_leave in zip(sums, fact, free, strict=True):
            rank = int((own[may_leave] > own[here]).sum())
            stay = budget - int((~may_leave).sum())
            self.seen.below.setdefault(layer, []).append(1 - rank / int(may_leave.sum()))
            self.seen.kept.setdefault(layer, []).append(float(rank < stay))


@dataclass(frozen=True)
class Forced(Compressed):
    """A candidate: H2O, with the facts of the questions always kept in some layers."""

    layers: frozenset[int] = frozenset()
    seen: Seen = field(default_factory=Seen)

    def open(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch: PromptBatch, budget: str, codec: str
    ) -> MillpondCache:
        policy = METHODS.get(METHOD)()
        assert isinstance(policy, Policy)
        prompts = [(len(prompt.opening), fact_of(prompt, tokenizer)) for prompt in batch.prompts]
        return compress(model, replace(policy, score=SumsAndFacts(prompts, self.layers, self.seen)), budget, codec)


def fact_of(prompt: EncodedPrompt, tokenizer: PreTrainedTokenizerBase) -> int:
    """The position of the answer's word, after its name in the text."""
    (asked,) = prompt.asked
    name = asked.question.text.split()[1]
    pair = tokenizer.convert_tokens_to_ids([name, *asked.question.references])
    tokens = list(prompt.opening)
    return next(at for at in range(1, len(tokens)) if tokens[at - 1 : at + 1] == pair)


def later_share(model: PreTrainedModel, tokenizer: Any, batch: PromptBatch) -> Tensor:
    """(prompts, L, H): of the attention behind the openings, the share that the full cache pays to the fact."""
    courses = run_ahead(model, tokenizer, batch, CODEC, every_query=False)
    rows = []
    for index, prompt in enumerate(batch.prompts):
        own = [course for course in courses if course.prompt == index]
        moment, fact = len(prompt.opening), fact_of(prompt, tokenizer)
        paid = [later_attention(own, layer, every_query=False)[moment] for layer in range(len(own[0].traffic))]
        rows.append(torch.stack([each[:, fact] / each.sum(1) for each in paid]))
    return torch.stack(rows)


@dataclass
class Study:
    """One protocol and budget: every way to force, on the same questions."""

    model: Any
    tokenizer: Any
    protocol: Protocol
    budget: str
    made: list[PromptBatch]

    def records(self, layers: frozenset[int], seen: Seen) -> list[Record]:
        """The answers with the facts forced to stay in `layers`."""
        examiner = Evaluator(
            ",".join(map(str, sorted(layers))),
            self.model,
            self.tokenizer,
            Spec.parse(TASK).build(TASKS),
            Forced(METHOD, layers=layers, seen=seen),
            self.budget,
            CODEC,
            limit=None,
        )
        return [record for batch in self.made for record in examiner.examine(batch)]

    def rows(self, seed: int) -> dict[str, Any]:
        """What is said of each layer, and of each way to force."""
        n_layers, seen = self.model.config.num_hidden_layers, Seen()
        plain = self.records(frozenset(), seen)
        later = torch.cat([later_share(self.model, self.tokenizer, batch) for batch in self.made])
        most, head = later.max(2)
        everywhere, looks = frozenset(range(n_layers)), int(most.mean(0).argmax())
        ways = {"none": frozenset[int]()} | {f"layer {layer}": frozenset({layer}) for layer in range(n_layers)}
        ways |= {f"all but layer {looks}": everywhere - {looks}, "all layers": everywhere}
        forced = []
        for name, layers in ways.items():
            records = self.records(layers, Seen()) if layers else plain
            score = share_interval(np.array([record.score for record in records]))
            more = difference({TASK: records}, {TASK: plain}, seed)
            forced.append({"stays in": name, "n": len(records), **asdict(score), "more": asdict(more)})
        layers_seen = []
        for layer in range(n_layers):
            below, kept = (
                torch.tensor(values[layer]).view(len(later), -1).gather(1, head[:, layer, None])[:, 0].numpy()
                for values in (seen.below, seen.kept)
            )
            layers_seen.append(
                {
                    "layer": layer,
                    "later attention": float(most[:, layer].mean()),
                    "below": [float(x) for x in np.percentile(below, [25, 50, 75])],
                    "above median": asdict(share_interval((below > 0.5).astype(float))),
                    "kept": asdict(share_interval(kept.astype(float))),
                }
            )
        return {"protocol": self.protocol, "budget": self.budget, "layers": layers_seen, "forced": forced}


def table(found: Sequence[dict[str, Any]]) -> str:
    """For people."""
    parts = []
    for one in found:
        parts.append(f"## {one['protocol']}, {one['budget']}\n")
        body = [
            [
                str(row["layer"]),
                f"{row['later attention']:.1%}",
                "{1:.0%} ({0:.0%} to {2:.0%})".format(*row["below"]),
                f"{row['kept']['mean']:.2f} ({row['kept']['low']:.2f} to {row['kept']['high']:.2f})",
            ]
            for row in one["layers"]
        ]
        smaller = "entries with a smaller sum, median (quartiles)"
        heads = ["layer", "later attention to the fact", smaller, "H2O keeps it"]
        parts.append(markdown_table(heads, body))
        body = [
            [
                row["stays in"],
                f"{row['mean']:.3f} ({row['low']:.3f} to {row['high']:.3f})",
                f"{row['more']['mean']:+.3f} ({row['more']['low']:+.3f} to {row['more']['high']:+.3f})",
                str(row["n"]),
            ]
            for row in one["forced"]
        ]
        parts.append(markdown_table(["the fact is forced to stay in", "recall", "paired, to none", "n"], body))
    return "\n".join(parts)


def main() -> None:
    """Ask everything, and write it down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--samples", type=int, default=50)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--batch-size", type=int, default=10)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    model: Any = load_model(MODEL)
    tokenizer, task = load_tokenizer(MODEL), Spec.parse(TASK).build(TASKS)
    samples = list(task.samples(tokenizer, chosen.samples, chosen.seed))
    found = []
    for protocol, budget in SETTINGS:
        prompts = [p for sample in samples for p in encode(sample, tokenizer, "generate", protocol)]
        made = list(batches(prompts, "generate", protocol, chosen.batch_size))
        found.append(Study(model, tokenizer, protocol, budget, made).rows(chosen.seed))
        keep(chosen.out, chosen.samples, chosen.seed, found)
        print(table(found[-1:]), flush=True)


def keep(out: Path, samples: int, seed: int, found: Sequence[dict[str, Any]]) -> None:
    """Write what was found so far, with the machine, and the table next to it."""
    machine = describe_machine()
    about = {"model": MODEL, "task": TASK, "method": METHOD, "samples": samples, "seed": seed}
    about |= {"hardware": machine.hardware, "software": machine.software}
    out.write_text(json.dumps({**about, "found": found}, indent=1) + "\n")
    note = (
        f"`{MODEL}`, {TASK}, {METHOD}, seed {seed}, {samples} questions. Scores have Wilson's intervals, paired "
        "differences Bonett and Price's.\n"
    )
    out.with_suffix(".md").write_text(f"{note}\n{table(found)}")


if __name__ == "__main__":
    main()
