"""Candidates of an evaluation: each opens the cache in which a batch of prompts is read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from millpond.budget import Budget
from millpond.codec import codecs_of, resolve
from millpond.errors import OptionError, unknown
from millpond.hf.cache import MillpondCache
from millpond.hf.calibration.load import needs_calibration
from millpond.hf.compress import compress
from millpond.methods import METHODS
from millpond.registry import Registry
from millpond_lab.evals.decoding.batch import PromptBatch
from millpond_lab.evals.spec import Spec

DEFAULT_BUDGET = "20%"


class Candidate(Protocol):
    """Something that can be named in `--method`.

    A candidate that takes a budget is opened with one ("20%", "512", "64KiB"); one that keeps all, or finds its size
    by itself, with "".
    """

    @property
    def keeps_all(self) -> bool:
        """It takes no budget."""
        ...

    @property
    def default_budget(self) -> str:
        """The default; "" where none is needed."""
        ...

    def check(self, budget: str, codec: str) -> None:
        """Refuse, before any model is loaded, what `open` would refuse for every prompt.

        Raises:
            OptionError: a budget or codec that cannot be.
        """
        ...

    def open(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch: PromptBatch, budget: str, codec: str
    ) -> MillpondCache:
        """An empty cache for the prompts of `batch`, one row each; the caller closes it.

        The batch holds the tokens of the first pass (`Prompt.opening`), the questions, and the references: a
        candidate that looks ahead may run the model on them before it opens the cache.
        """
        ...


class OwnFormat:
    """What candidates share that keep every entry, and have a number format of their own."""

    @property
    def keeps_all(self) -> bool:
        return True

    @property
    def default_budget(self) -> str:
        return ""

    def check(self, budget: str, codec: str) -> None:
        if codec != "auto":
            name = type(self).__name__.lower()
            raise OptionError(f"{name} with codec {codec!r}: it has a format of its own; leave the codec out")


@runtime_checkable
class Claims(Protocol):
    """A candidate that stores plain numbers for codes that it only works out."""

    def claims(self, cache: MillpondCache) -> float:
        """The share of a bf16 cache's bytes that the codes would take."""
        ...


@runtime_checkable
class Restores(Protocol):
    """A candidate that stores each prompt when it was read, and answers from what was restored."""

    def restored(self, model: PreTrainedModel, cache: MillpondCache, ids: Tensor) -> tuple[MillpondCache, float]:
        """Another cache after the one text of `cache`, ids (1, n), and the share of a bf16 cache that was stored.

        The caller closes it.
        """
        ...


#: Candidates that are no method of the package. Found by importing the modules of this folder, which therefore
#: import no extra at their top.
CANDIDATES: Registry[Candidate] = Registry("method", "millpond_lab.evals.candidates")

candidate = CANDIDATES.register


@dataclass(frozen=True)
class Compressed:
    """A method of the package, through `compress`."""

    method: str
    options: dict[str, Any] = field(default_factory=dict)
    calibration: str | None = None

    @property
    def keeps_all(self) -> bool:
        return not METHODS.get(self.method)(**self.options).takes_budget

    @property
    def default_budget(self) -> str:
        return DEFAULT_BUDGET if METHODS.get(self.method)(**self.options).needs_budget else ""

    def check(self, budget: str, codec: str) -> None:
        for stored in codecs_of(resolve(codec)):
            METHODS.get(self.method)(**self.options).check_codec(stored)
            if stored.calibrated and self.calibration is None:
                raise OptionError(f"codec {codec!r} needs a calibration of the model: give its file as --calibration")
        if budget:
            parsed = Budget.parse(budget)
            if parsed.kind == "tokens":
                METHODS.get(self.method)(**self.options).check_budget(int(parsed.amount))

    def open(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch: PromptBatch, budget: str, codec: str
    ) -> MillpondCache:
        calibration = self.calibration if needs_calibration(codec) else None
        return compress(
            model, self.method, budget or None, codec, tokenizer=tokenizer, calibration=calibration, **self.options
        )


def find_candidate(spec: Spec, calibration: str | None = None) -> Candidate:
    """The candidate of that name: a method of the package, or one that the harness adds.

    Args:
        calibration: a file, for the codecs that need one.

    Raises:
        OptionError: no such name or option (with a suggestion), or a value that does not fit.
    """
    if spec.name in METHODS.names():
        spec.build(METHODS)
        return Compressed(spec.name, dict(spec.options), calibration)
    if spec.name in CANDIDATES.names():
        return spec.build(CANDIDATES)
    raise unknown("method", spec.name, [*METHODS.names(), *CANDIDATES.names()])
