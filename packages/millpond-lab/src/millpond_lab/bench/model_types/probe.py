"""One model type: stock generation and caches of several methods, in float32, on a padded batch of two."""

from __future__ import annotations

import traceback
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

import millpond as mp
from millpond.hf.native_layers.decoder_layers import STAND_IN
from millpond_lab.bench.model_types.greedy import Run, Wrong, compare, generated, masked_run
from millpond_lab.bench.model_types.tiny_model import UNFIT, tiny_model

EQUAL, REFUSED, WRONG, BROKEN, NOT_TRIED = "equal", "refused", "wrong", "broken", "not tried"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one method.

    Attributes:
        status: equal to stock (and, with few entries, to stock that masks evicted entries), refused with a typed error,
            wrong, or broken: an error that is not ours.
        reason: where it is not equal.
    """

    status: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """What came of one type.

    Attributes:
        status: the worst of its settings where that is a defect, else that of `full`.
        reason: why it was not tried, or is not equal in any setting.
        native_layers: layers that decode natively, of how many.
        outcomes: by the name of the setting; none where all are as the type is.
    """

    model_type: str
    status: str
    reason: str = ""
    native_layers: tuple[int, int] = (0, 0)
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, data: dict[str, Any]) -> Finding:
        """From what `as_dict` gave, also by way of JSON."""
        outcomes = {name: Outcome(**outcome) for name, outcome in data["outcomes"].items()}
        serving, layers = data["native_layers"]
        return cls(**data | {"outcomes": outcomes, "native_layers": (serving, layers)})


AMPLE, SMALL = 64, 12  #: budgets, in entries per KV head: one that holds everything, one that does not


class Setting(NamedTuple):
    """A method and its options.

    Attributes:
        hides: whether all that it does is to hide entries; `streaming` turns their positions as well.
    """

    method: str
    options: dict[str, Any]
    hides: bool


#: What each type is tried with, by the name that it has in results.
SETTINGS: dict[str, Setting] = {
    "full": Setting("full", {}, False),
    "h2o": Setting("h2o", {}, True),
    "streaming": Setting("streaming", {}, False),
    "streaming, absolute": Setting("streaming", {"positions": "absolute"}, True),
    "expected_attention": Setting("expected_attention", {}, True),
}


@torch.no_grad()
def probe(kind: str) -> Finding:
    """Make a tiny model of the type and run it in each setting."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _probe(kind)


def _probe(kind: str) -> Finding:
    try:
        model = tiny_model(kind)
    except Exception as error:
        return Finding(kind, NOT_TRIED, UNFIT.get(kind) or _told(error))
    refused = {name: outcome for name in SETTINGS if (outcome := _refusal(model, SETTINGS[name]))}
    if "full" in refused:
        return Finding(kind, refused["full"].status, refused["full"].reason)
    if kind in UNFIT:
        return Finding(kind, NOT_TRIED, UNFIT[kind])
    try:
        stock = generated(model, None)
    except Exception as error:
        return Finding(kind, NOT_TRIED, f"transformers' own generate: {_told(error)}")
    if not bool(stock.logits.isfinite().all()):
        return Finding(kind, NOT_TRIED, "its logits are not finite with random weights")
    outcomes = {name: refused.get(name) or _outcome(model, SETTINGS[name], stock) for name in SETTINGS}
    if _worst(outcomes) == REFUSED:
        return Finding(kind, REFUSED, outcomes["full"].reason)
    return Finding(kind, _worst(outcomes), native_layers=_native_layers(model), outcomes=outcomes)


def _worst(outcomes: dict[str, Outcome]) -> str:
    found = {outcome.status for outcome in outcomes.values()}
    return next((status for status in (BROKEN, WRONG) if status in found), outcomes["full"].status)


def _cache(model: PreTrainedModel, setting: Setting, budget: int) -> mp.MillpondCache:
    return mp.compress(model, setting.method, None if setting.method == "full" else budget, **setting.options)


def _refusal(model: PreTrainedModel, setting: Setting) -> Outcome | None:
    """Why no cache of this kind is made for the model; None where one is."""
    try:
        with _cache(model, setting, AMPLE):
            return None
    except mp.MillpondError as error:
        return Outcome(REFUSED, str(error))
    except Exception as error:
        return Outcome(BROKEN, _told(error))


def _outcome(model: PreTrainedModel, setting: Setting, stock: Run) -> Outcome:
    try:
        with _cache(model, setting, AMPLE) as cache:
            compare(generated(model, cache), stock, "with room for everything")
        if setting.method != "full":
            _evict(model, setting)
    except mp.MillpondError as error:
        return Outcome(REFUSED, str(error))
    except Wrong as error:
        return Outcome(WRONG, str(error))
    except Exception as error:
        return Outcome(BROKEN, _told(error))
    return Outcome(EQUAL)


def _evict(model: PreTrainedModel, setting: Setting) -> None:
    """With few entries: within the budget, repeatable, and equal to stock that masks evicted entries."""
    runs = []
    for _ in range(2):
        with _cache(model, setting, SMALL) as cache:
            runs.append(generated(model, cache))
            cache.check_integrity()
    compare(runs[1], runs[0], "a second time", 0.0)
    grows = cache.policy.grows_when_decoded
    for step, held in enumerate(runs[0].held):
        most = max(len(head) for layer in held.values() for heads in layer for head in heads)
        if most > SMALL + grows * step:
            raise Wrong(f"{most} entries of a KV head after step {step}, where {SMALL} may be held")
    if setting.hides:
        compare(runs[0], masked_run(model, runs[0]), "compared with stock that masks evicted entries")


def _native_layers(model: PreTrainedModel) -> tuple[int, int]:
    try:
        with mp.compress(model, "full") as cache:
            return sum(map(STAND_IN.serves, model.modules())), len(cache.layers)
    except mp.MillpondError:
        return 0, 0


def _told(error: BaseException) -> str:
    """An error with the place in the code that raised it."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    message = " ".join(str(error).split()).split(". ")[0]
    return f"{type(error).__name__}: {message[:300]} ({Path(frame.filename).name}:{frame.lineno})"
