"""Request of a cluster: what a client wants and was sent, from which a lost request is restarted."""

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
Place = Literal["unplaced", "held", "running", "leaving", "offered", "moving"]


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
        """Append what is new of an update; return whether anything is.

        Raises:
            DataError: tokens between what is known and the update are missing.
        """
        n_tokens, n_characters = len(self.tokens), len(self.text)
        if update.first > n_tokens or update.begin > n_characters:
            raise DataError(f"an update begins at token {update.first}, and {n_tokens} are known: report this")
        new = update.tokens[n_tokens - update.first :]
        text = update.text[n_characters - update.begin :]
        if not new and not text and update.finish_reason is None:
            return False
        self.tokens += new
        self.text += text
        if update.logprobs is not None:
            self.logprobs = [*(self.logprobs or []), *update.logprobs[n_tokens - update.first :]]
        self.finish_reason, self.stop_reason = update.finish_reason, update.stop_reason
        self.kv = update.kv or self.kv
        return True


@dataclass(eq=False)
class ClusterRequest:
    """One request, from its arrival to its end.

    Args:
        request: Request as the client sent it.
        deliver: Called with each new output.

    Attributes:
        epoch: How often it was begun; updates of earlier epochs change nothing.
        replays: How often in a row it was restarted without a new token since.
        misses: How often in a row no worker took it in time from the one that offered it.
        worker: Name of the worker that has it; None: none.
        place: See `Place`.
        keys: Keys of its prompt's blocks, see `PrefixLedger`.
        spared: Tokens that its worker is thought to hold already.
        targets: Names of workers that fetched it from that one, or tried to, since it was begun.
    """

    request: Request
    deliver: Callable[[RequestOutput], None]
    epoch: int = 0
    replays: int = 0
    misses: int = 0
    worker: str | None = None
    place: Place = "unplaced"
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
        n_prompt = len(prompt) // 4 + 1 if isinstance(prompt, str) else len(_ids(prompt))
        return max((len(self._prompt_ids) or n_prompt) - self.spared, 1)

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
    def lengths(self) -> tuple[int, int]:
        """Tokens of its prompt, 0 before they are known, and of all its answers."""
        prompt = self._prompt_ids or _ids(self.request.prompt)
        return len(prompt), sum(len(answer.tokens) for answer in self._answers)

    @property
    def kv_bytes(self) -> int:
        """Bytes of its caches, as its worker said last."""
        return sum(answer.kv.kv_bytes for answer in self._answers if answer.kv is not None)

    def again(self) -> Request:
        """Return the request for another worker, with the client's tokens and the remaining time.

        The prompt is read and planned as a prompt, and the tokens of the answers are fed after it.
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
        changes = [answer.add(new) for answer, new in pairs if answer.finish_reason is None]
        if any(changes):
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
        return any(changes) or update.finished or (further and self.request.tell_read)

    def end(self, reason: FinishReason) -> None:
        """End all unfinished answers as they are."""
        for answer in self._answers:
            answer.finish_reason = answer.finish_reason or reason

    def output(self, *, finished: bool = False, error: MillpondError | None = None) -> RequestOutput:
        """Return the output so far."""
        prompt = self.request.prompt
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=self._prompt_ids or _ids(prompt),
            completions=tuple(
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
            times=replace(self._times, finished=time.monotonic()) if finished else self._times,
            prompt_logprobs=self._prompt_logprobs,
            finished=finished,
            error=error,
            read=self._read,
            cached=self._cached,
        )


def check_movable(request: Request) -> None:
    """Check that a request can move between engines.

    Raises:
        OptionError: a prompt with chunks, which are in the store of one engine.
    """
    if isinstance(request.prompt, Prompt):
        raise OptionError("prompts with chunks need the chunk store of one engine: give texts, or use millpond.LLM")


def _ids(prompt: str | tuple[int, ...] | Prompt) -> tuple[int, ...]:
    """Return the token ids of a prompt that was given as such; none of another."""
    return prompt if isinstance(prompt, tuple) else ()
