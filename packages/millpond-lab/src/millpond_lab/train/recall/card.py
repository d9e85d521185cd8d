"""Model card of `pond-recall`, written from the run itself: no number is typed by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import transformers
from transformers import DynamicCache, PreTrainedModel

from millpond.models.cache_argument import cache_argument
from millpond_lab.pond.facts import FAMILIES, TASKS, FactQuestion, Paper, draw_paper, spell
from millpond_lab.train.recall.model import MAX_POSITIONS
from millpond_lab.train.recall.rows import LENGTHS, PASS_LEAST, PASS_MEAN, PATIENCE, POLISH, WARM_UP_STAGES
from millpond_lab.train.recall.train import RecallLogLine, RecallRun, Recipe

MOST_QUESTIONS = 8  # of a paper
QUESTIONS = {
    "frequent_words": 1,
    "common_words": 1,
    "niah_single": 1,
    "niah_multiquery": 4,
    "tracking": 4,
    "copy": 4,
    "niah_multikey": 4,
}


def papers_of(task: str, questions: int) -> int:
    """Number of papers of a task with at least this many questions."""
    return -(-questions // QUESTIONS.get(task, MOST_QUESTIONS))


@torch.inference_mode()
def evaluate_task(model: PreTrainedModel, task: str, *, length: int, papers: int = 16, seed: int = 0) -> float:
    """Share of right words over held-out papers, each answer decoded greedily.

    Args:
        model: any causal model over the vocabulary of `pond-recall`, on any device.
        task: of `millpond_lab.pond.facts.TASKS`.
        length: tokens of a paper. papers: how many. seed: names them; the same for every model to be compared.
    """
    knobs = {"questions": QUESTIONS.get(task, MOST_QUESTIONS)}
    shares = [share for i in range(papers) for share in _answer(model, draw_paper(task, seed, i, length, knobs))]
    return sum(shares) / len(shares)


def _answer(model: PreTrainedModel, paper: Paper) -> list[float]:
    """The share of right words of each question of one paper."""
    cache = DynamicCache(config=model.config)
    model(torch.from_numpy(paper.text)[None].to(model.device), **cache_argument(cache), logits_to_keep=1)
    seen = cache.get_seq_length()
    shares = []
    for asked in paper.asked:
        shares.append(_share(model, cache, asked))
        cache.crop(seen - cache.get_seq_length())
    return shares


def _share(model: PreTrainedModel, cache: DynamicCache, asked: FactQuestion) -> float:
    """Decode one answer; the share of the words that count which stand where they should."""
    ids, answer, right = torch.tensor([asked.question]), list[int](), 0
    for place, counts in enumerate(asked.scored[:-1]):
        logits = model(ids.to(model.device), **cache_argument(cache), logits_to_keep=1).logits[0, -1]
        ids = logits.argmax()[None, None]
        right += counts and int(ids) in asked.accepted(place, answer)
        answer.append(int(ids))
    return right / len(asked.references)


EXAM_LENGTHS = (512, 2048, 4096, 8192)
ASKED = 128  # questions of a cell; a text of 8,192 tokens takes a CPU some seconds
SEED = 1001

CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
tags: [kv-cache, associative-recall, millpond]
---
# pond-recall

A Llama of {parameters:,} parameters that answers questions about what a long text of words states: things told about
names (once, or anew), several at once, chains of towns, passages, and which animals and plants come up most. It shows
in seconds, without a GPU, what a method that compresses the KV cache remembers and what it forgets. It knows no
language; claims about text need a text model.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer
from millpond_lab.pond.facts import draw_paper, spell

tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
paper = draw_paper("recall", seed=1, index=0, length=256)
asked = paper.asked[0]
inputs = tokenizer(spell(paper.text[1:]) + " " + spell(asked.question), return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs)[0]), "|", spell(asked.answer))
```

| task | a question | its answer |
|---|---|---|
{examples}

## Right words with the full cache
Greedy decoding, each question alone after its text, {dtype}; {asked} questions a cell about held-out papers
(seed {exam_seed}), 1 to 8 about each. The texts come from streams that training does not read.

| task | {lengths} |
|---|{rule}|
{table}

## Data
Made on the fly by `millpond_lab.train.recall.rows`: `<bos>`, filler (uniform, Zipf or a refrain) with facts
of one to four kinds at random places, then questions; the loss is taken on the answers only: where values may come in
any order, on all that are left together. In the first stages every other batch repeats random text after a random gap,
which grows the induction head. From stage {jump_from} on every other row jumps over positions between filler words, up
to {positions:,} in all, so that short rows teach long distances.

## Training
`millpond train recall --seed {seed}`: {steps:,} steps of about {tokens_per_step:,} tokens in {minutes:.0f} minutes on
{hardware}. Muon ({muon_lr:g}) on hidden matrices, AdamW ({adamw_lr:g}, betas {betas}) on the rest, weight decay
{weight_decay}, clip {clip}, {warmup} steps of warm-up, {precision}. The next stage opens when the running accuracy is
{pass_mean[0]} on average and {pass_least[0]} in the worst family; from stage {jump_from} on at {pass_mean[1]} and
{pass_least[1]}, or after {patience} steps. Then {polish:,} steps over texts of {shortest:,} to {longest:,} words while
the learning rate falls to zero. torch {torch}, transformers {transformers}.{note}

| stage | words of a text | first logged step | minute | {families} |
|---|---|---|---|{curve_rule}|
{curve}
"""


def write_card(run: RecallRun, folder: Path, *, hardware: str, recipe: Recipe | None = None, note: str = "") -> str:
    """Measure `run.model`, write `MODEL_CARD.md` into `folder`, and return its text.

    Args:
        hardware: in words, what the run was trained on.
        recipe: of the run; None: that of the package.
        note: what else must be known of how the run went.
    """
    run.model.train(False)
    text = CARD.format(
        **_training(run, recipe or Recipe()),
        parameters=run.model.num_parameters(),
        dtype=str(run.model.dtype).removeprefix("torch."),
        examples="\n".join(map(_example, TASKS)),
        asked=ASKED,
        exam_seed=SEED,
        lengths=" | ".join(f"{length:,}" for length in EXAM_LENGTHS),
        rule="---|" * (len(EXAM_LENGTHS) - 1) + "---",
        table=exam_table(examine(run)),
        hardware=hardware,
        note=f"\n\n{note}" if note else "",
    )
    (folder / "MODEL_CARD.md").write_text(text, encoding="utf-8")
    return text


def examine(run: RecallRun) -> dict[str, list[float]]:
    """The share of right words per task, one number per length."""
    return {
        task: [
            evaluate_task(run.model, task, length=length, papers=papers_of(task, ASKED), seed=SEED)
            for length in EXAM_LENGTHS
        ]
        for task in TASKS
    }


def exam_table(shares: Mapping[str, Sequence[float]]) -> str:
    """Rows of the table of right words."""
    return "\n".join(f"| {task} | {' | '.join(f'{share:.3f}' for share in row)} |" for task, row in shares.items())


def curve_table(log: Sequence[RecallLogLine]) -> str:
    """One row per stage of the curriculum, from the learning curve: its last running accuracies."""
    rows = []
    for stage in sorted({line.stage for line in log}):
        lines = [line for line in log if line.stage == stage]
        name = f"{stage + 1} | {LENGTHS[stage]:,}" if stage < len(LENGTHS) else "polish | all"
        right = " | ".join(f"{share:.2f}" for share in lines[-1].accuracy)
        rows.append(f"| {name} | {lines[0].step:,} | {lines[0].time_s / 60:.1f} | {right} |")
    return "\n".join(rows)


def _example(task: str) -> str:
    """A question of a task, for the card."""
    asked = draw_paper(task, 1, 0, 512, {"questions": QUESTIONS.get(task, 1)}).asked[0]
    return f"| {task} | `{spell(asked.question)}` | {spell(asked.answer)} |"


def _training(run: RecallRun, recipe: Recipe) -> dict[str, object]:
    """What the card says about the training."""
    return {
        "seed": run.seed,
        "steps": run.step,
        "minutes": run.time_s / 60,
        "tokens_per_step": recipe.tokens_per_step,
        "muon_lr": recipe.muon_lr,
        "adamw_lr": recipe.adamw_lr,
        "betas": " and ".join(map(str, recipe.betas)),
        "weight_decay": recipe.weight_decay,
        "clip": recipe.clip,
        "warmup": recipe.warmup_steps,
        "precision": "bf16 autocast over float32 weights" if recipe.bf16 else "float32",
        "jump_from": WARM_UP_STAGES + 1,
        "positions": MAX_POSITIONS,
        "shortest": min(POLISH),
        "longest": max(POLISH),
        "pass_mean": PASS_MEAN,
        "pass_least": PASS_LEAST,
        "patience": PATIENCE,
        "polish": run.curriculum.polished,
        "torch": torch.__version__.split("+")[0],
        "transformers": transformers.__version__,
        "families": " | ".join(FAMILIES),
        "curve_rule": "---|" * (len(FAMILIES) - 1) + "---",
        "curve": curve_table(run.log),
    }
