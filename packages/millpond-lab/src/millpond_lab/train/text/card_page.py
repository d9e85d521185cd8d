"""Template of the model card of `pond-text`; every number and name in braces comes from the run."""

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
