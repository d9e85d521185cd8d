"""Breakpoints of a chat: ends of its messages behind which a later chat may go on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from millpond.engine.request import MOST_BREAKPOINTS, CacheOptions
from millpond.errors import MillpondError
from millpond.methods import METHODS
from millpond.option_files import OptionFile, only_listed
from millpond.server.errors import ApiError
from millpond.server.llm_protocol import ServedLLM
from millpond.server.message_spans import Span
from millpond.server.messages import Message

#: Methods and options of which is known whether they need breakpoints.
_MOST_KNOWN = 256


class ChatBreakpoints:
    """Whether chats need breakpoints, and where they are.

    Args:
        files: that options of requests may name.
    """

    def __init__(self, llm: ServedLLM, files: Mapping[str, OptionFile]) -> None:
        self._llm, self._files = llm, files
        self._known: dict[str, bool] = {}

    def needed(self, cache: CacheOptions) -> bool:
        """Whether there is a prefix cache, and prompts that are kept so share breakpoints alone."""
        if self._llm.stats().prefix is None:
            return False
        usual = self._llm.cache
        method = str(usual.method if cache.method is None else cache.method)
        own = cache.method in (None, usual.method) and not cache.options
        options = {**(usual.options if method == usual.method else {}), **cache.options}
        key = repr((own, method, sorted(options.items())))
        if key not in self._known:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            try:
                with only_listed(None if own else self._files):
                    self._known[key] = METHODS.get(method)(**options).sums_prompt
            except MillpondError:  # the engine refuses it, and says why
                return False
        return self._known[key]


def check_marks(messages: Sequence[Message]) -> None:
    """
    Raises:
        ApiError: more messages are marked with `cache_control` than a request may have breakpoints.
    """
    n_marked = sum(message.ends_with_breakpoint for message in messages)
    if n_marked > MOST_BREAKPOINTS:
        rule = f"at most {MOST_BREAKPOINTS}; leave it out where the next chats differ"
        raise ApiError(400, f"{n_marked} messages have cache_control: {rule}", "invalid_value", "messages")


def breakpoints_of(messages: Sequence[Message], spans: Sequence[Span]) -> tuple[int, ...]:
    """Numbers of tokens: those of marked messages; then the end of instructions, and the last ends of messages.

    Args:
        spans: where the messages lie among the tokens; (0, 0) for one without a text.
    """
    ends = [end for _, end in spans]
    marked = [end for message, end in zip(messages, ends, strict=True) if message.ends_with_breakpoint]
    first = [end for message, end in zip(messages[:1], ends, strict=False) if message.role in ("system", "developer")]
    chosen = [end for end in dict.fromkeys([*marked, *first, *reversed(ends)]) if end]
    return tuple(sorted(chosen[:MOST_BREAKPOINTS]))
