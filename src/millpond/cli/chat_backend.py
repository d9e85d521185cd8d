"""Backends of `millpond chat`: a model in this process, or one behind an OpenAI-compatible address."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

from millpond.cli.console import forgotten_text, held_of
from millpond.errors import DataError, OptionError

if TYPE_CHECKING:
    import httpx

    from millpond.engine.llm import LLM
    from millpond.engine.outputs import Forgotten, KVStats
    from millpond.engine.sampling.params import SamplingParams

#: One message: its role and its content.
Message = dict[str, str]

#: Names in front of messages for a tokenizer without a chat template; the answer ends where the user would speak again.
_NAMES = {"system": "System", "user": "User", "assistant": "Assistant"}
_USERS_TURN = "\nUser:"


class ChatBackend(Protocol):
    """A source of answers: a local model or a server.

    Attributes:
        name: Name of the model.
        writes_names: Whether messages are written with names in front of them, for want of a chat template.
    """

    name: str
    writes_names: bool

    def answer(self, messages: Sequence[Message]) -> Generator[str, None, None]:
        """Yield the next message, piece by piece; closing the generator ends it.

        Raises:
            MillpondError: there is no answer to these messages; others may have one.
        """

    def last(self) -> str:
        """Return a line about the last answer."""

    def forgotten(self) -> str:
        """Return what its cache had forgotten when it ended; "": nothing, or unknown."""


@dataclass(slots=True)
class Clock:
    """Times of one answer, on `time.monotonic()`'s clock, and its tokens."""

    began: float
    first: float | None = None
    ended: float | None = None
    prompt_tokens: int = 0
    tokens: int = 0

    def __str__(self) -> str:
        if self.first is None or self.ended is None:
            return "no answer yet"
        rate = (self.tokens - 1) / (self.ended - self.first) if self.tokens > 1 and self.ended > self.first else 0.0
        return (
            f"prompt {self.prompt_tokens:,} tokens · first token after {self.first - self.began:.2f} s · "
            f"{self.tokens:,} new tokens at {rate:,.1f} tokens/s"
        )


class LocalBackend:
    """A model in this process, on an engine of its own."""

    def __init__(self, llm: LLM, params: SamplingParams, name: str) -> None:
        from millpond.models.chat_template import has_template, turn_ends

        if llm.tokenizer is None:
            raise OptionError(f"model {name!r} has no tokenizer, and a chat is text; LLM and serve take token ids")
        self.name = name
        self._llm = llm
        self._has_template = has_template(llm.tokenizer)
        self.writes_names = not self._has_template
        ends = {"stop_token_ids": tuple(turn_ends(llm.tokenizer))} if self._has_template else {"stop": (_USERS_TURN,)}
        self._alone, self._params = params, replace(params, **ends)
        self._clock: Clock | None = None
        self._kv: KVStats | None = None
        self._lost: Forgotten | None = None
        self._numbers = count()

    def answer(self, messages: Sequence[Message]) -> Generator[str, None, None]:
        """See `ChatBackend`."""
        return self.stream(self._encode(messages), turn=True)

    def stream(self, ids: tuple[int, ...], *, turn: bool) -> Generator[str, None, None]:
        """Yield what follows the tokens, piece by piece; closing the generator ends it.

        Args:
            ids: Tokens to continue.
            turn: Whether the answer ends with the turn.
        """
        from millpond.engine.request import Request
        from millpond.prompt_marks import PromptMarks

        engine, name = self._llm.engine, f"chat-{next(self._numbers)}"
        clock = self._clock = Clock(time.monotonic(), prompt_tokens=len(ids))
        params, whole = self._params if turn else self._alone, PromptMarks(report=((0, len(ids)),))
        self._lost = None
        engine.add(Request(request_id=name, prompt=ids, params=params, marks=whole))
        try:
            with _held_back() as interrupts:
                yield from self._pieces(clock, interrupts)
        finally:
            clock.ended = time.monotonic()
            engine.cancel(name)
            for output in engine.drain():
                self._lost = next(iter(output.completions[0].forgotten), self._lost)
        if interrupts:
            raise KeyboardInterrupt

    def last(self) -> str:
        """See `ChatBackend`."""
        if self._clock is None or self._kv is None:
            return "no answer yet"
        kv = self._kv
        return (
            f"{self._clock} · {held_of(kv.kv_bytes, kv.unused_bytes, kv.full_kv_bytes)} · "
            f"{kv.held:,.0f} of {kv.seen:,} entries per head"
            + (f" · {kv.restored_tokens:,} tokens of the session" if kv.restored_tokens else "")
            + "".join(f" · {text}" for text in [self.forgotten()] if text)
        )

    def forgotten(self) -> str:
        """See `ChatBackend`."""
        return "" if self._lost is None or not self._lost.fewer_than_half else forgotten_text(self._lost)

    def _pieces(self, clock: Clock, interrupts: Sequence[object]) -> Iterator[str]:
        """Yield the answer until it ends or the user presses Ctrl-C; never inside a step."""
        engine, shown = self._llm.engine, 0
        while engine.busy and not interrupts:
            for output in engine.step():
                if output.error is not None:
                    raise output.error
                answer = output.completions[0]
                self._kv, clock.tokens = answer.kv or self._kv, len(answer.token_ids)
                self._lost = next(iter(answer.forgotten), self._lost)
                if clock.tokens and clock.first is None:
                    clock.first = time.monotonic()
                if len(answer.text) > shown:
                    yield answer.text[shown:]
                    shown = len(answer.text)

    def _encode(self, messages: Sequence[Message]) -> tuple[int, ...]:
        from millpond.models.untrusted.whole_chat import write_whole

        tokenizer = self._llm.tokenizer
        if self._has_template:
            text = write_whole(tokenizer, messages, add_generation_prompt=True)
            return tuple(tokenizer.encode(text, add_special_tokens=False))
        said = [f"{_NAMES[message['role']]}: {message['content']}" for message in messages]
        return tuple(tokenizer.encode("\n".join([*said, "Assistant:"])))


class HttpBackend:
    """A model behind an OpenAI-compatible address.

    Args:
        http: Client that sends to the server's root.
        body: Fields of every request.
        name: Name of the model.
    """

    def __init__(self, http: httpx.Client, body: Mapping[str, Any], name: str) -> None:
        self.name = name
        self.writes_names = False  # as far as is known: the server writes them
        self._http = http
        self._body = dict(body)
        self._clock: Clock | None = None

    def answer(self, messages: Sequence[Message]) -> Generator[str, None, None]:
        """See `ChatBackend`."""
        import httpx

        clock = self._clock = Clock(time.monotonic())
        body = self._body | {"messages": list(messages), "stream": True, "stream_options": {"include_usage": True}}
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    raise DataError(f"the server answers {response.status_code}: {_reason(response.read())}")
                yield from self._pieces(response, clock)
        except httpx.HTTPError as error:
            raise DataError(f"the server cannot be reached: {error or type(error).__name__}") from None
        finally:
            clock.ended = time.monotonic()

    def last(self) -> str:
        """See `ChatBackend`."""
        return "no answer yet" if self._clock is None else str(self._clock)

    def forgotten(self) -> str:
        """See `ChatBackend`: not every server tells."""
        return ""

    @staticmethod
    def _pieces(response: httpx.Response, clock: Clock) -> Iterator[str]:
        for line in response.iter_lines():
            event = line.removeprefix("data:").strip()
            if not line.startswith("data:") or event == "[DONE]":
                continue
            try:
                text, ended, usage = parse_event(event)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise DataError(f"the server sends what is no answer: {error}") from None
            if usage:
                clock.prompt_tokens, clock.tokens = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
            if clock.first is None and (text or ended):
                clock.first = time.monotonic()
            if text:
                yield text


def parse_event(event: str) -> tuple[str, bool, dict[str, Any] | None]:
    """Return the first choice's text, whether it ended, and the server's count if it has one.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: it is no event of a completion, or tells of an error.
    """
    data = json.loads(event)
    if "error" in data:
        raise ValueError(f"the server says {data['error']}")
    choices = data.get("choices") or []
    usage = data.get("usage")
    if not choices:
        return "", False, usage
    text = choices[0].get("text") or (choices[0].get("delta") or {}).get("content") or ""
    return str(text), choices[0].get("finish_reason") is not None, usage


@contextmanager
def reach(url: str, model: str | None, key: str | None, body: Mapping[str, Any]) -> Iterator[HttpBackend]:
    """Open a chat with a model behind an address.

    Raises:
        OptionError: httpx is not installed.
        DataError: the server cannot be reached, or names no model.
    """
    try:
        import httpx
    except ImportError:
        raise OptionError("chat with --url needs httpx; install it with: pip install httpx") from None
    root = url.rstrip("/").removesuffix("/v1")
    try:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        http = httpx.Client(base_url=root, headers=headers, timeout=httpx.Timeout(10.0, read=600.0))
        with http:
            if model is None:
                answer = http.get("/v1/models")
                if answer.status_code != 200:
                    raise DataError(f"{root}/v1/models answers {answer.status_code}: {_reason(answer.content)}")
                model = str(answer.json()["data"][0]["id"])
            yield HttpBackend(http, {**body, "model": model}, f"{model} at {root}")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise DataError(f"{root} cannot be reached: {error or type(error).__name__}") from None
    except (LookupError, TypeError, json.JSONDecodeError):
        raise DataError(f"{root}/v1/models names no model; give one by --model") from None


@contextmanager
def _held_back() -> Iterator[list[object]]:
    """Hold back Ctrl-C: it interrupts nothing in here, and gathers in the list."""
    came: list[object] = []
    before = signal.signal(signal.SIGINT, lambda *_: came.append(_))
    try:
        yield came
    finally:
        signal.signal(signal.SIGINT, before)


def _reason(content: bytes) -> str:
    """Return the server's own words for an error."""
    text = content.decode(errors="replace")
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return text[:300]
