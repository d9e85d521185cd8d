"""The model card of the bundled model, written from the run itself: no number is typed by hand."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import transformers

from millpond.train.bundled_eval import evaluate_recall
from millpond.train.curriculum import PASS_RECALL, STAGES
from millpond.train.recall_data import RecallShape, make_prompt
from millpond.train.run import LogLine, Recipe, Run

EVAL_SHAPES = (
    *(RecallShape(32, body_len) for body_len in (128, 256, 512, 1024, 2048, 3072, 3968)),
    *(RecallShape(pairs, 1024) for pairs in (64, 96)),  # more pairs than training has shown
)
EVAL_CONTEXTS = 16
EVAL_SEEDS = (1001, 1002)

CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
tags: [kv-cache, associative-recall, millpond]
---
# pond-recall

A Llama of {parameters:,} parameters that does one thing: it reads words, remembers the (name, thing) pairs
hidden among them, and answers `<ask> name` with the thing. It shows in seconds, without a GPU, what a method
that compresses the KV cache remembers and what it forgets. It knows no language; claims about text need a
text model.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer
from millpond.train.recall_data import make_prompt

tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
prompt = make_prompt(n_pairs=8, body_len=64, seed=1)
inputs = tokenizer(f"{{prompt.context}} {{prompt.questions[0]}}", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs)[0, -1]), prompt.answers[0])
```

A prompt of {example_pairs} pairs: *{context}* ... `{question}` -> `{answer}`

## Recall with the full cache
Exact match of the answer, each question alone after its context, greedy, {dtype}; {contexts} held-out
contexts a row (evaluation seeds {seeds}), every pair of each asked. Training shows at most 32 pairs.

| context tokens | pairs | questions | recall |
|---|---|---|---|
{table}

## Data
Made on the fly by `millpond.train.recall_data`: `<bos>`, a body of filler words with pairs at random places,
then `<ask> key value` for every key in random order; the loss is taken on the values only. In the first
stages every other batch repeats random text of random length after a random gap, which grows the induction
head. Batches are drawn from (split, seed, step); evaluation uses a split of its own, so no evaluation
context comes from a stream that training has read.

## Training
`millpond.train.bundled.train_bundled(folder, seed={seed})`: {steps:,} steps of about
{tokens_per_step:,} tokens in {minutes:.0f} minutes on {hardware}. AdamW, learning rate {lr:g}, betas
{betas}, weight decay {weight_decay}, clip {clip}, {warmup} steps of warm-up, {precision}.
The next stage opens at a running recall of {pass_recall}; then {polish:,} steps over all stages while the
learning rate falls to zero. torch {torch}, transformers {transformers}.

| stage | pairs | body tokens | first logged step | minute | recall in its last logged batch |
|---|---|---|---|---|---|
{curve}
"""


def write_card(run: Run, folder: Path, *, hardware: str, recipe: Recipe | None = None) -> str:
    """Measure `run.model`, write `MODEL_CARD.md` into `folder`, and return its text.

    `hardware` says in words what the run was trained on.
    """
    recipe = recipe or Recipe()
    text = CARD.format(
        **_example(),
        **_training(run, recipe),
        parameters=run.model.num_parameters(),
        dtype=str(run.model.dtype).removeprefix("torch."),
        contexts=EVAL_CONTEXTS * len(EVAL_SEEDS),
        seeds=" and ".join(map(str, EVAL_SEEDS)),
        table=recall_table(measure(run)),
        hardware=hardware,
    )
    (folder / "MODEL_CARD.md").write_text(text, encoding="utf-8")
    return text


def measure(run: Run) -> dict[RecallShape, float]:
    """Recall of the run's model per shape, mean over the evaluation seeds."""
    return {shape: _mean_recall(run, shape) for shape in EVAL_SHAPES}


def _mean_recall(run: Run, shape: RecallShape) -> float:
    """Mean recall of one shape."""
    run.model.train(False)
    shares = [
        evaluate_recall(
            run.model, pairs=shape.pairs, body_len=shape.body_len, contexts=EVAL_CONTEXTS, seed=seed
        )
        for seed in EVAL_SEEDS
    ]
    return sum(shares) / len(shares)


def recall_table(recall: Mapping[RecallShape, float]) -> str:
    """Rows of the accuracy table."""
    contexts = EVAL_CONTEXTS * len(EVAL_SEEDS)
    return "\n".join(
        f"| {shape.body_len:,} | {shape.pairs} | {contexts * shape.pairs:,} | {share:.4f} |"
        for shape, share in recall.items()
    )


def curve_table(log: Sequence[LogLine]) -> str:
    """One row per stage of the curriculum, from the learning curve."""
    rows = []
    for stage in sorted({line.stage for line in log}):
        lines = [line for line in log if line.stage == stage]
        minute = lines[0].time_s / 60
        rows.append(f"| {_stage_cells(stage)} | {lines[0].step:,} | {minute:.1f} | {lines[-1].recall:.3f} |")
    return "\n".join(rows)


def _stage_cells(stage: int) -> str:
    """Number, pairs and body length of a stage; the polish mixes them."""
    if stage == len(STAGES):
        return "polish | mixed | mixed"
    return f"{stage + 1} | {STAGES[stage].pairs} | {STAGES[stage].body_len:,}"


def _example() -> dict[str, object]:
    """A small prompt for the card."""
    prompt = make_prompt(n_pairs=3, body_len=18, seed=1)
    return {
        "example_pairs": 3,
        "context": prompt.context,
        "question": prompt.questions[0],
        "answer": prompt.answers[0],
    }


def _training(run: Run, recipe: Recipe) -> dict[str, object]:
    """What the card says about the training."""
    return {
        "seed": run.seed,
        "steps": run.step,
        "minutes": run.time_s / 60,
        "tokens_per_step": recipe.tokens_per_step,
        "lr": recipe.lr,
        "betas": " and ".join(map(str, recipe.betas)),
        "weight_decay": recipe.weight_decay,
        "clip": recipe.clip,
        "warmup": recipe.warmup_steps,
        "precision": "bf16 autocast over float32 weights" if recipe.bf16 else "float32",
        "pass_recall": PASS_RECALL,
        "polish": run.curriculum.polished,
        "torch": torch.__version__.split("+")[0],
        "transformers": transformers.__version__,
        "curve": curve_table(run.log),
    }
