"""Model card of `pond-text`, written from the run and from measurements: no number is typed by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel

from millpond.errors import DataError
from millpond_lab.train.common.progress import no_bars
from millpond_lab.train.text.data import HELD_OUT, TokenFile, encode_document, held_out_files
from millpond_lab.train.text.eval import (
    AttentionStatistics,
    Recall,
    loss_by_place,
    measure_attention,
    perplexity,
    recall,
    spread_windows,
    told_again,
)
from millpond_lab.train.text.recipe import TextRecipe
from millpond_lab.train.text.tokenizer import BOS_ID
from millpond_lab.train.text.train import TextLogLine, TextRun

CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
language: en
tags: [kv-cache, millpond]
---
# {model}

A Llama of {parameters:,} parameters, trained {from_what} on public English text with recall tasks mixed in. It is
here so that perplexity, attention sinks and heavy hitters can be measured on text, without a download. It writes
sentences and no sense; it is a measuring instrument.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer
from millpond.models.load import resolve

folder = resolve("{model}")
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
inputs = tokenizer("It was a dark night, and", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=20)[0]))
```

{layers} layers, hidden size {hidden}, {heads} query and {kv_heads} KV heads of {head_dim}, feed-forward {ffn}, RoPE
(theta {theta:,.0f}), tied embeddings, {vocab:,} byte-level BPE tokens grown on the training documents (figures stand
alone), context {context:,}. `<bos>` opened every window of the training.

## Perplexity of held-out documents
Full cache, {dtype} weights in float32 arithmetic, separate windows behind `<bos>` each, at most {most:,} tokens of a
document. Perplexity is per token of this vocabulary; bits per byte compare across vocabularies. The text is cleaned
as in training (line breaks, empty lines).

| document | window | tokens | perplexity | bits per byte |
|---|---|---|---|---|
{perplexity}

Mean negative log-likelihood (nats) along windows of {long:,} tokens of `{place_document}`, in parts of {part:,} tokens:
{places}.

## Recall in text
{facts} facts hidden in held-out text (`{recall_document}`), each asked for by itself at the end, exact match of greedy
decoding, {asked} questions a row, seed {recall_seed}; names, numbers and places are drawn from a stream of their own.

| context tokens | numbers (3 to 5 figures) | words |
|---|---|---|
{recall}

A passage of 64 tokens of `{recall_document}` and the same passage again further on, mean nats per token:

| tokens between | first | again |
|---|---|---|
{again}

## Where attention goes
{attention_windows} windows of {attention_length:,} tokens of `{place_document}`, means over heads and layers: the first
token takes {first:.0%} of every later query's attention; the heaviest 5 % of the columns gather {top5:.0%} of all
attention and the heaviest 20 % gather {top20:.0%} (even attention: {even5:.0%} and {even20:.0%}); {sparsity:.0%} of the
entries are below 1 % of their row's maximum. Per layer: `millpond train heavy-hitters`; of `pond-text`:
`docs/explanation/heavy-hitters.md`.

## Data
{documents} documents, {corpus:,} tokens:
{names}.

Never read in training:
{held_out}.

Public domain texts (Project Gutenberg, State of the Union addresses, Grimm), the Rust book (MIT / Apache-2.0) and C++
documentation (CC-BY 4.0, Microsoft).

Some windows carry tasks: facts hidden in the text and asked for later, passages told again, and copying drills
(passages of text, or of its tokens in random order, that come again at once or a little later), which grow the
induction heads that recall needs. The loss is taken on all tokens.

## Training
{history}`millpond train text --preset {preset} --seed {seed} --tokens {planned}{options}`: {steps:,} steps,
{tokens:,} tokens ({epochs:.2f} of the corpus) in {minutes:.0f} minutes of training on {hardware}. Muon
(learning rate {muon:g}, scaled to AdamW's update size) for the matrices, AdamW ({adamw:g}, betas {betas}) for
embeddings and norms, weight decay {decay:g}, clip {clip:g}, {per_step:,} tokens a step, {warmup} steps of warm-up,
level until {level:.0%} of the tokens, then in a straight line to zero (the last step had {last_rate:.4f} of the highest
rate); {precision}. torch {torch}, transformers {transformers}.

| from share of the tokens | window | with facts | with passages told again | drills |
|---|---|---|---|---|
{stages}

| step | tokens | minute | window | rate | loss (nats, with the tasks) |
|---|---|---|---|---|---|
{curve}
"""


LENGTHS = (512, 2048)
WINDOWS = 16  # of the longest; shorter ones cover the same text
RECALL_LENGTHS = (512, 1024, 2048, 4096)
RECALL_CONTEXTS, RECALL_FACTS, RECALL_SEED = 24, 6, 1001
PARTS, PLACE_WINDOWS = 8, 16
ATTENTION_LENGTH, ATTENTION_WINDOWS = 1024, 4
AGAIN_GAPS, AGAIN_WINDOWS = (64, 256, 1024, 3072), 32
CURVE_ROWS = 12
_PRECISIONS = {"bf16": "bf16 autocast over float32 weights", "fp32": "float32 arithmetic"}


def write_card(run: TextRun, text: TokenFile, folder: Path, data: Path, *, hardware: str) -> str:
    """Measure the model saved in `folder`, write its `MODEL_CARD.md`, and return the text.

    `hardware` says in words what the run was trained on.

    Raises:
        DataError: none of the held-out documents lies in `data`.
    """
    files = held_out_files(data)
    if not files:
        raise DataError(f"none of the held-out documents lies in {data}: {', '.join(HELD_OUT)}")
    with no_bars():
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, trust_remote_code=False
        )
    model.to(run.model.device)  # type: ignore[arg-type]
    card = CARD.format(
        **_shape(run, text),
        **_training(run),
        **_data(run, text),
        **_measured(model.train(False), text.tokenizer, files),
        hardware=hardware,
    )
    (folder / "MODEL_CARD.md").write_text(card, encoding="utf-8")
    return card


def _measured(model: PreTrainedModel, tokenizer: Tokenizer, files: Sequence[Path]) -> dict[str, object]:
    """Everything that is measured on held-out text; the first document serves where one is enough."""
    longest, first = model.config.max_position_embeddings, files[0]
    recalls = [
        recall(model, tokenizer, first, n, contexts=RECALL_CONTEXTS, facts=RECALL_FACTS, seed=RECALL_SEED)
        for n in RECALL_LENGTHS
        if n <= longest
    ]
    places = loss_by_place(model, tokenizer, first, longest, windows=PLACE_WINDOWS, parts=PARTS)
    rows = [_perplexity_row(model, tokenizer, file, n) for file in files for n in LENGTHS]
    again = [(gap, *told_again(model, tokenizer, first, gap, windows=AGAIN_WINDOWS)) for gap in AGAIN_GAPS]
    model.set_attn_implementation("eager")
    windows = spread_windows(encode_document(tokenizer, first), BOS_ID, ATTENTION_LENGTH, ATTENTION_WINDOWS)
    attention = measure_attention(model, windows)
    return {
        **_attention(attention),
        "perplexity": "\n".join(rows),
        "most": max(LENGTHS) * WINDOWS,
        "place_document": first.name,
        "recall_document": first.name,
        "long": longest,
        "part": longest // PARTS,
        "places": ", ".join(f"{nats:.3f}" for nats in places),
        "again": "\n".join(f"| {gap:,} | {once:.3f} | {twice:.3f} |" for gap, once, twice in again),
        "recall": "\n".join(map(recall_row, recalls)),
        "asked": RECALL_CONTEXTS * RECALL_FACTS,
        "facts": RECALL_FACTS,
        "recall_seed": RECALL_SEED,
    }


def _perplexity_row(model: PreTrainedModel, tokenizer: Tokenizer, file: Path, length: int) -> str:
    result = perplexity(model, tokenizer, file, length, windows=max(LENGTHS) * WINDOWS // length)
    return f"| {file.name} | {length:,} | {result.tokens:,} | {result.perplexity:.2f} | {result.bits_per_byte:.3f} |"


def recall_row(result: Recall) -> str:
    """One length of the recall table."""
    return f"| {result.length:,} | {result.numbers:.3f} | {result.words:.3f} |"


def _attention(found: AttentionStatistics) -> dict[str, object]:
    top5, top20 = (float(share.mean()) for share in found.top.values())
    even5, even20 = found.even.values()
    return {
        "attention_windows": found.windows,
        "attention_length": found.length,
        "first": float(found.first.mean()),
        "top5": top5,
        "top20": top20,
        "even5": even5,
        "even20": even20,
        "sparsity": float(found.sparsity.mean()),
    }


def _shape(run: TextRun, text: TokenFile) -> dict[str, object]:
    recipe = run.recipe
    return {
        "parameters": run.model.num_parameters(),
        "layers": recipe.layers,
        "hidden": recipe.hidden,
        "heads": recipe.heads,
        "kv_heads": recipe.kv_heads,
        "head_dim": recipe.head_dim,
        "ffn": recipe.ffn,
        "theta": recipe.rope_theta,
        "vocab": text.tokenizer.get_vocab_size(),
        "context": recipe.context,
        "dtype": "bfloat16",
    }


def _data(run: TextRun, text: TokenFile) -> dict[str, object]:
    return {
        "documents": len(text.documents),
        "corpus": len(text),
        "names": ", ".join(name.removesuffix(".txt") for name in text.documents),
        "held_out": ", ".join(name.removesuffix(".txt") for name in HELD_OUT),
        "epochs": run.tokens / len(text),
    }


def _training(run: TextRun) -> dict[str, object]:
    recipe = run.recipe
    options = " --precision fp32" if run.precision == "fp32" else ""
    return {
        "history": f"### First term\n{run.history.strip()}\n\n### Second term, from there\n" if run.history else "",
        "options": f"{options} --start FIRST_TERM" if run.history else options,
        "precision": _PRECISIONS[run.precision],
        "stages": stage_table(recipe),
        "model": recipe.model,
        "from_what": "in two terms" if run.history else "from nothing",
        "preset": recipe.name,
        "seed": run.seed,
        "planned": run.planned,
        "steps": run.step,
        "tokens": run.tokens,
        "minutes": run.time_s / 60,
        "muon": recipe.muon_lr,
        "adamw": recipe.adamw_lr,
        "betas": " and ".join(map(str, recipe.betas)),
        "decay": recipe.weight_decay,
        "clip": recipe.clip,
        "per_step": recipe.tokens_per_step,
        "warmup": recipe.warmup_steps,
        "level": recipe.decay_from,
        "last_rate": run.log[-1].rate,
        "curve": curve_table(run.log),
        "torch": torch.__version__.split("+")[0],
        "transformers": transformers.__version__,
    }


def stage_table(recipe: TextRecipe) -> str:
    """One row for every share of the run at which windows or tasks change."""
    marks = sorted({begin for begin, _ in (*recipe.lengths, *recipe.tasks)})
    rows = [(mark, recipe.length_at(mark), *recipe.tasks_at(mark)) for mark in marks]
    return "\n".join(f"| {m:.1%} | {n:,} | {f:.0%} | {c:.0%} | {d:.0%} |" for m, n, f, c, d in rows)


def curve_table(log: Sequence[TextLogLine]) -> str:
    """Some lines of the learning curve, evenly spread, the last one among them."""
    chosen = sorted({round(i * (len(log) - 1) / (CURVE_ROWS - 1)) for i in range(CURVE_ROWS)})
    return "\n".join(
        f"| {line.step:,} | {line.tokens:,} | {line.time_s / 60:.1f} | {line.length:,} | {line.rate:.3f} "
        f"| {line.loss:.3f} |"
        for line in (log[i] for i in chosen)
    )
