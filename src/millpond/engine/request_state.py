"""State of one request in flight."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from types import TracebackType

import numpy as np
import torch

from millpond.cache.batch_cache import BatchCache
from millpond.cache.state.attention_samples import AttentionSamples
from millpond.engine.chunks.blend import PromptBlend
from millpond.engine.chunks.prompt import Prompt, PromptSpan
from millpond.engine.completion import CompletionState
from millpond.engine.decode_group import DecodeGroup
from millpond.engine.outputs import RequestOutput, Times, TokenLogprob
from millpond.engine.prompt_images import PromptImages
from millpond.engine.request import Request
from millpond.engine.scheduler_request import MemoryNeed, RequestStatus, SchedulerRequest
from millpond.errors import MillpondError
from millpond.prompt_marks import PromptMarks

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Incident:
    """One pass that failed for several requests.

    Attributes:
        suspects: Requests that have neither failed nor passed alone since.
        failed: How many have failed alone.
        passed: How many have passed alone.
    """

    suspects: set[RequestState] = field(repr=False)
    failed: int = 0
    passed: int = 0


@dataclass(slots=True, eq=False)
class Suspicion:
    """Record of a request that took part in a failed pass, until it has passed alone.

    Attributes:
        incident: The pass.
        read: Tokens of its prompt that were read before.
        decoding: Whether its answers were in the pass.
        home: Batch that it decoded in, or would have.
        alone: Whether it takes no part in passes of others at all, since a second one has failed.
    """

    incident: Incident
    read: int
    decoding: bool
    home: DecodeGroup
    alone: bool


@dataclass(slots=True, eq=False)
class RequestState:
    """A request, its scheduler entry, its answers and, while it does not decode, its cache.

    Attributes:
        request: The request as the caller gave it.
        ids: Tokens of the prompt.
        scheduled: The scheduler's entry.
        group: Batch that it decodes in.
        completions: Its answers.
        times: Its moments so far.
        private_cache: Its own cache; None while it decodes or has not begun.
        prompt_logprobs: Log probabilities of the prompt's tokens; None where not requested.
        error: Cause of an early end.
        spans: Parts of a prompt that holds chunks.
        blend: Choice of the tokens to compute of such a prompt, once it has begun; None: all are computed.
        shared_prefix: Shared prefix that it begins with, while it needs its pages to stay.
        users: Of a shared prefix, the requests that begin with it.
        waited: Steps in which it waited for others to read what it begins with.
        access: Number under which the prefix tree knows its prompt; None: it has kept nothing yet.
        stops: Ends of blocks of the prompt at which sums over its queries are kept, ascending.
        reader_read: Tokens that the awaited request had read when this one last waited.
        restored: Tokens of its prompt that the cache of an earlier turn had read.
        restored_exact: Whether these are as the whole prompt would give them.
        failed_at: Tokens of its prompt that were read, and of its answers, when a pass with a part of it last failed.
        suspicion: Record of such a pass; None: there was none, or the request has passed alone since.
        whole_need: Most bytes that it holds without a shared prefix.
        images: Images of its prompt; None: it has none.
        behind: Block of its prompt from which on it is decoded or behind decoded ones; None: none is.
        begun_with: Blocks of its prompt that others had read, where there is a storage codec.
        decoded: Tokens of its prompt that came from codes.
        samples: Samples of the attention of its prompt, once it was read; None: none were taken.
        ids_array: `ids` as an array, (prompt,) int64.
        share_ids: The same, with tokens of images by what they show: prompts share beginnings by these.
    """

    request: Request
    ids: tuple[int, ...]
    scheduled: SchedulerRequest
    group: DecodeGroup
    completions: list[CompletionState]
    times: Times
    private_cache: BatchCache | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    error: MillpondError | None = None
    spans: list[PromptSpan] = field(default_factory=list)
    blend: PromptBlend | None = None
    shared_prefix: RequestState | None = field(default=None, repr=False)
    users: set[RequestState] = field(default_factory=set, repr=False)
    waited: int = 0
    access: int | None = None
    stops: list[int] = field(default_factory=list)
    reader_read: int = 0
    restored: int = 0
    restored_exact: bool = True
    failed_at: tuple[int, int] = (-1, 0)
    suspicion: Suspicion | None = None
    images: PromptImages | None = None
    behind: int | None = None
    begun_with: int = 0
    decoded: int = 0
    samples: AttentionSamples | None = field(default=None, repr=False)
    whole_need: MemoryNeed = field(init=False)
    ids_array: np.ndarray = field(init=False)  #: (prompt,) int64, `ids` again
    share_ids: np.ndarray = field(init=False)  #: (prompt,) int64

    def __post_init__(self) -> None:
        self.ids_array = np.array(self.ids, dtype=np.int64)
        self.share_ids = self.ids_array if self.images is None else self.images.share_ids(self.ids_array)
        self.whole_need = self.scheduled.memory_need

    @property
    def marks(self) -> PromptMarks:
        """Spans of its prompt with a treatment of their own."""
        return self.request.marks

    @property
    def unfinished(self) -> list[CompletionState]:
        """Answers that are not finished."""
        return [completion for completion in self.completions if not completion.finished]

    @property
    def failed(self) -> bool:
        """Whether an error has ended it."""
        return self.error is not None and not self.unfinished

    def advanced(self) -> bool:
        """Return whether it has advanced since the last failed pass; called when a pass failed."""
        previous, self.failed_at = (
            self.failed_at,
            (self.scheduled.num_computed_tokens, sum(len(completion.tokens) for completion in self.completions)),
        )
        return previous < self.failed_at

    @property
    def replaying(self) -> bool:
        """Whether its cache began again and has not reached the last token of its answers."""
        return any(completion.replaying for completion in self.unfinished)

    @property
    def tainted(self) -> bool:
        """Whether pages of its prompt hold entries that were not computed for it.

        No exact prompt may have such pages.
        """
        of_blend = self.blend is not None and self.blend.tainted
        return self.restored > 0 or bool(self.marks.forget) or of_blend or self._was_coded

    @property
    def exact(self) -> bool:
        """Whether all tokens of its prompt are as the whole prompt would give them, before its method's plan."""
        of_blend = self.blend is None or self.blend.exact
        return self.restored_exact and not self.marks.forget and of_blend and not self._was_coded

    @property
    def _was_coded(self) -> bool:
        """Whether its cache, or that of an answer, was decoded from codes."""
        return any(completion.was_coded for completion in self.completions)

    @property
    def rolled(self) -> bool:
        """Whether gaps of its own cache have closed, so that positions there are not those of its text."""
        return self.private_cache is not None and bool(self.private_cache.tracker.closed.any())

    @property
    def position(self) -> int:
        """Position of the next token of its prompt, in its own cache."""
        return self.scheduled.num_computed_tokens - (
            int(self.private_cache.tracker.closed[0]) if self.rolled and self.private_cache else 0
        )

    def compacts_after(self, n: int) -> bool:
        """Return whether gaps close once the next `n` tokens of its prompt are read.

        They close only if more tokens follow.
        """
        reach = self.group.cache_factory.reach
        return (
            reach is not None
            and self.position + n == reach
            and self.scheduled.num_computed_tokens + n < self.scheduled.num_prompt_tokens
        )

    def drops_span_after(self, n: int) -> bool:
        """Return whether a span is dropped once the next `n` tokens of its prompt are read."""
        return any(end == self.scheduled.num_computed_tokens + n for _, end in self.marks.forget)

    def move_group(self) -> None:
        """Move its answers to the group that passes steps, or back, as the scheduler chose.

        Called before a step.
        """
        if (
            self.scheduled.status is RequestStatus.DECODE
            and self.private_cache is None
            and self.group.is_skippable != self.scheduled.is_skippable
        ):
            unfinished = self.unfinished
            batch_cache = self.group.part(unfinished)
            self.group = self.group.other.with_room(len(unfinished))
            self.group.join(batch_cache, unfinished)

    def cache(self, index: int = 0) -> tuple[BatchCache, int] | None:
        """Return the cache that holds an answer and the index of its sequence, or None."""
        if self.scheduled.status is RequestStatus.PREEMPTED:
            return None
        if self.private_cache is not None:
            return (self.private_cache, 0) if self.private_cache.n_seq else None
        completion, group = self.completions[index], self.group
        return (group.batch_cache, group.completions.index(completion)) if completion in group.completions else None

    def begin_again(self) -> None:
        """Drop its own cache and what was read.

        Its prompt is read again, and then the tokens that it has.
        """
        if self.private_cache is not None:
            self.private_cache.clear()
            self.private_cache = None
        self.samples = self.behind = None
        self.decoded = self.begun_with = 0
        if self.blend is not None:
            self.blend.release()
            self.blend = None
        self.restored, self.restored_exact = 0, True
        self.waited = self.reader_read = 0
        if self.prompt_logprobs is not None:
            self.prompt_logprobs = [None]
        for completion in self.unfinished:
            completion.begin_again()

    def fail(self, error: Exception) -> None:
        """End all answers because of an error.

        The text of an unknown error may be about others; it stays the cause.
        """
        if isinstance(error, MillpondError):
            self.error = self.error or error
        else:
            name = self.request.request_id
            _log.error("request %s failed", name, exc_info=error)
            if self.error is None:
                self.error = MillpondError(
                    f"request {name!r} failed with {type(error).__name__}; under this id the log of the engine says "
                    "where"
                )
                self.error.__cause__ = error
        for completion in self.unfinished:
            completion.end("error")

    def own_work(self, *, in_pass: bool = False) -> OwnWork:
        """Return a context for work on this request alone: an exception ends nothing else.

        Args:
            in_pass: Whether it runs in a pass, which fails as a whole where a device runs out of memory, so that its
                requests wait.
        """
        return OwnWork(self, (torch.OutOfMemoryError,) if in_pass else ())

    def to_output(self) -> RequestOutput:
        """Return the request and its answers so far."""
        prompt = self.request.prompt
        text = prompt.text if isinstance(prompt, Prompt) else prompt
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=text if isinstance(text, str) else None,
            prompt_token_ids=self.ids,
            completions=tuple(completion.to_output() for completion in self.completions),
            times=self.times,
            prompt_logprobs=None if self.prompt_logprobs is None else tuple(self.prompt_logprobs),
            finished=not self.unfinished,
            error=self.error,
            read=self.scheduled.num_computed_tokens,
            cached=min(
                self.scheduled.num_computed_tokens,
                max((completion.cached for completion in self.completions), default=0),
            ),
        )


@dataclass(frozen=True, slots=True)
class OwnWork:
    """Context of work for one request: an exception ends it, and goes no further.

    Attributes:
        state: The request.
        goes_on: Exceptions that do go further, and end no request here.
    """

    state: RequestState
    goes_on: tuple[type[Exception], ...] = ()

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> bool:
        if isinstance(error, Exception) and not isinstance(error, self.goes_on):
            self.state.fail(error)
            return True
        return False
