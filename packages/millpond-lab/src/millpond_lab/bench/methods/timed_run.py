"""A timed run: one method on one prompt by unmodified generate(), resumable after each round.

Many courses of one model may be open at once and decode in turns, so that a busy machine slows all of them alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from millpond.cache.layer.joint_plans import JointPlan
from millpond.cache.layer.layer_cache import LayerCache
from millpond.hf.cache import MillpondCache
from millpond.hf.compress import compress
from millpond.hf.model_profile import ModelProfile
from millpond.hf.stopwatch import Stopwatch
from millpond.models.cache_argument import cache_argument
from millpond.policy.policy import Policy
from millpond_lab.bench.methods.candidate import MethodTiming


class PlanClock:
    """Stands around the plans of the layers of `cache`, and counts the decoder's passes, inside a `with` block.

    No other cache may be planned meanwhile.

    Attributes:
        plan_s: seconds in plans for the prompt: scores, choice, and writing what stays.
        late_s: those of them that came after the first token, where a method waits for the prompt's end.
        passes: of the decoder before the first token.
    """

    def __init__(self, model: PreTrainedModel, cache: MillpondCache, watch: Stopwatch) -> None:
        self.plan_s = self.late_s = 0.0
        self.passes = 0
        self._watch = watch
        self._layer_caches = cache.layer_caches
        self._decoder = ModelProfile.of(model).modules[-1]

    def __enter__(self) -> PlanClock:
        for layer_cache in self._layer_caches:
            layer_cache.planner.plan = self._timed(layer_cache, layer_cache.planner.plan)  # type: ignore[method-assign]
        self._joint = JointPlan.run
        setattr(JointPlan, "run", self._timed_together(JointPlan.run))  # noqa: B010
        self._hook = self._decoder.register_forward_pre_hook(self._count)
        return self

    def __exit__(self, *exception: object) -> None:
        self._hook.remove()
        setattr(JointPlan, "run", self._joint)  # noqa: B010
        for layer_cache in self._layer_caches:
            del layer_cache.planner.plan

    def _count(self, *_: Any) -> None:
        self.passes += not self._watch.ticks

    def _timed(self, layer_cache: LayerCache, plan: Callable[..., None]) -> Callable[..., None]:
        def timed(*args: Any, **kwargs: Any) -> None:
            late = bool(self._watch.ticks)
            if late and not layer_cache.pending:  # a plan of decoding
                plan(*args, **kwargs)
                return
            begun = time.perf_counter()
            plan(*args, **kwargs)
            self._add(time.perf_counter() - begun, late)

        return timed

    def _timed_together(self, run: Callable[[JointPlan], bool]) -> Callable[[JointPlan], bool]:
        def timed(plan: JointPlan) -> bool:
            begun = time.perf_counter()
            done = run(plan)
            self._add(time.perf_counter() - begun, late=bool(self._watch.ticks))
            return done

        return timed

    def _add(self, spent: float, late: bool) -> None:
        self.plan_s += spent
        self.late_s += spent if late else 0.0


class TimedRun:
    """The cache of one method, open inside a `with` block; `prefill` first, then `go_on` as often as wanted."""

    def __init__(self, model: Any, policy: Policy, prompt: Tensor, budget: str) -> None:
        self._model = model
        self._policy = policy
        self._ids = prompt
        self._budget = budget
        self._steps: list[float] = []
        self._period = period_of(policy)

    def __enter__(self) -> TimedRun:
        with ExitStack() as stack:
            budget = self._budget if self._policy.takes_budget else None
            self._cache = stack.enter_context(compress(self._model, self._policy, budget))
            self._watch = Stopwatch()
            self._clock = stack.enter_context(PlanClock(self._model, self._cache, self._watch))
            self._open = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._open.close()

    def prefill(self) -> None:
        """Read the prompt, and decode a first token."""
        self._watch.begun = time.perf_counter()
        self._generate(self._watch, 1)

    def decode(self, steps: int) -> float:
        """Time `steps` of decoding, or some more, so that what comes every few steps comes equally often in each turn.

        A step before them, in which generate() begins and the prompt's plan may end, is not timed.

        Returns:
            Milliseconds of a step of this turn: see `decode_ms`.
        """
        watch = Stopwatch()
        self._generate(watch, -(-steps // self._period) * self._period + 1)
        self._steps += watch.steps
        return 1e3 * step_s(watch.steps, self._period)

    @property
    def decode_ms(self) -> float:
        """Milliseconds of a decoding step so far: the median, of means where several steps share some work."""
        return 1e3 * step_s(self._steps, self._period)

    def reading(self, ratios: Sequence[float] = ()) -> MethodTiming:
        """What was measured; ratios: of each turn to those of the anchor around it."""
        late, watch = self._clock.late_s, self._watch
        return MethodTiming(
            watch.prefill_s + late,
            self._clock.plan_s,
            self.decode_ms,
            self._cache.stats().kv_bytes,
            self._clock.passes,
            statistics.median(ratios) if ratios else None,
        )

    @torch.inference_mode()
    def _generate(self, watch: Stopwatch, new_tokens: int) -> None:
        self._ids = self._model.generate(
            self._ids,
            attention_mask=torch.ones_like(self._ids),
            **cache_argument(self._cache),
            streamer=watch,
            do_sample=False,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            disable_compile=True,
        )


def period_of(policy: Policy) -> int:
    """After how many decoding steps what the method does is done again."""
    return max(1, policy.plan_every, policy.decode_allocation.every)


def step_s(steps: Sequence[float], period: int) -> float:
    """Seconds of a decoding step: the median, of the mean of `period` steps where that many share some work."""
    period = max(1, min(period, len(steps)))
    return statistics.median(
        statistics.fmean(steps[begin : begin + period]) for begin in range(0, len(steps) - period + 1, period)
    )
