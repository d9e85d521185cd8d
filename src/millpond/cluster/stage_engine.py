"""Engines of the stages of a pipeline that serves: all have the same requests in the same steps."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import fields, replace
from typing import Any, NamedTuple

from millpond.cluster.pipeline import METHODS
from millpond.cluster.stage_model import StageLink, StageLostError, cut, is_under_way
from millpond.codec import LayerCodecs, resolve
from millpond.engine.config import EngineConfig
from millpond.engine.decode_group import DecodeGroup
from millpond.engine.engine import Engine
from millpond.engine.grammar.compiler import Grammar
from millpond.engine.llm import load
from millpond.engine.request import CacheOptions, Request
from millpond.engine.request_state import RequestState
from millpond.engine.sampling.banned_tokens import Bans
from millpond.engine.scheduler import Step
from millpond.engine.scheduler_request import SchedulerRequest
from millpond.engine.transfer.request_transfer import Arrival
from millpond.errors import OptionError, unknown
from millpond.prompt_marks import PromptMarks

#: Settings of an engine that each stage keeps by itself; others hold their default.
SETTINGS = frozenset(
    {
        "method",
        "budget",
        "codec",
        "preset",
        "budget_floor",
        "kv_memory",
        "max_step_tokens",
        "max_running",
        "page_slots",
        "prefix_cache",
        "max_model_len",
        "runner",
        "native_layers",
    }
)
#: A request to add, several that are planned together, or the name of one to end.
Change = Request | tuple[Request, ...] | str


class StepOrder(NamedTuple):
    """Changes that a stage makes before its next step, in this order."""

    seconds: float | None  #: what the last pass took in the first stage; None: no pass was timed since the last order
    changes: tuple[Change, ...]  #: changes of the requests since then


def check_config(config: EngineConfig) -> None:
    """Check that each stage can keep the settings of an engine by itself.

    Raises:
        OptionError: a setting or a method that needs all layers in one process.
    """
    for field in fields(EngineConfig):
        value = getattr(config, field.name)
        if field.name not in SETTINGS and value != getattr(_DEFAULTS, field.name):
            raise OptionError(
                f"{field.name}={value!r} is for a model in one process; leave it out, or serve without a pipeline"
            )
    if config.runner not in ("auto", "modules") or not config.native_layers:
        raise OptionError("the stages of a pipeline run their layers as modules; leave runner and native_layers out")
    method, _, codec, _ = config.choice
    _check_choice(str(method), codec)


_DEFAULTS = EngineConfig()


def _check_choice(method: str, codec: Any) -> None:
    if method not in METHODS:
        raise unknown("method of a pipeline", method, METHODS)
    if codec is not None and isinstance(resolve(codec), LayerCodecs):
        raise OptionError(f"codec={codec!r} differs by layer, and a pipeline has one format for all; give one name")


class StageEngine(Engine):
    """Engine of the layers of one stage.

    Args:
        model: A name or folder.
        config: Settings of all stages together.
        dtype: As of `LLM`.
        threads: Threads of this process.
        number: Number of the stage, from 0.
        stages: Number of all of them.
        before: Link to the stage before; None: this is the first.
        behind: Link to the stage behind; None: this is the last.

    Raises:
        OptionError, UnsupportedModelError: see `cut`; or a limit of memory for layers that cannot be shared out evenly.
    """

    _runs_ahead = False  # a pass ends when its last stage has told the tokens

    def __init__(
        self,
        model: str,
        config: EngineConfig,
        dtype: str | None,
        threads: int,
        number: int,
        stages: int,
        before: StageLink | None,
        behind: StageLink | None,
    ) -> None:
        loaded, tokenizer = load(model, None, dtype, threads)
        n_layers = loaded.config.num_hidden_layers
        self._cut = cut(loaded, number, stages, before, behind)
        if config.kv_limit is not None:
            if n_layers % stages:
                raise OptionError(
                    f"kv_memory={config.kv_memory} is shared out evenly over stages, and {n_layers} layers are not "
                    f"over {stages}: their requests would not fit alike. Leave it out, or take another number of stages"
                )
            config = replace(config, kv_memory=config.kv_limit // stages)
        super().__init__(self._cut, tokenizer, replace(config, runner="modules"))

    def _fail_step(
        self, groups: list[DecodeGroup], reading: list[tuple[RequestState, int]], error: Exception
    ) -> list[RequestState]:
        """Handle a pass that failed in all stages.

        Raises:
            StageLostError: it failed in this one alone, where the others wait for the rest of it.
        """
        if is_under_way(self._cut):
            raise StageLostError(f"a pass ended within its layers: {error}") from error
        return super()._fail_step(groups, reading, error)


class FirstStageEngine(StageEngine):
    """Engine of the first stage, which takes requests and tells the others what to do.

    Args:
        tell: Sends an order to all other stages.
        **options: Of `StageEngine`.
    """

    def __init__(self, tell: Callable[[StepOrder], None], **options: Any) -> None:
        super().__init__(**options)
        self._tell = tell
        self._changes: list[Change] = []
        self._seconds: float | None = None

    def add(self, request: Request, grammar: Grammar | None = None, bans: Bans | None = None) -> None:
        """Add a request to all stages; see `Engine.add`.

        Raises:
            OptionError: also what needs all layers in one process.
        """
        request = self._checked(request)
        super().add(request, grammar, bans)
        self._changes.append(replace(request, deadline=None))

    def add_batch(self, requests: Sequence[Request], levels: int | None = None) -> None:
        """Add requests that are known together; see `Engine.add_batch`.

        Raises:
            OptionError: also `levels`, or what needs all layers in one process.
        """
        if levels is not None:
            raise OptionError(f"levels={levels}: the stages of a pipeline plan with all levels; leave it out")
        checked = [self._checked(request) for request in requests]
        super().add_batch(checked)
        self._changes.append(tuple(replace(request, deadline=None) for request in checked))

    def cancel(self, request_id: str) -> None:
        """End a request in all stages; see `Engine.cancel`."""
        super().cancel(request_id)
        self._changes.append(request_id)

    def begin_export(self, request_id: str) -> Future[bytes]:
        """Refuse: the entries of a request are in several processes.

        Raises:
            OptionError: always.
        """
        raise OptionError(f"{request_id!r} is in several processes, and only requests of one process can be moved")

    def begin_checkpoint(self, request_id: str) -> Future[bytes] | None:
        """Refuse, see `begin_export`."""
        return self.begin_export(request_id)

    def read_request(self, data: bytes | bytearray | memoryview, request: Request | None = None) -> Arrival:
        """Refuse: a request of another engine has the entries of all layers.

        Raises:
            OptionError: always.
        """
        raise OptionError("a pipeline continues no requests of other engines; send the prompt anew")

    def _checked(self, request: Request) -> Request:
        """Return a request with a seed that all stages draw with.

        Raises:
            OptionError: see `add`.
        """
        if request.marks != PromptMarks():
            raise OptionError("marks of a prompt are for a model in one process; leave them out")
        if request.cache != CacheOptions():
            if request.cache.options:
                raise OptionError("options of a method are for a model in one process; leave them out")
            completed = self._parts.decode_groups.complete(request.cache)
            _check_choice(str(completed.method), completed.codec)
        if request.params.seed is not None:
            return request
        return replace(request, params=replace(request.params, seed=secrets.randbits(63)))

    def _begin_step(self) -> list[SchedulerRequest]:
        expired = super()._begin_step()
        order = StepOrder(self._seconds, (*self._changes, *(scheduled.key for scheduled in expired)))
        self._changes, self._seconds = [], None
        try:
            self._tell(order)
        except OSError:
            raise StageLostError("a stage has ended") from None
        return expired

    def _end_step(self, step: Step, seconds: float) -> None:
        super()._end_step(step, seconds)
        self._seconds = seconds


class LaterStageEngine(StageEngine):
    """Engine of another stage, which does what the first one tells.

    Args:
        **options: Of `StageEngine`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._timed: Step | None = None

    def follow(self, order: StepOrder) -> None:
        """Run a step of the first stage."""
        timed, self._timed = self._timed, None
        if timed is not None and order.seconds is not None:
            super()._end_step(timed, order.seconds)
        for change in order.changes:
            if isinstance(change, str):
                self.cancel(change)
            elif isinstance(change, Request):
                self.add(change)
            else:
                self.add_batch(change)
        self.step()

    def _end_step(self, step: Step, seconds: float) -> None:
        """Keep the step until the first stage has told its seconds."""
        self._timed = step
