"""Fit of alpha: the least share of chunks to compute again that keeps answers near those of plain prompts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from millpond.engine.chunks.prompt import Chunk, Prompt, PromptSpan, tokenized
from millpond.engine.chunks.reuse import ChunkReuse
from millpond.engine.components import Components
from millpond.engine.request import CacheOptions
from millpond.engine.step_executor import PromptSegment, run
from millpond.errors import OptionError

#: Range of alpha. With the largest every chunk behind an unknown text is computed in full, since CCI is at least 0.5.
LEAST, MOST = 0.01, 2.0
#: Halvings of the range, on a logarithmic scale: the last two values differ by 4 %.
STEPS = 7


@dataclass(frozen=True, slots=True)
class AlphaTrial:
    """Result of one alpha.

    Attributes:
        alpha: Factor of CFO.
        kl: KL divergence from the plain prompt, in nats, the mean over the questions' tokens.
        share: Share of the chunks' tokens that was computed.
    """

    alpha: float
    kl: float
    share: float


@dataclass(frozen=True, slots=True)
class AlphaFit:
    """Alpha that keeps to a bound, and what was tried.

    Attributes:
        best: Least alpha that was found to keep to the bound.
        trials: All trials, by alpha.
    """

    best: AlphaTrial
    trials: tuple[AlphaTrial, ...]


def fit_alpha(measure: Callable[[float], AlphaTrial], bound: float) -> AlphaFit:
    """Return the least alpha whose divergence keeps to a bound, by bisection.

    The paper fits alpha so that least is computed while a validation score holds; here the score is the divergence.

    Args:
        measure: Returns the trial of an alpha.
        bound: Largest mean KL divergence, in nats.

    Raises:
        OptionError: the largest alpha does not keep to it either.
    """
    trials = [measure(MOST)]
    if trials[0].kl > bound:
        raise OptionError(
            f"a KL divergence of {bound:g} is not kept even with alpha={MOST:g} ({trials[0].kl:.2g}); raise the bound"
        )
    trials.append(measure(LEAST))
    low, high = LEAST, MOST
    while trials[1].kl > bound and len(trials) < 2 + STEPS:
        trials.append(measure(float(f"{math.sqrt(low * high):.3g}")))
        if trials[-1].kl > bound:
            low = trials[-1].alpha
        else:
            high = trials[-1].alpha
    ordered = sorted(trials, key=lambda trial: trial.alpha)
    high = high if trials[1].kl > bound else LEAST
    return AlphaFit(next(trial for trial in ordered if trial.alpha == high), tuple(ordered))


def tune_alpha(
    parts: Components,
    texts: Sequence[str],
    bound: float,
    *,
    prompts: int = 12,
    chunks: int = 4,
    question: int = 32,
    seed: int = 0,
) -> AlphaFit:
    """Return the least alpha that keeps prompts of stored chunks near plain ones.

    A prompt is some of the texts in random order, and as its question the begin of a further one.

    Args:
        parts: Parts of an engine, whose store has all texts. Its `alpha` is that of the last trial afterwards.
        texts: Texts of the chunks.
        bound: Largest mean KL divergence over the tokens of the questions, in nats, above 0.
        prompts: Prompts to measure.
        chunks: Chunks of each.
        question: Tokens of each question, at most.
        seed: Seed of the draw.

    Raises:
        OptionError: too few texts, a bound that is not above 0 or cannot be kept, or prompts longer than the context.
    """
    assert parts.chunk_reuse is not None, "an engine with a chunk store"
    if not (bound > 0 and math.isfinite(bound)):
        raise OptionError(f"a bound of {bound:g} nats on the KL divergence must be a number above 0")
    if len(texts) <= chunks:
        raise OptionError(
            f"prompts of {chunks} chunks and a question need more than {chunks} texts, and there are {len(texts)}; "
            "give more texts, or lower the chunks of a prompt"
        )
    drawn = list(_drawn(parts, texts, prompts, chunks, question, np.random.default_rng(seed)))
    plain = [_log_probabilities(parts, ids, spans, CacheOptions(recompute=1))[0] for ids, spans in drawn]

    def measure(alpha: float) -> AlphaTrial:
        assert parts.chunk_reuse is not None, "checked above"
        parts.chunk_reuse.store.alpha = alpha
        divergences, shares = [], []
        for (ids, spans), expected in zip(drawn, plain, strict=True):
            found, share = _log_probabilities(parts, ids, spans, CacheOptions(recompute="auto"))
            divergences.append(float((expected.exp() * (expected - found)).sum(-1).mean()))
            shares.append(share)
        return AlphaTrial(alpha, float(np.mean(divergences)), float(np.mean(shares)))

    return fit_alpha(measure, bound)


def _drawn(
    parts: Components, texts: Sequence[str], prompts: int, chunks: int, question: int, rng: np.random.Generator
) -> Iterator[tuple[np.ndarray, list[PromptSpan]]]:
    """Yield the tokens and the spans of prompts; the last span is the question.

    Raises:
        OptionError: one is longer than the context.
    """
    for _ in range(prompts):
        *picked, asked = rng.choice(len(texts), chunks + 1, replace=False).tolist()
        begin = parts.tokenizer(texts[asked], add_special_tokens=False)["input_ids"][:question]
        ids, spans = tokenized(Prompt([*(Chunk(texts[n]) for n in picked), begin]), parts.tokenizer)
        context = parts.model.context_length
        if context is not None and len(ids) > context:
            raise OptionError(
                f"a prompt of {chunks} texts and a question has {len(ids)} tokens, more than the {context} of the "
                "model's context; cut the texts (such as --paragraphs), or lower the chunks of a prompt"
            )
        yield np.array(ids, dtype=np.int64), spans


def _log_probabilities(
    parts: Components, ids: np.ndarray, spans: list[PromptSpan], options: CacheOptions
) -> tuple[Tensor, float]:
    """Return the log probabilities of a question, and the share of chunks computed.

    The former are (tokens, vocabulary).
    """
    reuse: ChunkReuse | None = parts.chunk_reuse
    assert reuse is not None, "checked by the caller"
    n_question = len(ids) - spans[-1].begin
    blend = reuse.begin(ids, spans, options, n_question, None)
    blend.kept.clear()  # what is computed here is kept nowhere
    cache = parts.decode_groups.group(parts.decode_groups.complete(CacheOptions())).cache_factory.make_cache(len(ids))
    try:
        segment = PromptSegment(cache, ids, 0, True, True, blend.span(0, len(ids)))
        with torch.no_grad():
            (logits,) = run(parts.model, [], [segment])
    finally:
        blend.release()
        cache.clear()
    return torch.log_softmax(logits[-n_question:].float(), -1), float(blend.computed[: spans[-1].begin].mean())
