"""Time that the layers of a cache spend on planning a prompt, and passes that the model makes for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel

from millpond.cache.layer.layer_cache import LayerCache
from millpond.hf.cache import MillpondCache
from millpond.hf.model_profile import ModelProfile
from millpond.hf.stopwatch import Stopwatch


class PlanClock:
    """Stands around the plan step of each layer of `cache`, and counts the decoder's passes, inside a `with` block.

    Attributes:
        plan_s: seconds in plans for the prompt: scores, choice, and writing what stays.
        late_s: those of them that came after the first token, where a method waits for the prompt's end.
        passes: of the decoder before the first token.
    """

    def __init__(self, model: PreTrainedModel, cache: MillpondCache, watch: Stopwatch) -> None:
        self.plan_s = self.late_s = 0.0
        self.passes = 0
        self._watch = watch
        self._cores = cache.layer_caches
        self._decoder = ModelProfile.of(model).modules[-1]

    def __enter__(self) -> PlanClock:
        for core in self._cores:
            core.planner.plan = self._timed(core, core.planner.plan)  # type: ignore[method-assign]
        self._hook = self._decoder.register_forward_pre_hook(self._count)
        return self

    def __exit__(self, *exception: object) -> None:
        self._hook.remove()
        for core in self._cores:
            del core.planner.plan

    def _count(self, *_: Any) -> None:
        self.passes += not self._watch.ticks

    def _timed(self, core: LayerCache, plan: Callable[..., None]) -> Callable[..., None]:
        def timed(*args: Any, **kwargs: Any) -> None:
            late = bool(self._watch.ticks)
            if late and not core.pending:  # a plan of decoding
                plan(*args, **kwargs)
                return
            begun = time.perf_counter()
            plan(*args, **kwargs)
            spent = time.perf_counter() - begun
            self.plan_s += spent
            self.late_s += spent if late else 0.0

        return timed
