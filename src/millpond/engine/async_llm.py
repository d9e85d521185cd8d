"""AsyncLLM: a model with an engine, for a server: requests come and go while one thread steps the engine."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing, suppress
from os import PathLike
from typing import Any, TypeVar, Unpack

from millpond.engine.config import EngineConfig
from millpond.engine.engine import Engine
from millpond.engine.grammar.compiler import Grammar
from millpond.engine.llm import open_engine
from millpond.engine.mailbox import Mailbox, deliver
from millpond.engine.offload.open import Placement
from millpond.engine.offload.options import LoadOptions
from millpond.engine.options import LLMOptions
from millpond.engine.outputs import CacheSnapshot, EngineStats, RequestOutput
from millpond.engine.request import CacheOptions, Request
from millpond.engine.sampling.banned_tokens import Bans
from millpond.engine.sessions.store import SessionStore
from millpond.errors import MillpondError
from millpond.images.reader import ImageReader
from millpond.kernels.thread_count import end_own_threads
from millpond.setting import shows_options, split_options

Call = Callable[[], None]
#: Between two steps calls may take this share of the last step's time, so that many arriving requests do not delay
#: those that decode; at least one call is made.
CALLS_SHARE = 0.2


class CallQueue:
    """Calls that wait: those of one client keep their order, and the clients take turns."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[Call]] = {}  # the client whose turn it is comes first

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, call: Call, client: str = "") -> None:
        """Add a call."""
        self._waiting.setdefault(client, deque()).append(call)

    def take(self) -> Call:
        """Remove the next call from the queue and return it.

        Raises:
            LookupError: none waits.

        Example:
            >>> queue = CallQueue()
            >>> for client in "aab":
            ...     queue.put(lambda client=client: print(client), client)
            >>> while queue:
            ...     queue.take()()
            a
            b
            a
        """
        if not self._waiting:
            raise LookupError("no call waits")
        client = next(iter(self._waiting))
        calls = self._waiting.pop(client)
        call = calls.popleft()
        if calls:
            self._waiting[client] = calls
        return call


T = TypeVar("T")

#: Seconds for which calls are made where nothing is in flight, so that requests that arrive together are in one step.
_CALLS_IDLE_S = 0.02
#: Most requests that are named of a step that does not end.
_SHOWN = 8

_log = logging.getLogger(__name__)


class AsyncLLM:
    """Answers requests of many tasks; safe to use from any event loop and thread.

    Args:
        model: A name or folder, or a loaded transformers decoder.
        config: Settings of the engine; None for the defaults.
        model_name: Name that clients use; None: the model's own.
        **options: As of `LLM`.

    Attributes:
        plan: As of `LLM`.
        leave: Called in the engine's thread after each step, with outputs that are not the last of their requests;
            True: the request has left the engine, and its stream ends. None: nothing is called.
        busy_s: Seconds that all steps took so far.

    Raises:
        OptionError, BudgetError, UnsupportedModelError: as `LLM`.
    """

    @shows_options(LoadOptions, EngineConfig)
    def __init__(
        self,
        model: Any,
        config: EngineConfig | None = None,
        *,
        model_name: str | None = None,
        **options: Unpack[LLMOptions],
    ) -> None:
        loading, settings = split_options("AsyncLLM", options, LoadOptions, EngineConfig)
        self._engine, self.plan = self._open(model, EngineConfig.of(config, settings), LoadOptions(**loading))
        self.model_name = model_name or str(
            model if isinstance(model, str | PathLike) else getattr(model, "name_or_path", "") or "model"
        )
        self.leave: Callable[[Engine, RequestOutput], bool] | None = None
        self._mailboxes: dict[str, Mailbox] = {}  # only the engine's thread reads it
        self._calls = CallQueue()  # under the lock of `_changed`
        self._changed = threading.Condition()
        self._closing = self._stopped = False
        self._failed: BaseException | None = None
        self.busy_s = 0.0
        self._since: float | None = None  # when the engine's thread began what it does now; None: it waits
        end_own_threads()  # from here on the engine's thread computes, with threads of its own
        self._thread = threading.Thread(target=self._work, name="millpond-engine", daemon=True)
        self._thread.start()

    def _open(self, model: Any, config: EngineConfig, loading: LoadOptions) -> tuple[Engine, Placement | None]:
        """Return the engine, and the placement of weights and KV."""
        return open_engine(model, config, loading)

    # ------------------------------------------------------------------ requests

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, or None."""
        return self._engine.tokenizer

    @property
    def images(self) -> ImageReader | None:
        """Reader of images; None: the model takes text alone."""
        return self._engine.images

    @property
    def vocab_size(self) -> int:
        """Number of token ids: those below it are tokens."""
        return self._engine.vocab_size

    @property
    def context_length(self) -> int:
        """Tokens that the model sees at a time."""
        return self._engine.context_length or sys.maxsize

    @property
    def text_limit(self) -> int:
        """Tokens of a prompt and its answer together."""
        return self._engine.text_limit or sys.maxsize

    @property
    def cache(self) -> CacheOptions:
        """Cache options of requests that name none."""
        return self._engine.cache

    @property
    def codes(self) -> str | None:
        """Mark of the codes in which its requests move, see `Engine.codes`."""
        return self._engine.codes

    @property
    def sessions(self) -> SessionStore | None:
        """Caches of finished turns on the disk; None: none are stored."""
        return self._engine.sessions

    def stats(self) -> EngineStats:
        """Return the figures of the engine after its last step."""
        return self._engine.stats()

    def trouble(self, limit_s: float) -> str | None:
        """Return why nothing moves; None: all is well.

        The engine's thread ended, or has run one step for more than `limit_s` seconds. Safe to call from any thread.
        """
        if self._failed is not None:
            return f"the engine's thread ended with {type(self._failed).__name__}"
        since = self._since
        if since is not None and (elapsed_s := time.monotonic() - since) > limit_s:
            names = self._engine.in_step
            request_text = f", with {_shown(names)} in it" if names else ""
            return f"one step of the engine has taken {elapsed_s:.0f} seconds{request_text}"
        return None

    @property
    def step_age_s(self) -> float:
        """Seconds since the engine's thread began its present work; 0 where it waits.

        Safe to read from any thread.
        """
        since = self._since
        return 0.0 if since is None else time.monotonic() - since

    async def stream(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        """Yield the answers of a request as they grow, each time all of them.

        A slow reader gets fewer outputs, never old ones. Closing the generator cancels the request.

        Raises:
            MillpondError: the request is refused, or an error ended it.
        """
        mailbox = Mailbox(asyncio.get_running_loop())
        try:
            grammar = await self._engine.grammars.wait_for(request.params)
            bans = await asyncio.to_thread(self._engine.bans_of, request.params) if request.params.forbids else None
            await self.call(lambda engine: self._take_in(engine, request, mailbox, grammar, bans), request.client)
            async with aclosing(self._outputs(request.request_id, mailbox)) as outputs:
                async for output in outputs:
                    yield output
        finally:
            if not mailbox.finished:
                self._post(lambda: self._drop(request.request_id, mailbox))

    async def _outputs(self, request_id: str, mailbox: Mailbox) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of a request that the engine has."""
        try:
            while not mailbox.finished:
                output = await mailbox.next()
                if output is None:
                    return
                if output.error is not None:
                    raise output.error
                yield output
        finally:
            if not mailbox.finished:
                self._post(lambda: self._drop(request_id, mailbox))

    async def export_request(self, request_id: str) -> bytes:
        """End a request and return its bytes, see `Engine.export_request`.

        The stream of the request ends without a last output. Others go on while it is coded.
        """

        def export(engine: Engine) -> Future[bytes]:
            data = engine.begin_export(request_id)
            mailbox = self._mailboxes.pop(request_id, None)
            if mailbox is not None:
                mailbox.end()
            return data

        return await asyncio.wrap_future(await self.call(export))

    async def checkpoint(self, request_id: str) -> bytes | None:
        """Return a copy of a request that decodes and continues, see `Engine.checkpoint`.

        Others go on while it is coded.
        """
        copy = await self.call(lambda engine: engine.begin_checkpoint(request_id))
        if copy is None:
            return None
        data: bytes = await asyncio.wrap_future(copy)
        return data

    async def import_request(
        self, data: bytes | memoryview, request: Request | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continue a request of another engine, see `Engine.import_request`.

        Its outputs arrive as those of `stream`. Others go on while it is decoded.

        Raises:
            MillpondError: it is refused; nothing is left behind.
        """
        mailbox = Mailbox(asyncio.get_running_loop())
        arrival = await asyncio.to_thread(self._engine.read_request, data, request)

        def take_over(engine: Engine) -> str:
            if self._closing or self._stopped:
                raise MillpondError("the engine is closing and takes no requests any more")
            request_id = engine.import_request(arrival)
            self._mailboxes[request_id] = mailbox
            return request_id

        return self._outputs(await self.call(take_over), mailbox)

    async def batch(self, requests: Sequence[Request]) -> AsyncGenerator[RequestOutput, None]:
        """Yield the finished answers of requests that are known together, see `Engine.add_batch`.

        Each comes when it is finished. A request that ended because of an error has it in its output. Closing the
        generator cancels those that are not finished.

        Raises:
            MillpondError: a request is refused, and none was added.
        """
        mailboxes = {request.request_id: Mailbox(asyncio.get_running_loop()) for request in requests}

        def take_in(engine: Engine) -> None:
            if self._closing or self._stopped:
                raise MillpondError("the engine is closing and takes no requests any more")
            engine.add_batch(requests)
            self._mailboxes.update(mailboxes)

        await self.call(take_in)
        waiting = [asyncio.create_task(mailbox.last()) for mailbox in mailboxes.values()]
        try:
            for finished in asyncio.as_completed(waiting):
                yield await finished
        finally:
            for task in waiting:
                task.cancel()
            self._post(lambda: self._drop_all(mailboxes))

    async def cancel(self, request_id: str) -> None:
        """End a request with what it has; one that has ended already is no error."""
        await self.call(lambda engine: engine.cancel(request_id))

    async def memory(self, request_id: str, layer: int, client: str | None = None) -> CacheSnapshot | None:
        """Return the entries that a layer holds of a request's first answer; see `Engine.memory`."""
        return await self.call(lambda engine: engine.memory(request_id, layer, client))

    async def call(self, ask: Callable[[Engine], T], client: str = "") -> T:
        """Run `ask` in the engine's thread between two steps, and return its result.

        Args:
            ask: Function of the engine.
            client: Id of the client. Clients take turns.

        Raises:
            MillpondError: the engine was closed. Also what `ask` raises.
        """
        answer: Future[T] = Future()

        def run() -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                answer.set_result(ask(self._engine))
            except Exception as error:
                answer.set_exception(error)

        if not self._post(run, client):
            raise MillpondError("the engine was closed and takes no requests any more")
        return await asyncio.wrap_future(answer)

    async def close(self, *, drain: bool = True, timeout: float | None = None) -> None:
        """Take no more requests and stop; with `drain` running ones may finish first.

        Args:
            drain: Let running requests finish.
            timeout: Most seconds that this may take; a longer step is not interrupted. None: any time.
        """
        give_up_at = None if timeout is None else time.monotonic() + timeout

        def join() -> None:
            self._thread.join(None if give_up_at is None else max(0.0, give_up_at - time.monotonic()))

        with self._changed:
            self._closing = True
            self._changed.notify()
        if drain:
            await asyncio.to_thread(join)
        with self._changed:
            self._stopped = True
            self._changed.notify()
        await asyncio.to_thread(join)
        if self._thread.is_alive():
            _log.error("the engine's thread did not end within %s s and is left alone", timeout)

    # ------------------------------------------------------------------ the engine's thread

    def _work(self) -> None:
        end_error: Exception | None = None
        try:
            self._serve()
        except BaseException as error:  # no caller above would see it
            _log.critical("the engine's thread ended", exc_info=error)
            self._failed = error
            end_error = MillpondError("the engine ended and takes no requests any more; the server's log says why")
        with self._changed:
            self._stopped = True
        try:
            self._hand_out(self._engine.abort_all(end_error))
        except Exception as error:
            _log.critical("requests could not be ended", exc_info=error)
        for mailbox in self._mailboxes.values():  # requests that the engine has dropped
            mailbox.fail(end_error or MillpondError("the engine was closed"))
        while self._calls:
            with suppress(Exception):
                self._calls.take()()
        self._since = None
        self._engine.close()

    def _serve(self) -> None:
        step_s = 0.0
        while self._wait():
            until = time.monotonic() + (CALLS_SHARE * step_s if self._engine.busy else _CALLS_IDLE_S)
            while self._calls:
                self._since = time.monotonic()
                with self._changed:
                    call = self._calls.take()
                call()
                if self._engine.busy and time.monotonic() > until:
                    break
            step_s = 0.0
            if self._engine.busy:
                self._since = began = time.monotonic()
                outputs = self._engine.step()
                self._hand_out(outputs)
                self._let_leave(outputs)
                step_s = time.monotonic() - began
                self.busy_s += step_s
            elif self._engine.idle_s is not None:
                self._engine.tidy()

    def _wait(self) -> bool:
        """Wait until there is something to do, and return whether to continue; False: stop."""
        self._since = None
        with self._changed:
            while not (self._calls or self._engine.busy or self._closing or self._stopped):
                if not self._changed.wait(self._engine.idle_s):
                    return True  # nothing came: there is time for what waits
            return not self._stopped and bool(self._calls or self._engine.busy or not self._closing)

    def _take_in(
        self, engine: Engine, request: Request, mailbox: Mailbox, grammar: Grammar | None, bans: Bans | None
    ) -> None:
        if self._closing or self._stopped:
            raise MillpondError("the engine is closing and takes no requests any more")
        engine.add(request, grammar, bans)
        self._mailboxes[request.request_id] = mailbox

    def _drop(self, request_id: str, mailbox: Mailbox) -> None:
        """Cancel a request whose answers are no longer read; its id may be used again."""
        if self._mailboxes.get(request_id) is mailbox:
            del self._mailboxes[request_id]
            self._engine.cancel(request_id)

    def _drop_all(self, mailboxes: Mapping[str, Mailbox]) -> None:
        for name, mailbox in mailboxes.items():
            self._drop(name, mailbox)

    def _hand_out(self, outputs: list[RequestOutput]) -> None:
        mail = []
        for output in outputs:
            mailbox = self._mailboxes.get(output.request_id)
            if mailbox is not None:
                if output.finished:
                    del self._mailboxes[output.request_id]
                mail.append((mailbox, output))
        for mailbox, output in deliver(mail):
            self._drop(output.request_id, mailbox)

    def _let_leave(self, outputs: list[RequestOutput]) -> None:
        if self.leave is None:
            return
        for output in outputs:
            name = output.request_id
            if not output.finished and name in self._mailboxes and self.leave(self._engine, output):
                self._mailboxes.pop(name).end()

    def _post(self, run: Callable[[], None], client: str = "") -> bool:
        """Let the engine's thread run a call; return False if the thread has ended."""
        with self._changed:
            if self._stopped:
                return False
            self._calls.put(run, client)
            self._changed.notify()
        return True


def _shown(names: Sequence[str]) -> str:
    """Return some requests by name, and how many more there are."""
    num_more = len(names) - _SHOWN
    first = ", ".join(names[:_SHOWN])
    return f"{first} and {num_more} more" if num_more > 0 else first
