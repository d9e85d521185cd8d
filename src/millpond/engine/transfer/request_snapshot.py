"""Snapshots of requests: one request in flight with its answers so far and its cache, as bytes and back.

Texts, penalties, constraints and stop texts are not stored: they follow from the tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from millpond.budget import Budget
from millpond.engine.outputs import FinishReason, TokenLogprob
from millpond.engine.request import CacheOptions, Request
from millpond.engine.sampling.params import SamplingParams
from millpond.engine.transfer.container import pack, unpack
from millpond.errors import DataError, MillpondError, OptionError
from millpond.option_files import OptionFile, OwnText
from millpond.prompt_marks import PromptMarks
from millpond.typed_json import from_json, to_json

#: Name of this form of the bytes; another one is refused. A new field of `Request` with a default travels by itself
#: (`typed_json`), and bytes of before are read with the default: the version stays. It changes when a field loses its
#: default, its name or its type, or when bytes of before would mean something else.
FORMAT = "millpond-request-2"
#: The same with caches in codes of a storage codec.
CODED = "millpond-request-coded-1"
#: A token, its log probability, and those of the likeliest: `TokenLogprob` without texts.
Logprob = tuple[int, float, tuple[tuple[int, float], ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionSnapshot:
    """One answer so far.

    Attributes:
        seed: Seed of its draws.
        tokens: Its tokens so far.
        known: Tokens that come next, see `Request`.
        logprobs: Log probabilities of `tokens`, if requested.
        finish_reason: Why it ended; None while it grows.
        shared: Tokens of its prompt that others had read.
    """

    seed: int
    tokens: tuple[int, ...]
    known: tuple[int, ...] = ()
    logprobs: tuple[Logprob, ...] | None = None
    finish_reason: FinishReason | None = None
    shared: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ages:
    """Seconds since moments of a request; None: not yet.

    Attributes:
        arrived: Since it was added.
        started: Since its prompt began to be read.
        first_token: Since its first token was chosen.
    """

    arrived: float
    started: float | None = None
    first_token: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSnapshot:
    """A request between two engines.

    Attributes:
        request: The request, with its prompt as token ids, and its deadline in seconds that remain.
        text: Its prompt, if it was a text.
        answers: Its answers. Those that grow have a cache in `caches`, in order; or all of them share one.
        ages: Seconds since its moments.
        model: Fingerprint of the model.
        recipe: Description of how the cache is kept, in words.
        prompt_logprobs: Log probabilities of the prompt so far, None for the first token; None where not requested.
        caches: Tensors of each cache; none where the prompt was not read, which the next engine begins again.
        codes: Mark of the storage codec whose codes these hold, see `SequenceCodec`; None: they hold entries.
    """

    request: Request
    text: str | None
    answers: tuple[CompletionSnapshot, ...]
    ages: Ages
    model: str
    recipe: str
    prompt_logprobs: tuple[Logprob | None, ...] | None = None
    caches: Sequence[Mapping[str, Tensor]] = field(default=(), repr=False)
    codes: str | None = None

    @property
    def begun(self) -> bool:
        """Whether the prompt was read, so that the answers continue from a cache."""
        return bool(self.caches)

    def continued_as(self, request: Request) -> RequestSnapshot:
        """Return the same request with its later name, deadline and known tokens.

        Raises:
            DataError: known tokens of another number of answers, or that differ from those of an answer here.
        """
        known = request.known or ((),) * len(self.answers)
        if len(known) != len(self.answers):
            raise DataError(f"{len(known)} answers are known, and the copy has {len(self.answers)}; begin it again")
        answers = [_known_by_now(answer, tokens) for answer, tokens in zip(self.answers, known, strict=True)]
        moved = replace(self.request, request_id=request.request_id, deadline=request.deadline)
        return replace(self, request=moved, answers=tuple(answers))

    def to_bytes(self) -> bytes:
        """Return the snapshot as one safetensors buffer with a checksum.

        Raises:
            OptionError: options of the method that cannot be written down.
        """
        request, written = self.request, self.check_written()
        tensors = {"ids": torch.tensor(request.prompt, dtype=torch.int32)}
        for index, answer in enumerate(self.answers):
            tensors[f"answer.{index}.tokens"] = torch.tensor(answer.tokens, dtype=torch.int32)
            tensors[f"answer.{index}.known"] = torch.tensor(answer.known, dtype=torch.int32)
        for index, cache in enumerate(self.caches):
            tensors |= {f"cache.{index}.{name}": tensor for name, tensor in cache.items()}
        texts = {"format": FORMAT, "model": self.model, "recipe": self.recipe, "request": written}
        if self.codes is not None:
            texts |= {"format": CODED, "codes": self.codes}
        return pack(texts, tensors)

    def check_written(self) -> str:
        """Return all that has no tensors, as JSON.

        Raises:
            OptionError: options of the method that cannot be written down.
        """
        request = self.request
        header = {
            "request": to_json(request, frozenset({"prompt", "params", "cache", "known", "marks"})),
            "params": to_json(request.params),
            "marks": to_json(request.marks),
            "cache": _cache_fields(request.cache),
            "text": self.text,
            "answers": [to_json(answer, frozenset({"tokens", "known"})) for answer in self.answers],
            "ages": to_json(self.ages),
            "prompt_logprobs": self.prompt_logprobs,
            "caches": len(self.caches),
        }
        try:
            return json.dumps(header, allow_nan=True)
        except (TypeError, ValueError) as error:
            raise OptionError(f"request {request.request_id!r} cannot be written down ({error})") from None

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> RequestSnapshot:
        """Return the snapshot that `to_bytes` wrote.

        Raises:
            DataError: bytes that are cut off, changed, of another version, or hold values that no request has.
        """
        texts, tensors = unpack(data)
        if texts.get("format") not in (FORMAT, CODED) or ("codes" in texts) != (texts["format"] == CODED):
            raise DataError(
                f"the buffer has the format {str(texts.get('format'))[:80]!r}, and this Millpond reads {FORMAT!r}: run "
                "the same version on both sides"
            )
        try:
            return cls._read(texts, json.loads(texts["request"]), tensors)
        except MillpondError as error:
            raise DataError(f"the buffer holds no request: {error}") from None
        except (KeyError, ValueError, TypeError, RecursionError, AttributeError) as error:
            raise DataError(f"the buffer holds no request ({type(error).__name__}: {str(error)[:120]})") from None

    @classmethod
    def _read(cls, texts: dict[str, str], header: dict[str, Any], tensors: dict[str, Tensor]) -> RequestSnapshot:
        fields = {**header["request"], "prompt": _ids(tensors["ids"])}
        request = replace(
            from_json(Request, fields),
            params=from_json(SamplingParams, header["params"]),
            marks=from_json(PromptMarks, header["marks"]),
            cache=_cache_of(header["cache"]),
        )
        answers = [
            replace(
                from_json(CompletionSnapshot, {**answer_fields, "tokens": _ids(tensors[f"answer.{index}.tokens"])}),
                known=_ids(tensors[f"answer.{index}.known"]),
            )
            for index, answer_fields in enumerate(header["answers"])
        ]
        n_caches, text = header["caches"], header["text"]
        if type(n_caches) is not int or not 0 <= n_caches <= len(answers) or not isinstance(text, str | None):
            raise DataError(f"{str(n_caches)[:40]} caches of {len(answers)} answers")
        return cls(
            request=request,
            text=text,
            answers=tuple(answers),
            ages=from_json(Ages, header["ages"]),
            model=texts["model"],
            recipe=texts["recipe"],
            prompt_logprobs=from_json(_Logprobs, {"logprobs": header["prompt_logprobs"]}).logprobs,
            caches=[_named(tensors, f"cache.{index}.") for index in range(n_caches)],
            codes=texts.get("codes"),
        )


@dataclass(frozen=True, slots=True)
class _Logprobs:
    """Log probabilities of a prompt, for `from_json`.

    Attributes:
        logprobs: One per token.
    """

    logprobs: tuple[Logprob | None, ...] | None


def logprob_of(token_logprob: TokenLogprob) -> Logprob:
    """Return a log probability without texts, which follow from the ids."""
    return token_logprob.token_id, token_logprob.logprob, tuple((token, value) for token, value, _ in token_logprob.top)


def _known_by_now(answer: CompletionSnapshot, known: tuple[int, ...]) -> CompletionSnapshot:
    """Return an answer whose tokens are known up to `known`, or further.

    Raises:
        DataError: its tokens are others.
    """
    own_tokens, num_common = (*answer.tokens, *answer.known), min(len(answer.tokens) + len(answer.known), len(known))
    if own_tokens[:num_common] != known[:num_common]:
        raise DataError("the copy of a request has other tokens than its client was sent; begin it again")
    longest = max(own_tokens, known, key=len)
    return replace(answer, known=() if answer.finish_reason else longest[len(answer.tokens) :])


def _named(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _ids(tensor: Tensor) -> tuple[int, ...]:
    if tensor.ndim != 1 or tensor.dtype != torch.int32:
        raise DataError(f"ids of shape {tuple(tensor.shape)} and type {tensor.dtype}")
    return tuple(tensor.tolist())


def _cache_fields(cache: CacheOptions) -> dict[str, Any]:
    """Return options as JSON holds them.

    Raises:
        OptionError: one of them names a file.
    """
    for name, value in cache.options.items():
        if isinstance(value, OptionFile | OwnText):
            raise OptionError(f"option {name} names a file, which does not move with a request: set it for the engine")
    fields = to_json(cache, frozenset({"files", "budget"}))
    budget = cache.budget
    return {**fields, "budget": [budget.kind, budget.amount, budget.at_least] if isinstance(budget, Budget) else budget}


def _cache_of(fields: Any) -> CacheOptions:
    """Return the options that `_cache_fields` wrote; they may name no file."""
    budget = fields.pop("budget")
    cache = from_json(CacheOptions, fields)
    parsed_budget = Budget(*budget) if isinstance(budget, list) else budget
    return replace(cache, budget=parsed_budget, files={})
