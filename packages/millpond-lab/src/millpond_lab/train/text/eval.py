"""Evaluation of a `pond-text` with the full cache on held-out text."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F
from transformers import Cache, PreTrainedModel

from millpond.errors import DataError
from millpond.models.cache_argument import cache_argument, cache_of
from millpond_lab.pond.english_facts import FORMS, Fact, draw_facts
from millpond_lab.train.text.data import Ids, encode_document, read_document
from millpond_lab.train.text.tokenizer import BOS_ID, plain_ids

EVAL_STREAM = "evaluation"  # names of the streams that no training step draws from


@dataclass(frozen=True, slots=True)
class Perplexity:
    """Perplexity of one document, read in separate windows.

    Attributes:
        nats: mean negative log-likelihood per token. bits_per_byte: of the cleaned text. tokens: predicted.
    """

    nats: float
    bits_per_byte: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """Per token of the model's own vocabulary."""
        return math.exp(self.nats)


@dataclass(frozen=True, slots=True)
class Recall:
    """Share of answers that greedy decoding gets right to the last token, of numbers and of words."""

    length: int
    numbers: float
    words: float
    asked: int


@torch.inference_mode()
def perplexity(
    model: PreTrainedModel, tokenizer: Tokenizer, file: Path, length: int, windows: int | None = None
) -> Perplexity:
    """Read `file` in windows of `length` tokens, each behind its own `<bos>`; the first `windows` of them.

    Raises:
        DataError: the file has fewer than `length` tokens.
    """
    ids = encode_document(tokenizer, file)
    rows = _rows(ids, length, windows, file)
    losses = torch.cat([_losses(model, row[None])[0] for row in rows])
    n_bytes = len(tokenizer.decode([int(i) for i in ids[: rows.shape[0] * length]]).encode())
    nats = float(losses.mean())
    return Perplexity(nats, nats * len(losses) / math.log(2) / n_bytes, len(losses))


@torch.inference_mode()
def loss_by_place(
    model: PreTrainedModel, tokenizer: Tokenizer, file: Path, length: int, windows: int, parts: int
) -> list[float]:
    """Mean nats per token in each of `parts` equal parts of the window: whether a long context helps or harms."""
    rows = _rows(encode_document(tokenizer, file), length, windows, file)
    losses = torch.stack([_losses(model, row[None])[0] for row in rows]).mean(0)
    return [float(part.mean()) for part in losses.chunk(parts)]


@torch.inference_mode()
def told_again(
    model: PreTrainedModel, tokenizer: Tokenizer, file: Path, gap: int, *, windows: int, length: int = 64
) -> tuple[float, float]:
    """Mean nats per token of a passage of `length` tokens, and of the same passage again behind `gap` tokens of text.

    The first eight tokens of a passage are not counted, since nothing shows yet that it is a repetition.
    """
    ids = encode_document(tokenizer, file)
    rows = _rows(ids, length + gap, windows, file)
    rows = torch.cat([rows, rows[:, 1 : length + 1]], 1)
    losses = torch.stack([_losses(model, row[None])[0] for row in rows])
    return float(losses[:, 8:length].mean()), float(losses[:, length + gap + 8 :].mean())


def _rows(ids: Ids, length: int, windows: int | None, file: Path) -> Tensor:
    """(n, 1 + length): `<bos>` and text."""
    count = len(ids) // length if windows is None else min(windows, len(ids) // length)
    if not count:
        raise DataError(f"{file} has {len(ids)} tokens, fewer than one window of {length}")
    rows = torch.from_numpy(ids[: count * length].astype(np.int64)).view(count, length)
    return F.pad(rows, (1, 0), value=BOS_ID)


def _losses(model: PreTrainedModel, rows: Tensor) -> Tensor:
    """(B, L) negative log-likelihood in nats of every token behind `<bos>`."""
    rows = rows.to(model.device)
    logits = model(rows[:, :-1], use_cache=False).logits.float()
    return F.cross_entropy(logits.transpose(1, 2), rows[:, 1:], reduction="none")


@torch.inference_mode()
def recall(
    model: PreTrainedModel, tokenizer: Tokenizer, file: Path, length: int, *, contexts: int, facts: int = 6, seed: int
) -> Recall:
    """Hide facts in held-out text and ask for each by itself at its end.

    An answer counts when every token of it is the likeliest one, which is when greedy decoding writes it.
    """
    text = read_document(file)
    right: dict[bool, list[bool]] = {True: [], False: []}
    for index in range(contexts):
        rng = random.Random(f"{EVAL_STREAM} {seed} {length} {index}")
        drawn = draw_facts(rng, facts, form=index % FORMS)
        context = torch.tensor([_context(rng, tokenizer, text, drawn, length)], device=model.device)
        read = cache_of(model(context, use_cache=True, logits_to_keep=1))
        for fact in drawn:
            right[fact.is_number].append(_answers(model, tokenizer, copy.deepcopy(read), fact))
    return Recall(length, _share(right[True]), _share(right[False]), contexts * facts)


def _context(rng: random.Random, tokenizer: Tokenizer, text: str, facts: list[Fact], length: int) -> list[int]:
    """`<bos>` and at most `length` tokens of text in all, with the facts between its sentences, anywhere in it."""
    told = [f" {fact.told}" for fact in facts]
    room = length - 1 - sum(len(plain_ids(tokenizer, sentence)) for sentence in told) - 32  # the question
    start = rng.randrange(len(text) - 8 * length)
    ids = plain_ids(tokenizer, text[start : start + 8 * length])[:room]
    sentences = tokenizer.decode(ids).split(". ")
    for sentence in told:
        place = rng.randrange(len(sentences))
        sentences[place] += "." + sentence.removesuffix(".")
    return [BOS_ID, *plain_ids(tokenizer, ". ".join(sentences) + ".")]


def _answers(model: PreTrainedModel, tokenizer: Tokenizer, read: Cache, fact: Fact) -> bool:
    """Whether the model, having read the context into `read`, gives the answer of `fact`."""
    question, answer = plain_ids(tokenizer, f" {fact.question}"), plain_ids(tokenizer, fact.answer)
    ids = torch.tensor([[*question, *answer]], device=model.device)
    logits = model(ids[:, :-1], **cache_argument(read), logits_to_keep=len(answer)).logits
    return bool((logits.argmax(-1) == ids[:, -len(answer) :]).all())


def _share(right: list[bool]) -> float:
    return sum(right) / len(right) if right else math.nan


#: An entry of a row counts as zero if it is below this share of the row's maximum.
NOTHING = 0.01
SHARES = (0.05, 0.20)
CURVE = 101  # points of the curve of gathered mass


@dataclass(frozen=True)
class AttentionStatistics:
    """Means over windows, each (n_layers, n_heads) unless said otherwise.

    Attributes:
        top: {share of columns: share of all attention that they gathered}, columns by their accumulated attention
            s_j = sum_i A_ij, the heaviest first.
        first: attention to the first token, mean over all later queries.
        sparsity: share of entries of the rows that are below `NOTHING` of the row's maximum.
        curve: (n_layers, n_heads, CURVE) gathered share of the mass over the share of columns, heaviest first.
        even: {share: what that share of columns would gather if every query looked at all tokens alike}.
    """

    top: dict[float, Tensor]
    first: Tensor
    sparsity: Tensor
    curve: Tensor
    even: dict[float, float]
    length: int
    windows: int


@torch.inference_mode()
def measure_attention(model: PreTrainedModel, windows: Sequence[Tensor]) -> AttentionStatistics:
    """Read each window (1, L) by itself and look at all its attention weights.

    The model has to be loaded with `attn_implementation="eager"`.
    """
    curves, firsts, blanks = [], [], []
    for ids in windows:
        layers = model(ids.to(model.device), output_attentions=True, use_cache=False).attentions
        weights = [layer[0].float() for layer in layers]  # (H, L, L) each
        curves.append(torch.stack([gathered(layer.sum(-2)) for layer in weights]))
        firsts.append(torch.stack([layer[:, 1:, 0].mean(-1) for layer in weights]))
        blanks.append(torch.stack([sparsity(layer) for layer in weights]))
    length = windows[0].shape[1]
    curve = torch.stack(curves).mean(0)
    even = gathered(even_columns(length)[None])[0]
    return AttentionStatistics(
        top={share: _at(curve, share) for share in SHARES},
        first=torch.stack(firsts).mean(0),
        sparsity=torch.stack(blanks).mean(0),
        curve=curve,
        even={share: float(_at(even, share)) for share in SHARES},
        length=length,
        windows=len(windows),
    )


def gathered(columns: Tensor) -> Tensor:
    """(..., CURVE) share of the mass in the heaviest 0, 1, ... 100 % of the columns (..., L)."""
    mass = columns.sort(-1, descending=True).values.cumsum(-1)
    mass = torch.cat([torch.zeros_like(mass[..., :1]), mass], -1) / mass[..., -1:]
    places = (torch.linspace(0, 1, CURVE, dtype=torch.float64) * columns.shape[-1]).round().long()
    return mass[..., places.to(mass.device)].cpu()


def sparsity(weights: Tensor) -> Tensor:
    """(H,) share of the entries that a query can see, (H, L, L) causal, below `NOTHING` of the row's maximum."""
    seen = torch.ones(weights.shape[-2:], dtype=torch.bool, device=weights.device).tril()
    small = (weights < NOTHING * weights.amax(-1, keepdim=True)) & seen
    return (small.sum((-2, -1)) / seen.sum()).cpu()


def even_columns(length: int) -> Tensor:
    """(L,) accumulated attention of every column when query i gives each of the i + 1 tokens it sees the same."""
    return (1 / torch.arange(1, length + 1, dtype=torch.float64)).flip(0).cumsum(0).flip(0)


def _at(curve: Tensor, share: float) -> Tensor:
    return curve[..., round(share * (CURVE - 1))]


def spread_windows(
    ids: Sequence[int] | npt.NDArray[np.uint16], bos: int | None, length: int, count: int
) -> list[Tensor]:
    """`count` windows (1, length) spread evenly over a document, each after its own `<bos>` if `bos` is given.

    Raises:
        DataError: the document is too short for them.
    """
    room = length - (bos is not None)
    if len(ids) < room * count:
        raise DataError(f"the document has {len(ids)} tokens, too few for {count} windows of {room}")
    head = [] if bos is None else [bos]
    starts = [i * (len(ids) - room) // max(1, count - 1) for i in range(count)]
    return [torch.tensor([[*head, *map(int, ids[start : start + room])]]) for start in starts]
