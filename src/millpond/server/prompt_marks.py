"""Marks of a prompt in a body: spans of a completion's text or tokens, and messages of a chat."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from millpond.engine.chunks.prompt import Chunk, Prompt
from millpond.engine.request import CacheOptions
from millpond.errors import MillpondError
from millpond.methods import METHODS
from millpond.option_files import OptionFile, only_listed
from millpond.prompt_marks import (
    MAX_BREAKPOINTS,
    MAX_SHARES,
    PromptMarks,
    Span,
    TokenOffsets,
    disjoint,
    shares_in_order,
    united,
)
from millpond.server.errors import ApiError
from millpond.server.llm_protocol import ServedLLM
from millpond.server.messages import Message
from millpond.server.schemas import CacheFields

#: Fields of a body, as errors name them.
CHUNKS, FORGOTTEN, KEEP, FAIR = "millpond.chunks", "millpond.forgotten", "millpond.keep", "millpond.fair_shares"
FORGET, BREAKPOINTS = "millpond.forget", "millpond.breakpoints"
_OF_COMPLETION = "goes with the one prompt of a completion"
_NO_CHUNKS = ' goes with the prompt of a completion; in a chat mark text parts with "chunk": true'
_NOT_TOLD = " goes with a chat, of whose messages it tells: use /v1/chat/completions"
_NOT_NAMED = " names parts of a chat: use /v1/chat/completions"
_NO_SPANS = "leave it out of /infill"
#: What routes do not take, with what an error says behind the field.
IN_CHAT = {
    CHUNKS: _NO_CHUNKS,
    KEEP: f' {_OF_COMPLETION}; in a chat mark messages or text parts with "millpond": {{"keep": true}}',
    BREAKPOINTS: f" {_OF_COMPLETION}; in a chat mark messages or text parts with cache_control",
}
IN_COMPLETION = {FORGOTTEN: _NOT_TOLD, FORGET: _NOT_NAMED}
IN_RESPONSE = {
    CHUNKS: _NO_CHUNKS,
    FORGOTTEN: _NOT_TOLD,
    FORGET: _NOT_NAMED,
    KEEP: f" {_OF_COMPLETION}; use /v1/chat/completions, whose messages can be kept",
    FAIR: ": use /v1/chat/completions, whose messages can have a share",
    BREAKPOINTS: f" {_OF_COMPLETION}; use /v1/chat/completions, whose messages may have cache_control",
}
IN_INFILL = {
    CHUNKS: _NO_CHUNKS,
    FORGOTTEN: _NOT_TOLD,
    FORGET: _NOT_NAMED,
    KEEP: f" {_OF_COMPLETION}; {_NO_SPANS}",
    FAIR: f": {_NO_SPANS}",
    BREAKPOINTS: f" {_OF_COMPLETION}; {_NO_SPANS}",
}


def refuse_marks(fields: CacheFields, refused: Mapping[str, str]) -> None:
    """Check that a body has none of some marks.

    Args:
        fields: Fields of the body.
        refused: Fields that the route does not take, with the end of an error about each.

    Raises:
        ApiError: one of them is given.
    """
    for field, why in refused.items():
        value = getattr(fields, field.removeprefix("millpond."))
        if value is not None and value is not False:
            raise ApiError(400, field + why, "invalid_value", field)


# ---------------------------------------------------------------------------------------------------- of a completion


class RequestedMarks(NamedTuple):
    """Marks of the prompt of a completion.

    Attributes:
        marks: Spans in characters of a text, or in tokens.
        field: Field of the body that asks for them first.
    """

    marks: PromptMarks
    field: str


def marks_prompt(fields: CacheFields) -> bool:
    """Whether a body marks spans or places of a completion's prompt."""
    return any((fields.chunks, fields.keep, fields.breakpoints, fields.fair_shares))


def completion_marks(
    fields: CacheFields, prompts: Sequence[Sequence[int]], texts: Sequence[str | None], *, shared: bool, prefixes: bool
) -> RequestedMarks | None:
    """Return the marks of a body's only prompt, in characters or tokens; None: there are none.

    Args:
        fields: Fields of the body.
        prompts: Token ids of each prompt.
        texts: Text of each prompt, None where it came as tokens.
        shared: Whether other prompts can go on from this one, as far as the body says.
        prefixes: Whether this server keeps prompts.

    Raises:
        ApiError: several prompts, chunks beside spans, marks that leave the prompt, or breakpoints from which nothing
            could go on.
        OptionError: spans that overlap.
    """
    keep, shares, places = fields.keep or [], _shares_of_prompt(fields), fields.breakpoints or []
    given_fields = [field for field, marks in ((KEEP, keep), (FAIR, shares), (BREAKPOINTS, places)) if marks]
    if not given_fields:
        return None
    for field in given_fields:
        if len(prompts) != 1 or (fields.chunks and field != BREAKPOINTS):
            one = "one prompt" if field == BREAKPOINTS else "one prompt without chunks"
            raise ApiError(400, f"{field} goes with {one}; send a request for each", "invalid_value", field)
    (ids,), (text,) = prompts, texts
    length, unit = (len(ids), "tokens") if text is None else (len(text), "characters")
    for field, spans in ((KEEP, keep), (FAIR, [(begin, end) for begin, end, _ in shares])):
        for begin, end in spans:
            if not 0 <= begin <= end <= length:
                name = field.removeprefix("millpond.")
                message = f"{name}: [{begin}, {end}] must lie in the prompt of {length} {unit}"
                raise ApiError(400, message, "invalid_value", field)
    if places:
        _check_places(places, length, unit, shared and not fields.chunks, prefixes)
    shares_in_order(shares, "fair_shares")  # a place of two spans has no one share
    marks = PromptMarks(
        keep=tuple(keep) if text is None else united(keep), shares=tuple(shares), breakpoints=tuple(places)
    )
    return RequestedMarks(marks, given_fields[0])


def with_chunks(prompt: str | Sequence[int], spans: Sequence[Span]) -> Prompt:
    """Return a prompt, cut at the spans of its chunks.

    Args:
        prompt: A text, or token ids.
        spans: (begin, end) of each chunk, in characters or in tokens.

    Raises:
        ApiError: spans that overlap, leave the prompt or are empty.
    """
    parts: list[str | Sequence[int] | Chunk] = []
    behind = 0
    for begin, end in sorted(spans):
        if not 0 <= begin < end <= len(prompt):
            what = "characters" if isinstance(prompt, str) else "tokens"
            message = f"chunk [{begin}, {end}] must lie in the prompt of {len(prompt)} {what} and hold one at least"
            raise ApiError(400, message, "invalid_value", CHUNKS)
        if begin < behind:
            raise ApiError(400, f"chunk [{begin}, {end}] overlaps the one before it", "invalid_value", CHUNKS)
        parts.append(prompt[behind:begin])
        piece = prompt[begin:end]
        parts.append(Chunk(piece if isinstance(piece, str) else tuple(piece)))
        behind = end
    parts.append(prompt[behind:])
    return Prompt([part for part in parts if isinstance(part, Chunk) or part])


def _shares_of_prompt(fields: CacheFields) -> list[tuple[int, int, float]]:
    """Return the shares of the spans of a prompt.

    Raises:
        ApiError: one share without spans.
    """
    if isinstance(fields.fair_shares, int | float):
        message = f"{FAIR}: a completion has no messages; give [begin, end, share] of spans of its prompt"
        raise ApiError(400, message, "invalid_value", FAIR)
    return fields.fair_shares or []


def _check_places(places: Sequence[int], length: int, unit: str, shared: bool, prefixes: bool) -> None:
    """Check the breakpoints of a prompt.

    Raises:
        ApiError: see `completion_marks`.
    """
    why = None
    if not shared:
        why = "a prompt with chunks, or with echo and logprobs, is not shared: leave millpond.breakpoints out"
    elif not prefixes:
        why = "this server keeps no prompts (--prefix-cache), so none goes on: leave millpond.breakpoints out"
    for place in places if why is None else ():
        if not 1 <= place <= length:
            why = f"breakpoint {place} must be a number of {unit} from 1 to the prompt's {length}"
    if why is not None:
        raise ApiError(400, why, "invalid_value", BREAKPOINTS)


# ---------------------------------------------------------------------------------------------------------- of a chat


class MessagePieces(NamedTuple):
    """Pieces of the messages of a chat.

    Attributes:
        spans: Of each message, [begin, end) of those of its text, in characters, one after another.
        in_reasoning: They are pieces of `reasoning_content` instead.
        is_optional: A template may leave pieces out.
    """

    spans: Sequence[Sequence[Span]]
    in_reasoning: bool = False
    is_optional: bool = False


@dataclass(frozen=True, slots=True)
class ChatMarks:
    """Marks of the messages of a chat.

    Attributes:
        messages: Messages of the chat.
        is_chunked: Whether parts of them are chunks, and nothing else is marked.
        keep: Pieces of them that stay; None: none.
        forget: Pieces of them that are forgotten, of each kind.
        report: Tell what the cache has lost of each message.
        share: Share of the budget of each message; None: they have none.
        breakpoints: Whether marked messages, and the last ones, end at breakpoints.
    """

    messages: Sequence[Message]
    is_chunked: bool = False
    keep: MessagePieces | None = None
    forget: Sequence[MessagePieces] = ()
    report: bool = False
    share: float | None = None
    breakpoints: bool = False

    @property
    def of_each(self) -> bool:
        """Whether it must be known where each message lies."""
        return self.report or self.share is not None

    @property
    def field(self) -> str | None:
        """Of the body, which asks first for what not every tokenizer and template tell; None: nothing must be told."""
        if self.of_each:
            return FORGOTTEN
        return KEEP if self.keep is not None else FORGET if self.forget else None

    def in_tokens(
        self, offsets: TokenOffsets, messages: Sequence[Span], keep: Sequence[Span], forget: Sequence[Span]
    ) -> PromptMarks:
        """Return the marks in tokens of what a template has made of the messages.

        Args:
            offsets: Characters of the tokens.
            messages: Span of each message there, in characters, (0, 0) for one without a text; () if it is not known.
            keep: Spans of the pieces that stay.
            forget: Spans of the pieces that are forgotten.

        Raises:
            OptionError: pieces that stay and pieces that are forgotten, in one token.
        """
        spans = [offsets.span(span) for span in messages]
        return PromptMarks(
            keep=united([offsets.span(span) for span in keep]),
            shares=() if self.share is None else disjoint([(begin, end, self.share) for begin, end in spans]),
            forget=united([offsets.span(span) for span in forget]),
            report=tuple(spans) if self.report else (),
            breakpoints=breakpoints_of(self.messages, spans) if self.breakpoints and spans else (),
        )


def chat_marks(messages: Sequence[Message], fields: CacheFields, breakpoints: bool) -> ChatMarks:
    """Return the marks of a chat, checked.

    Args:
        messages: Messages of the chat.
        fields: Fields of the body.
        breakpoints: Whether the method needs them to share beginnings of prompts, see `ChatBreakpoints`.

    Raises:
        ApiError: there are chunks beside other marks; too many marks or messages with a share; a name of what is not
            there; or a field that goes with completions.
    """
    refuse_marks(fields, IN_CHAT)
    n_marked = sum(message.ends_with_breakpoint for message in messages)
    if n_marked > MAX_BREAKPOINTS:
        rule = f"at most {MAX_BREAKPOINTS}; leave it out where the next chats differ"
        raise ApiError(400, f"{n_marked} messages have cache_control: {rule}", "invalid_value", "messages")
    share = _share_of_messages(fields, len(messages))
    pieces = [kept_pieces(message) for message in messages]
    forget = forgotten_pieces(fields.forget or (), messages)
    if any(message.has_chunks for message in messages):
        for field, is_marked, what in (
            (FORGET, forget, "cannot forget parts of a chat"),
            (FAIR, share is not None, "have no shares of the budget"),
            (FORGOTTEN, fields.forgotten, "do not tell what was forgotten"),
            (KEEP, any(pieces), "are not kept by span"),
        ):
            if is_marked:
                message = f"messages with chunks {what}; leave out one of the two"
                raise ApiError(400, message, "invalid_value", field)
        return ChatMarks(messages, is_chunked=True)
    keep = MessagePieces(pieces) if any(pieces) else None
    return ChatMarks(messages, False, keep, forget, fields.forgotten, share, breakpoints)


def _share_of_messages(fields: CacheFields, n_messages: int) -> float | None:
    """Return the share of each message of a chat; None: they have none.

    Raises:
        ApiError: spans, which belong to a completion; or too many messages.
    """
    if isinstance(fields.fair_shares, list):
        message = f"{FAIR}: spans go with the prompt of a completion; give one number, the share of each message"
        raise ApiError(400, message, "invalid_value", FAIR)
    if fields.fair_shares is not None and n_messages > MAX_SHARES:
        rule = f"{n_messages} messages are more than {MAX_SHARES}; leave out fair_shares, or some messages"
        raise ApiError(400, f"{FAIR}: {rule}", "invalid_value", FAIR)
    return fields.fair_shares


def kept_pieces(message: Message) -> list[Span]:
    """Return the spans of the parts of a message that stay, in characters of its text."""
    if message.millpond is not None and message.millpond.keep:
        return [(0, len(message.text))]
    spans, behind = [], 0
    for part in message.content if isinstance(message.content, list) else ():
        if part.millpond is not None and part.millpond.keep:
            spans.append((behind, behind + len(part.text)))
        behind += len(part.text)
    return spans


# ------------------------------------------------------------------------------------------------------- what leaves

_OPENS, _CLOSES = "<think>", "</think>"
_MESSAGE = re.compile(r"message:(\d{1,6})")
#: Most ids of calls that an error lists.
_LISTED = 20


def thoughts_in(text: str) -> list[Span]:
    """Return the spans of a text's thoughts between their tags, in characters; the tags stay.

    A thought without an end reaches to the last character.

    Example:
        >>> thoughts_in("<think>so</think>yes")
        [(7, 9)]
    """
    spans: list[Span] = []
    begin = text.find(_OPENS)
    while begin >= 0:
        begin += len(_OPENS)
        end = text.find(_CLOSES, begin)
        spans.append((begin, len(text) if end < 0 else end))
        begin = -1 if end < 0 else text.find(_OPENS, end)
    return spans


def forgotten_pieces(names: Sequence[str], messages: Sequence[Message]) -> list[MessagePieces]:
    """Return the pieces of messages to forget, once for each kind.

    There are none where nothing is to be forgotten.

    Raises:
        ApiError: a name of nothing in this chat, or of a message without a text.
    """
    whole = {number for name in names if (number := _number(name, messages)) is not None}
    thinks = {n for n, message in enumerate(messages) if message.role == "assistant"} if "thoughts" in names else set()
    thoughts = [thoughts_in(m.text) if m.role == "assistant" else [] for m in messages]
    rest = [_behind(m.text, thoughts[n]) if n in whole else [] for n, m in enumerate(messages)]
    inside = [spans if n in thinks | whole else [] for n, spans in enumerate(thoughts)]
    reasons = [_all(m.reasoning_content or "") if n in thinks | whole else [] for n, m in enumerate(messages)]
    kinds = [
        MessagePieces(rest),
        MessagePieces(inside, is_optional=True),
        MessagePieces(reasons, in_reasoning=True, is_optional=True),
    ]
    return [pieces for pieces in kinds if any(pieces.spans)]


def _number(name: str, messages: Sequence[Message]) -> int | None:
    """Return the number of the message that a name means; None for thoughts, of several."""
    if name == "thoughts":
        return None
    calls = {m.tool_call_id: n for n, m in enumerate(messages) if m.role == "tool" and m.tool_call_id is not None}
    said = _MESSAGE.fullmatch(name)
    number = int(said[1]) if said else calls.get(name.removeprefix("tool:")) if name.startswith("tool:") else None
    if number is None or number >= len(messages):
        names = ["thoughts", *(f"tool:{call}" for call in list(calls)[:_LISTED]), "message:0"]
        listed = ", ".join(names) + (f" to message:{len(messages) - 1}" if len(messages) > 1 else "")
        raise ApiError(400, f"forget: {name!r} is not in this chat; there are: {listed}", "invalid_value", FORGET)
    if not (messages[number].text + (messages[number].reasoning_content or "")).strip():
        raise ApiError(400, f"forget: {name!r} is a message without a text; leave it out", "invalid_value", FORGET)
    return number


def _all(text: str) -> list[Span]:
    return [(0, len(text))] if text.strip() else []


def _behind(text: str, thoughts: Sequence[Span]) -> list[Span]:
    """Return the spans of a message after its thoughts, some of which a template may omit."""
    begin = min(thoughts[-1][1] + len(_CLOSES), len(text)) if thoughts else 0
    return [(begin, len(text))] if text[begin:].strip() else []


# -------------------------------------------------------------------------------------------------------- breakpoints

#: Methods and options of which is known whether they need breakpoints.
_MAX_KNOWN = 256


class ChatBreakpoints:
    """Whether chats need breakpoints, and their places.

    Args:
        llm: The model.
        files: Files that options of requests may name.
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
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            try:
                with only_listed(None if own else self._files):
                    self._known[key] = METHODS.get(method)(**options).sums_prompt
            except MillpondError:  # the engine refuses it, and says why
                return False
        return self._known[key]


def breakpoints_of(messages: Sequence[Message], spans: Sequence[Span]) -> tuple[int, ...]:
    """Return the breakpoints of a chat as numbers of tokens.

    First those of marked messages; then the end of instructions, and the last ends of messages.

    Args:
        messages: Messages of the chat.
        spans: Spans of the messages among the tokens; (0, 0) for one without a text.
    """
    ends = [end for _, end in spans]
    marked = [end for message, end in zip(messages, ends, strict=True) if message.ends_with_breakpoint]
    first = [end for message, end in zip(messages[:1], ends, strict=False) if message.role in ("system", "developer")]
    breakpoints = [end for end in dict.fromkeys([*marked, *first, *reversed(ends)]) if end]
    return tuple(sorted(breakpoints[:MAX_BREAKPOINTS]))
