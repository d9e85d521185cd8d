"""Samples as tokens, and as batches: what is read in the first pass, what follows, and what is continued."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from millpond.budget import Budget
from millpond.cache.pages.table_bytes import kv_bytes
from millpond.errors import NumericsError, OptionError
from millpond.hf.cache import MillpondCache
from millpond.models.cache_argument import cache_argument
from millpond_lab.evals.decoding.prompt_recording import PromptRecording
from millpond_lab.evals.decoding.record import Protocol
from millpond_lab.evals.sample import Question, Sample
from millpond_lab.evals.task import Kind

Tokens = tuple[int, ...]
#: Share of unknown words in a context above which it is no text to the model.
MOST_UNKNOWN = 0.2


@dataclass(frozen=True, slots=True)
class EncodedQuestion:
    """A question as tokens.

    Attributes:
        index: of the question in its sample. question: as text, with its references.
        tokens: what is read between the first pass and the answer; never empty where the first pass could leave
            a token, so that the first token of an answer is predicted from what is kept.
        targets: continuations that are fed: all choices, or the one reference; empty where an answer is decoded.
    """

    index: int
    question: Question
    tokens: Tokens
    targets: tuple[Tokens, ...] = ()


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """One sequence.

    Attributes:
        sample: where it comes from. opening: the tokens of the first pass, after which a method evicts.
        asked: its questions; exactly one in the protocol `aware`.
        written: tokens that are read one by one behind the opening, as answers are, before anything is asked.
    """

    sample: Sample
    opening: Tokens
    asked: tuple[EncodedQuestion, ...]
    written: Tokens = ()

    @property
    def read_before(self) -> int:
        """Tokens that are read before the first question: the opening and what is written behind it."""
        return len(self.opening) + len(self.written)

    def rows(self, protocol: Protocol) -> int:
        """How many sequences are decoded at once for it."""
        each = [max(1, len(asked.targets)) for asked in self.asked]
        return max(each) if protocol == "turns" else sum(each)


@dataclass(frozen=True, slots=True)
class PromptBatch:
    """Prompts that are read together."""

    protocol: Protocol
    kind: Kind
    prompts: tuple[EncodedPrompt, ...]

    def alone(self) -> list[PromptBatch]:
        """One batch for each prompt."""
        return [PromptBatch(self.protocol, self.kind, (prompt,)) for prompt in self.prompts]

    @property
    def names(self) -> list[tuple[str, int]]:
        """(sample, question) of every question in it."""
        return [(prompt.sample.id, asked.index) for prompt in self.prompts for asked in prompt.asked]


def encode(sample: Sample, tokenizer: PreTrainedTokenizerBase, kind: Kind, protocol: Protocol) -> list[EncodedPrompt]:
    """The prompts of one sample: one, or in the protocol `aware` one for each question.

    Where a text is written behind the context, a question comes behind that text in every protocol.

    Raises:
        OptionError: the tokenizer does not know the language of the sample.
    """
    context = _context(tokenizer, sample)
    _check_known(tokenizer, sample, context)
    asked = [_asked(tokenizer, index, question, kind) for index, question in enumerate(sample.questions)]
    written = _tokens(tokenizer, sample.written) if sample.written else ()
    if written:
        groups = [(one,) for one in asked] if protocol == "aware" else [tuple(asked)]
        return [EncodedPrompt(sample, context, group, written) for group in groups]
    if protocol == "aware":
        return [_aware(sample, context, one) for one in asked]
    # without a question's tokens the last one of the context is asked instead
    bare = not asked[0].tokens if protocol == "turns" else any(not one.tokens for one in asked)
    cut = len(context) - 1 if bare and len(context) > 1 else len(context)
    led = [
        EncodedQuestion(one.index, one.question, context[cut:] + one.tokens, one.targets)
        if protocol == "agnostic" or one.index == 0
        else one
        for one in asked
    ]
    return [EncodedPrompt(sample, context[:cut], tuple(led))]


def _aware(sample: Sample, context: Tokens, asked: EncodedQuestion) -> EncodedPrompt:
    whole = context + asked.tokens
    cut = max(len(whole) - 1, 1)
    return EncodedPrompt(
        sample, whole[:cut], (EncodedQuestion(asked.index, asked.question, whole[cut:], asked.targets),)
    )


def _asked(tokenizer: PreTrainedTokenizerBase, index: int, question: Question, kind: Kind) -> EncodedQuestion:
    texts: tuple[str, ...] = ()
    if kind == "choice":
        texts = question.choices
    elif kind != "generate":
        texts = question.references[:1]
    targets = tuple(_tokens(tokenizer, text) for text in texts)
    if question.tokens is not None and texts:
        targets = (question.tokens,)
    return EncodedQuestion(index, question, _tokens(tokenizer, question.text), targets)


def _check_known(tokenizer: PreTrainedTokenizerBase, sample: Sample, context: Tokens) -> None:
    unknown = context.count(tokenizer.unk_token_id) if tokenizer.unk_token is not None else 0
    if unknown > MOST_UNKNOWN * len(context):
        raise OptionError(
            f"sample {sample.id!r}: the tokenizer knows no word for {unknown:,} of its {len(context):,} tokens; the "
            "text is in a language that this model was not made for, so a score would say nothing: choose other tasks"
        )


def _context(tokenizer: PreTrainedTokenizerBase, sample: Sample) -> Tokens:
    if sample.tokens is None:
        return _tokens(tokenizer, sample.context, special=True)
    return (*leading_tokens(tokenizer), *sample.tokens)


def leading_tokens(tokenizer: PreTrainedTokenizerBase) -> Tokens:
    """What the tokenizer puts before a text, a start mark for example."""
    marked, plain = _tokens(tokenizer, "a", special=True), _tokens(tokenizer, "a")
    place = next((i for i in range(len(marked)) if marked[i : i + len(plain)] == plain), 0)
    return marked[:place]


def _tokens(tokenizer: PreTrainedTokenizerBase, text: str, special: bool = False) -> Tokens:
    ids: list[int] = tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
    return tuple(int(token) for token in ids)


def batches(prompts: Iterable[EncodedPrompt], kind: Kind, protocol: Protocol, size: int) -> Iterator[PromptBatch]:
    """Prompts in their order, as many together as decode in at most `size` rows; one prompt is never split."""
    group: list[EncodedPrompt] = []
    for prompt in prompts:
        if group and sum(p.rows(protocol) for p in (*group, prompt)) > size:
            yield PromptBatch(protocol, kind, tuple(group))
            group = []
        group.append(prompt)
    if group:
        yield PromptBatch(protocol, kind, tuple(group))


@dataclass(frozen=True, slots=True)
class Held:
    """What the cache holds of one row: entries over entries seen, and bytes as in `CacheStats`, of this row alone.

    Attributes:
        bf16_kv_bytes: as `kv_bytes`, if numbers that are not coded took 2 bytes each.
    """

    share: float
    kv_bytes: int
    full_kv_bytes: int
    bf16_kv_bytes: int = 0


class BatchReader:
    """Rows of one batch. What a row reads and predicts does not depend on the other rows, beyond rounding.

    A pass of one token is a decoding step to the cache, a pass of more is not. So that a row meets the same passes in
    every batch, a single token is never hidden among the pads of a wider pass.

    A budget in bytes is of each row here, not of the whole cache.

    Args:
        recording: of the openings; what it holds is not computed again, and where it is empty it is made.

    Attributes:
        logits: (rows, vocabulary) float32 or wider, after each row's newest token.
        ids: (rows, columns), of the newest pass. mask: (rows, columns), 0 for pads, of all passes.
        seen: tokens that each row has read.
        pending: tokens at each row's end that were decided but not read; what is asked next begins with them.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: MillpondCache,
        openings: Sequence[Sequence[int]],
        recording: PromptRecording | None = None,
    ) -> None:
        assert all(openings), "every row opens with at least one token"
        self.cache = cache
        self.seen = [0] * len(openings)
        self.pending: list[list[int]] = [[] for _ in openings]
        self.logits = torch.empty(0)
        self._model: Any = model
        self._budget = cache.budget
        self.ids = torch.empty(0, dtype=torch.long)
        self.mask = torch.ones(len(openings), 0, dtype=torch.long, device=model.device)
        known = inspect.signature(model.forward).parameters
        self._options: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in known else {}
        self._share_budget()
        if recording is not None and recording.fits(cache):
            self._recorded(recording)
        else:
            self._pass(openings)

    @property
    def n_rows(self) -> int:
        return len(self.seen)

    def feed(self, tokens: Sequence[Sequence[int]]) -> None:
        """Read new tokens of each row, any number; a row without any stays as it is."""
        long = [own if len(own) > 1 else () for own in tokens]
        single = [own if len(own) == 1 else () for own in tokens]
        for part in (long, single):
            if any(part):
                self._pass(part)

    def write(self, tokens: Sequence[Sequence[int]]) -> None:
        """Read each row's tokens in decoding steps, as if the model had chosen them itself."""
        for step in range(max(map(len, tokens), default=0)):
            self.feed([own[step : step + 1] for own in tokens])

    def select(self, rows: Sequence[int]) -> None:
        """Become these rows, in this order; one may be named many times: each is then a copy of its own."""
        if list(rows) == list(range(self.n_rows)):
            return
        index = torch.tensor(rows, dtype=torch.long)
        self.cache.batch_select_indices(index)
        here = index.to(self.mask.device)
        self.mask, self.logits = self.mask[here], self.logits[here]
        self.seen = [self.seen[row] for row in rows]
        self.pending = [list(self.pending[row]) for row in rows]
        self._share_budget()

    def held(self) -> list[Held]:
        """What each row holds now."""
        return [self._held(row) for row in range(self.n_rows)]

    def _held(self, row: int) -> Held:
        stored = held = full = regions = in_bf16 = 0
        for layer_cache in self.cache.layer_caches:
            table = layer_cache.table
            if table is None:
                continue
            lens = layer_cache.stored[row]
            arrays = table.pool.arrays
            stored += int(lens.sum())
            regions += len(lens)
            held += int(kv_bytes(table)[row])
            coded = 0 if table.quantized is None else int(table.quantized.kv_bytes()[row])
            numbers = table.pool.slots * (arrays.key_dim + arrays.value_dim)
            in_bf16 += coded + 2 * (int(kv_bytes(table)[row]) - coded) * numbers // table.pool.kv_bytes_per_page
            full += self.seen[row] * len(lens) * (arrays.key_dim + arrays.value_dim) * self.cache.dtype.itemsize
        return Held(stored / (self.seen[row] * regions), held, full, in_bf16)

    def _share_budget(self) -> None:
        if self._budget is not None and self._budget.kind == "bytes":
            self.cache.budget = Budget("bytes", int(self._budget.amount) * self.n_rows)

    def _recorded(self, recording: PromptRecording) -> None:
        """Read the openings as they were recorded."""
        recording.give(self.cache)
        self.ids, self.mask, self.logits = recording.ids, recording.mask, recording.logits
        self.seen = [len(opening) for opening in recording.openings]

    def _pass(self, tokens: Sequence[Sequence[int]]) -> None:
        device = self.mask.device
        width = max(map(len, tokens))
        ids = torch.zeros(self.n_rows, width, dtype=torch.long)
        valid = torch.zeros_like(ids)
        for row, own in enumerate(tokens):
            if own:
                ids[row, width - len(own) :] = torch.tensor(own)
                valid[row, width - len(own) :] = 1
        self.ids = ids.to(device)
        positions = (torch.tensor(self.seen)[:, None] + valid.cumsum(1) - 1).clamp(min=0)
        self.mask = torch.cat([self.mask, valid.to(device)], 1)
        out = self._model(
            input_ids=self.ids,
            attention_mask=self.mask,
            position_ids=positions.to(device),
            **cache_argument(self.cache),
            use_cache=True,
            **self._options,
        )
        fresh = out.logits[:, -1].to(torch.promote_types(out.logits.dtype, torch.float32))
        self.logits = fresh if all(tokens) else _chosen(tokens, fresh, self.logits)
        if bool(self.logits.isnan().any()):
            raise NumericsError("the model's predictions are NaN; check its weights and its dtype")
        self.seen = [seen + len(own) for seen, own in zip(self.seen, tokens, strict=True)]


def _chosen(tokens: Sequence[Sequence[int]], fresh: Tensor, before: Tensor) -> Tensor:
    """The new logits of rows that read something, the earlier ones of the others."""
    read = torch.tensor([bool(own) for own in tokens], device=fresh.device)
    return torch.where(read[:, None], fresh, before)
