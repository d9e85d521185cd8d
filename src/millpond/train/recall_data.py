"""Recall data, made on the fly: pairs hidden in filler, then every key asked for its value.

A row reads `<bos> body <ask> key value <ask> key value ...`: the body is filler with `pairs` (key, value)
pairs at random places; afterwards every key is asked once, in random order. Only the values are supervised.
Everything is a pure function of (split, seed, index): training can resume anywhere, and the "eval" split
shares no random stream with the "train" split. This module knows nothing of models or tokenizers.
"""

from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from millpond.errors import OptionError
from millpond.train.words import ASK_ID, BOS_ID, FILLER_IDS, KEY_IDS, VALUE_IDS, VOCABULARY

Split = Literal["train", "eval"]

QUESTION_TOKENS = 3  # <ask> key value
COPY_LENGTHS = (5, 60)  # tokens in the text that a warm-up row repeats
COPY_GAPS = (0, 20)  # tokens between the text and its repetition


class Batch(NamedTuple):
    """Rows for next-token prediction, with the places where the loss is taken."""

    tokens: Tensor  # (B, L) int64
    supervised: Tensor  # (B, L) bool: True where the *next* token is a target

    @property
    def targets(self) -> Tensor:
        """The next tokens at the supervised places, row by row: (n_supervised,)."""
        return self.tokens[:, 1:][self.supervised[:, :-1]]


class Prompt(NamedTuple):
    """A recall prompt as words. `context + " " + question` is a whole prompt; its next word is the answer."""

    context: str  # the body, without <bos>: the tokenizer adds it
    questions: list[str]  # "<ask> key"
    answers: list[str]  # one word each


@dataclass(frozen=True)
class RecallShape:
    """How hard a row is: `pairs` pairs in a body of `body_len` tokens, the pairs included."""

    pairs: int
    body_len: int

    def __post_init__(self) -> None:
        """Refuse shapes that cannot be drawn."""
        most = min(len(KEY_IDS), len(VALUE_IDS))
        if not 1 <= self.pairs <= most:
            raise OptionError(f"pairs ({self.pairs}) must be between 1 and {most}")
        if self.body_len < 2 * self.pairs:
            raise OptionError(f"body_len ({self.body_len}) must be at least 2 * pairs ({2 * self.pairs})")

    @property
    def row_len(self) -> int:
        """Tokens in a row with every question."""
        return 1 + self.body_len + QUESTION_TOKENS * self.pairs


def stream(split: Split, seed: int, index: int = 0) -> torch.Generator:
    """The random stream of one batch: equal arguments give equal numbers, on every machine."""
    digest = blake2b(f"{split}:{seed}:{index}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)


def recall_batch(shape: RecallShape, rows: int, rng: torch.Generator) -> Batch:
    """Draw `rows` recall rows: tokens (rows, shape.row_len), supervised at each asked key."""
    keys = _draw(KEY_IDS, rows, shape.pairs, rng)
    values = _draw(VALUE_IDS, rows, shape.pairs, rng)
    body = _hide(keys, values, shape, rng)
    order = _shuffles(rows, shape.pairs, rng)
    asked = (torch.full_like(keys, ASK_ID), keys.gather(1, order), values.gather(1, order))
    questions = torch.stack(asked, dim=2).flatten(1)  # (B, 3 * pairs)
    tokens = torch.cat([torch.full((rows, 1), BOS_ID), body, questions], dim=1)
    supervised = torch.zeros_like(tokens, dtype=torch.bool)
    supervised[:, 1 + shape.body_len + 1 :: QUESTION_TOKENS] = True
    return Batch(tokens, supervised)


def copy_batch(rows: int, rng: torch.Generator) -> Batch:
    """Draw warm-up rows: random text, a gap, the same text again; the repetition is supervised.

    Length and gap differ from row to row: one fixed distance would teach a trick of positions instead of an
    induction head. Rows are filled up with random words that are not supervised.
    """
    lengths = _integers(COPY_LENGTHS, rows, rng)
    gaps = _integers(COPY_GAPS, rows, rng)
    row_len = 1 + 2 * COPY_LENGTHS[1] + COPY_GAPS[1]
    tokens = torch.randint(KEY_IDS.start, len(VOCABULARY), (rows, row_len), generator=rng)
    tokens[:, 0] = BOS_ID
    place = torch.arange(row_len)[None]
    again = 1 + lengths + gaps  # (B, 1) where the repetition begins
    copied = (place >= again) & (place < again + lengths)
    tokens = tokens.gather(1, torch.where(copied, place - lengths - gaps, place))
    return Batch(tokens, copied & (place + 1 < again + lengths))


def make_prompt(
    n_pairs: int = 32, body_len: int = 1024, n_questions: int | None = None, seed: int = 0
) -> Prompt:
    """Draw one held-out prompt as words: a context, questions about it, and their answers.

    The context and the questions come apart, so that a cache can be compressed before any question is seen.

    Args:
        n_pairs: pairs hidden in the body.
        body_len: tokens in the context, the pairs included, `<bos>` not.
        n_questions: how many of the pairs are asked; None asks all.
        seed: names the prompt; never seen in training, whatever its number.

    Raises:
        OptionError: for a body too short for its pairs, or more questions than pairs.

    Example:
        >>> prompt = make_prompt(n_pairs=2, body_len=8, seed=1)
        >>> len(prompt.context.split()), prompt.questions[0].split()[0]
        (8, '<ask>')
    """
    asked = n_pairs if n_questions is None else n_questions
    if not 0 <= asked <= n_pairs:
        raise OptionError(f"n_questions ({asked}) must be between 0 and n_pairs ({n_pairs})")
    shape = RecallShape(n_pairs, body_len)
    row = [VOCABULARY[i] for i in recall_batch(shape, 1, stream("eval", seed)).tokens[0].tolist()]
    tail = row[1 + body_len :][: QUESTION_TOKENS * asked]
    questions = [f"{mark} {key}" for mark, key in zip(tail[0::3], tail[1::3], strict=True)]
    return Prompt(" ".join(row[1 : 1 + body_len]), questions, tail[2::3])


def _draw(ids: range, rows: int, count: int, rng: torch.Generator) -> Tensor:
    """`count` different ids per row: (rows, count)."""
    return ids.start + _shuffles(rows, len(ids), rng)[:, :count]


def _shuffles(rows: int, size: int, rng: torch.Generator) -> Tensor:
    """One permutation of range(size) per row: (rows, size). Stable, as float32 draws can tie."""
    return torch.rand(rows, size, generator=rng).argsort(dim=1, stable=True)


def _hide(keys: Tensor, values: Tensor, shape: RecallShape, rng: torch.Generator) -> Tensor:
    """Filler with the pairs at random places that do not overlap: (B, body_len)."""
    rows = len(keys)
    body = torch.randint(FILLER_IDS.start, FILLER_IDS.stop, (rows, shape.body_len), generator=rng)
    # Distinct places among body_len - pairs; the i-th of them in order moves right by i.
    free = _shuffles(rows, shape.body_len - shape.pairs, rng)[:, : shape.pairs]
    places = free.sort(dim=1).values + torch.arange(shape.pairs)
    return body.scatter(1, places, keys).scatter(1, places + 1, values)


def _integers(bounds: tuple[int, int], rows: int, rng: torch.Generator) -> Tensor:
    """One integer per row, both bounds included: (rows, 1)."""
    return torch.randint(bounds[0], bounds[1] + 1, (rows, 1), generator=rng)
