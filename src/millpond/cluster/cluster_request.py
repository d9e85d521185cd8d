"""ClusterRequest: what a client wants and what it has been sent, from which a lost request is begun again."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from millpond.cluster.messages import CompletionDelta, RequestDelta
from millpond.engine.chunks.prompt import Prompt
from millpond.engine.outputs import Completion, FinishReason, KVStats, RequestOutput, Times, TokenLogprob
from millpond.engine.request import Request
from millpond.errors import DataError, MillpondError, OptionError

#: Where a request is: with no worker; with none until others have had their last try; at one; at one that is being
#: drained; offered by one; on its way to another.
Place = Literal["nowhere", "held", "running", "leaving", "offered", "moving"]


@dataclass(slots=True)
class SentCompletion:
    """One answer as it was sent."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    kv: KVStats | None = None

    def add(self, update: CompletionDelta) -> bool:
        """Take in what is new of an update; returns whether anything is. What is known already changes nothing.

        Raises:
            DataError: tokens between what is known and the update are missing.
        """
        known, shown = len(self.tokens), len(self.text)
        if update.first > known or update.begin > shown:
            raise DataError(f"an update begins at token {update.first}, and {known} are known: report this")
        new = update.tokens[known - update.first :]
        text = update.text[shown - update.begin :]
        if not new and not text and update.finish_reason is None:
            return False
        self.tokens += new
        self.text += text
        if update.logprobs is not None:
            self.logprobs = [*(self.logprobs or []), *update.logprobs[known - update.first :]]
        self.finish_reason, self.stop_reason = update.finish_reason, update.stop_reason
        self.kv = update.kv or self.kv
        return True


@dataclass(eq=False)
class ClusterRequest:
    """One request, from its arrival to its end.

    Args:
        request: as the client sent it. deliver: called with each new output.

    Attributes:
        epoch: how often it was begun; updates of earlier ones change nothing. replays: how often in a row it was begun
            again without a new token since. worker: name of the one that has it. place: see `Place`.
        misses: how often in a row no worker took it in time from the one that offered it.
        targets: names of workers that fetched it from that one, or tried to, since it was begun.
        keys: of its prompt's blocks, see `PrefixLedger`. spared: tokens that its worker is thought to hold already.
    """

    request: Request
    deliver: Callable[[RequestOutput], None]
    epoch: int = 0
    replays: int = 0
    misses: int = 0
    worker: str | None = None
    place: Place = "nowhere"
    keys: tuple[bytes, ...] = ()
    spared: int = 0
    targets: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        params = self.request.params
        if params.seed is None:  # so that what is drawn again is the same
            self.request = replace(self.request, params=replace(params, seed=secrets.randbits(63)))
        self._arrived = time.monotonic()
        self._times = Times(self._arrived)
        self._answers = [SentCompletion() for _ in range(params.n)]
        self._prompt_ids: tuple[int, ...] = ()
        self._prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
        self._read = self._cached = 0

    @property
    def name(self) -> str:
        """What it is called in a worker's engine: another name each time that it is begun."""
        return f"{self.request.request_id}#{self.epoch}"

    @property
    def unread(self) -> int:
        """Tokens of the prompt that its worker still has to read, about; 0 behind the first token."""
        if self.begun:
            return 0
        prompt = self.request.prompt
        given = len(prompt) // 4 + 1 if isinstance(prompt, str) else len(_ids(prompt))
        return max((len(self._prompt_ids) or given) - self.spared, 1)

    @property
    def begun(self) -> bool:
        """Whether there is a first token."""
        return any(answer.tokens for answer in self._answers)

    @property
    def full_bytes(self) -> int:
        """Bytes of full caches of its tokens."""
        return sum(answer.kv.full_kv_bytes for answer in self._answers if answer.kv is not None)

    @property
    def length(self) -> int:
        """Tokens of its longest answer."""
        return max(len(answer.tokens) for answer in self._answers)

    @property
    def kv_bytes(self) -> int:
        """Bytes of its caches, as its worker said last."""
        return sum(answer.kv.kv_bytes for answer in self._answers if answer.kv is not None)

    def again(self) -> Request:
        """The request for another worker, with the tokens that the client has; and what is left of its time.

        The prompt is read and planned as a prompt, and the tokens of the answers are fed behind it.
        """
        request, tokens = self.request, tuple(tuple(answer.tokens) for answer in self._answers)
        deadline = request.deadline
        if deadline is not None:
            deadline = max(deadline - (time.monotonic() - self._arrived), 1e-9)
        known = tokens if any(tokens) else request.known
        return replace(request, request_id=self.name, known=known, deadline=deadline)

    def add(self, update: RequestDelta, now: float) -> bool:
        """Take in an update of the current epoch; returns whether the client has to hear of it."""
        self._prompt_ids = update.prompt_ids or self._prompt_ids
        self._prompt_logprobs = update.prompt_logprobs or self._prompt_logprobs
        pairs = zip(self._answers, update.answers, strict=False)
        grown = [answer.add(new) for answer, new in pairs if answer.finish_reason is None]
        if any(grown):
            self.replays = 0
        started, first = (None if age is None else now - age for age in (update.started_s, update.first_token_s))
        times = self._times
        self._times = replace(
            times,
            started=started if times.started is None else times.started,
            first_token=first if times.first_token is None else times.first_token,
        )
        further = update.read > self._read
        if further:
            self._read, self._cached = update.read, update.cached
        return any(grown) or update.finished or (further and self.request.tell_read)

    def end(self, reason: FinishReason) -> None:
        """All answers that grow end as they are."""
        for answer in self._answers:
            answer.finish_reason = answer.finish_reason or reason

    def output(self, *, finished: bool = False, error: MillpondError | None = None) -> RequestOutput:
        """As far as it has come."""
        prompt = self.request.prompt
        return RequestOutput(
            self.request.request_id,
            prompt if isinstance(prompt, str) else None,
            self._prompt_ids or _ids(prompt),
            tuple(
                Completion(
                    index,
                    one.text,
                    tuple(one.tokens),
                    None if one.logprobs is None else tuple(one.logprobs),
                    one.finish_reason,
                    one.stop_reason,
                    one.kv,
                )
                for index, one in enumerate(self._answers)
            ),
            replace(self._times, finished=time.monotonic()) if finished else self._times,
            self._prompt_logprobs,
            finished,
            error,
            self._read,
            self._cached,
        )


def check_movable(request: Request) -> None:
    """
    Raises:
        OptionError: a prompt with chunks, which lie in the store of one engine.
    """
    if isinstance(request.prompt, Prompt):
        raise OptionError("prompts with chunks need the chunk store of one engine: give texts, or use millpond.LLM")


def _ids(prompt: str | tuple[int, ...] | Prompt) -> tuple[int, ...]:
    """The token ids of a prompt that was given as such; none of another."""
    return prompt if isinstance(prompt, tuple) else ()
