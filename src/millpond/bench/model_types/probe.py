"""One model type: stock generation beside caches of several methods, in float32, on a padded batch of two."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationMixin, PreTrainedModel

import millpond as mp
from millpond.bench.model_types.masked import Held, Masked, attending
from millpond.bench.model_types.settings import UNFIT
from millpond.bench.model_types.tiny_model import tiny_model
from millpond.hf.lean import STAND_IN

#: Method -> its options where all that it does is to hide entries. `streaming` else turns positions as well.
METHODS: dict[str, dict[str, Any]] = {
    "full": {}, "h2o": {}, "streaming": {"positions": "absolute"}, "expected_attention": {},
}  # fmt: skip
LENGTHS = [24, 17]  #: of the prompts; padded on the left
NEW = 6  #: tokens that are generated
AMPLE, SMALL = 64, 12  #: budgets, in entries per KV head: one that holds everything, one that does not
WITHIN = 1e-4  #: logits that are equal, relative to the largest one where that is above 1
EQUAL, REFUSED, WRONG, BROKEN, NOT_TRIED = "equal", "refused", "wrong", "broken", "not tried"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one method.

    Attributes:
        status: equal to stock (and, with few entries, to stock that hides what left), refused with a typed error,
            wrong, or broken: an error that is not ours. reason: where it is not equal.
    """

    status: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """What came of one type.

    Attributes:
        native_layers: layers that decode natively, of how many. reason: why it was not tried.
    """

    model_type: str
    status: str
    reason: str = ""
    native_layers: tuple[int, int] = (0, 0)
    methods: dict[str, Outcome] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class _Wrong(Exception):
    """Not what it ought to be; the message says what and by how much."""


@dataclass(frozen=True, slots=True)
class _Run:
    """ids (B, n + NEW), logits (NEW, B, V) in float64, and what was held after each pass."""

    ids: Tensor
    logits: Tensor
    held: list[Held]


def probe(kind: str) -> Finding:
    """Make a tiny model of the type and run it under each method."""
    torch.set_grad_enabled(False)
    warnings.simplefilter("ignore")
    try:
        model = tiny_model(kind)
    except Exception as error:
        return Finding(kind, NOT_TRIED, UNFIT.get(kind) or _told(error))
    refused = {method: outcome for method in METHODS if (outcome := _refusal(model, method))}
    if "full" in refused:
        return Finding(kind, _worst(refused), methods=refused)
    if kind in UNFIT:
        return Finding(kind, NOT_TRIED, UNFIT[kind])
    try:
        stock = _generate(model, None)
    except Exception as error:
        return Finding(kind, NOT_TRIED, f"transformers' own generate: {_told(error)}")
    if not bool(stock.logits.isfinite().all()):
        return Finding(kind, NOT_TRIED, "its logits are not finite with random weights")
    methods = {method: refused.get(method) or _outcome(model, method, stock) for method in METHODS}
    return Finding(kind, _worst(methods), native_layers=_native_layers(model), methods=methods)


def _worst(methods: dict[str, Outcome]) -> str:
    """Of a type: what is a defect in any method counts, else what `full` gave."""
    found = {outcome.status for outcome in methods.values()}
    return next((status for status in (BROKEN, WRONG) if status in found), methods["full"].status)


def _refusal(model: PreTrainedModel, method: str) -> Outcome | None:
    """Why no cache of this method is made for the model; None where one is."""
    try:
        with mp.compress(model, method, None if method == "full" else AMPLE):
            return None
    except mp.MillpondError as error:
        return Outcome(REFUSED, str(error))
    except Exception as error:
        return Outcome(BROKEN, _told(error))


def _outcome(model: PreTrainedModel, method: str, stock: _Run) -> Outcome:
    try:
        with mp.compress(model, method, None if method == "full" else AMPLE) as cache:
            _compare(_generate(model, cache), stock, "with room for everything")
        if method != "full":
            _evict(model, method)
    except mp.MillpondError as error:
        return Outcome(REFUSED, str(error))
    except _Wrong as error:
        return Outcome(WRONG, str(error))
    except Exception as error:
        return Outcome(BROKEN, _told(error))
    return Outcome(EQUAL)


def _evict(model: PreTrainedModel, method: str) -> None:
    """Few entries: within the budget, again the same, and what stock gives that hides what left."""
    for options in {str(o): o for o in ({}, METHODS[method])}.values():
        runs = []
        for _ in range(2):
            with mp.compress(model, method, SMALL, **options) as cache:
                runs.append(_generate(model, cache))
                cache.check_integrity()
        _compare(runs[1], runs[0], "a second time", 0.0)
        most = max(len(h) for held in runs[0].held[1:] for layer in held for heads in layer for h in heads)
        if method != "expected_attention" and most > SMALL:  # which grows while it decodes
            raise _Wrong(f"{most} entries of a KV head where {SMALL} may be held")
    _compare(runs[0], masked_run(model, runs[0]), "beside stock that hides what left")


def masked_run(model: PreTrainedModel, run: _Run, hide: bool = True) -> _Run:
    """Stock generation over everything that writes the tokens of `run` and shows at each step what that run held."""
    masked = Masked(torch.tensor([max(LENGTHS) - n for n in LENGTHS]))
    step = 0

    def follow(ids: Tensor, scores: Tensor) -> Tensor:
        nonlocal step
        masked.held = run.held[step] if hide else None
        wanted = run.ids[:, max(LENGTHS) + step, None]
        step += 1
        return torch.full_like(scores, -torch.inf).scatter(1, wanted, 0.0)

    with attending(model, masked):
        return _generate(model, DynamicCache(), follow)


def _compare(found: _Run, expected: _Run, where: str, within: float = WITHIN) -> None:
    scale = max(1.0, float(expected.logits.abs().max()))
    apart = float((found.logits - expected.logits).abs().max()) / scale
    if not apart <= within:
        raise _Wrong(f"{where}: logits differ by {apart:.1e}")
    if not torch.equal(found.ids, expected.ids):
        raise _Wrong(f"{where}: other tokens")


def _generate(model: PreTrainedModel, cache: Any, follow: Callable[[Tensor, Tensor], Tensor] | None = None) -> _Run:
    """Greedy generation of the prompts; `follow` may replace the scores of each step."""
    ids, mask = _prompts()
    held: list[Held] = []

    def note(ids: Tensor, scores: Tensor) -> Tensor:
        if isinstance(cache, mp.MillpondCache):
            held.append([[cache.positions(n, s) for s in range(len(ids))] for n in range(len(cache.layers))])
        return scores if follow is None else follow(ids, scores)

    given: dict[str, Any] = {} if cache is None else {"past_key_values": cache}
    generate: Any = GenerationMixin.generate  # not that of a model which passes no processors on (Janus)
    out = generate(
        model, input_ids=ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, pad_token_id=0,
        eos_token_id=None, output_logits=True, return_dict_in_generate=True, logits_processor=[note], **given,
    )  # fmt: skip
    return _Run(out.sequences, torch.stack(out.logits).double(), held)


def _prompts() -> tuple[Tensor, Tensor]:
    """Token ids and mask, (B, n)."""
    width = max(LENGTHS)
    ids = torch.randint(3, 80, (len(LENGTHS), width), generator=torch.Generator().manual_seed(1))
    mask = torch.stack([(torch.arange(width) >= width - n).long() for n in LENGTHS])
    return ids * mask, mask


def _native_layers(model: PreTrainedModel) -> tuple[int, int]:
    try:
        with mp.compress(model, "full") as cache:
            return sum(map(STAND_IN.serves, model.modules())), len(cache.layers)
    except mp.MillpondError:
        return 0, 0


def _told(error: BaseException) -> str:
    """An error with the place in the code that raised it."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message[:300]} ({Path(frame.filename).name}:{frame.lineno})"
