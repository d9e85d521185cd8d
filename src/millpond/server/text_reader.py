"""Texts and chats in the tokens of one tokenizer, each read in one go, away from the event loop."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from millpond.engine.chunks.prompt import Prompt, with_ids
from millpond.errors import OptionError
from millpond.images.reader import ImageReader
from millpond.models.chat_template import content_of, shows_parts
from millpond.models.untrusted.whole_chat import write_whole
from millpond.prompt_marks import PromptMarks, Span, TokenOffsets
from millpond.server.errors import ApiError
from millpond.server.message_spans import EnclosedMessages, MarkedChunks
from millpond.server.messages import Message, Tool
from millpond.server.prompt_marks import FORGOTTEN, ChatMarks, MessagePieces, RequestedMarks
from millpond.server.schemas import ChatFields
from millpond.server.text_cost import check_runs
from millpond.server.tools.template import Shown, in_words

#: For tokenizers without a chat template: names before the messages, and the model writes until the user's next turn.
PLAIN_NAMES = {"system": "System", "developer": "System", "user": "User", "assistant": "Assistant", "tool": "Tool"}
PLAIN_STOP = "\nUser:"
#: Most characters of a text per token of the model's context, and of a text of any model.
PER_TOKEN, SHORT = 32, 2**15
#: What the template is given by the server, and `chat_template_kwargs` may not change.
_OWN = frozenset(
    {
        "conversation",
        "messages",
        "tools",
        "tokenize",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
    }
)


class LongTextError(Exception):
    """A text that a template has written is too long for the thread of short ones."""


class TextReader:
    """Reads texts and chats with one tokenizer.

    Args:
        tokenizer: The tokenizer.
        shown: Treatment of tools by its chat template.
        max_length: Most characters of a text.
        is_short: It reads texts of at most `SHORT` characters.
        images: Says what stands in a text for an image; None: the model takes text alone.
    """

    def __init__(
        self, tokenizer: Any, shown: Shown, max_length: int, *, is_short: bool, images: ImageReader | None = None
    ) -> None:
        self.tokenizer, self._images = tokenizer, images
        self._in_parts = images is not None and shows_parts(tokenizer, images.token)
        self._has_template = bool(getattr(tokenizer, "chat_template", None))
        self._shown, self._max_length, self._is_short = shown, max_length, is_short

    def check_length(self, characters: int, param: str) -> None:
        """Check the length of a text.

        Raises:
            ApiError: far more characters than the model's context holds.
        """
        if characters > self._max_length:
            message = (
                f"{characters:,} characters: this server reads texts of at most {self._max_length:,}, {PER_TOKEN} per "
                "token of the model's context"
            )
            raise ApiError(400, message, "context_length_exceeded", param)

    def ids_of(self, text: str, special: bool = True) -> tuple[int, ...]:
        """Return the ids of a text, with the tokenizer's special tokens around it or without.

        Raises:
            ApiError: the text is no Unicode, far longer than the model's context, or has runs that this tokenizer would
                take seconds for.
            LongTextError: it is for the other thread.
        """
        self._check([text])
        return tuple(self.tokenizer.encode(text, add_special_tokens=special))

    def chunked(self, prompt: Prompt) -> Prompt:
        """Return the same prompt with token ids in place of texts.

        Raises:
            ApiError, LongTextError: see `ids_of`.
        """
        self._check([text for text in prompt.texts if isinstance(text, str)])
        return with_ids(prompt, self.tokenizer)

    def _check(self, texts: Sequence[str]) -> None:
        size = sum(map(len, texts))
        self.check_length(size, "prompt")
        if self._is_short and size > SHORT:
            raise LongTextError
        for text in texts:
            check_text(text, "prompt")
        for text in texts:
            check_runs(text, lambda part: self.tokenizer.encode(part, add_special_tokens=False), "prompt")

    def offsets(self, text: str, ids: tuple[int, ...], special: bool, field: str) -> TokenOffsets:
        """Return the positions of a text's characters among its ids.

        Args:
            text: The text.
            ids: Ids of the text.
            special: With the tokenizer's special tokens around it.
            field: Field of the body that asks for it.

        Raises:
            ApiError: the tokenizer does not tell which characters a token stands for.
        """
        if getattr(self.tokenizer, "is_fast", False):
            encoded = self.tokenizer(text, add_special_tokens=special, return_offsets_mapping=True)
            if tuple(encoded["input_ids"]) == ids:
                return TokenOffsets(encoded["offset_mapping"])
        message = "this model's tokenizer does not tell which characters a token stands for"
        raise ApiError(400, message, "unsupported_parameter", field)

    def in_text(self, text: str, ids: tuple[int, ...], requested: RequestedMarks) -> PromptMarks:
        """Return the marks of a completion's text, in tokens.

        Args:
            text: The text.
            ids: Ids of the text.
            requested: Marks in characters.

        Raises:
            ApiError: the tokenizer tells no characters of tokens.
        """
        return requested.marks.in_tokens(self.offsets(text, ids, True, requested.field))

    def chat(self, messages: Sequence[Message], body: ChatFields, use_tools: bool) -> tuple[str, tuple[int, ...]]:
        """Return a chat as the model reads it: the text, and its ids.

        Raises:
            ApiError: the template refuses these messages, or there are tools and no template that shows them.
            LongTextError: see `ids_of`.
        """
        text = self._chat_text(messages, body, use_tools)
        return text, self.ids_of(text, special=not self._has_template)

    def read_chat(
        self, messages: Sequence[Message], body: ChatFields, use_tools: bool, requested: ChatMarks
    ) -> tuple[tuple[int, ...] | Prompt, PromptMarks]:
        """Return a chat as the model reads it, in token ids, and its marks.

        Raises:
            ApiError: as `chat`; or the template changes messages, or the order of chunks; or the tokenizer tells no
                characters of tokens.
            OptionError: see `ChatMarks.in_tokens`.
            LongTextError: see `ids_of`.
        """
        if not requested.is_chunked:
            return self._marked_chat(messages, body, use_tools, requested)
        marked = MarkedChunks(messages)
        parts = marked.split(self._chat_text(marked.messages, body, use_tools))
        # what a template writes has its special tokens already
        return self.chunked(Prompt([(), *parts] if self._has_template else parts)), PromptMarks()

    def _marked_chat(
        self, messages: Sequence[Message], body: ChatFields, use_tools: bool, requested: ChatMarks
    ) -> tuple[tuple[int, ...], PromptMarks]:
        """Return the ids of a chat without chunks, and its marks; see `read_chat`."""
        text, ids = self.chat(messages, body, use_tools)

        def spans(pieces: MessagePieces | None, *, ends: bool = False) -> list[Span]:
            enclosed = EnclosedMessages(messages, pieces, ends=ends)
            return enclosed.spans(self._chat_text(enclosed.messages, body, use_tools), text)

        message_spans = spans(None) if requested.of_each else []
        keep = [] if requested.keep is None else spans(requested.keep)
        forget = [span for pieces in requested.forget for span in spans(pieces)]
        if not requested.of_each and requested.breakpoints:
            with suppress(ApiError):  # beginnings of messages may be omitted, and breakpoints as well
                message_spans = spans(None, ends=True)
        if requested.field is None and not message_spans:
            return ids, PromptMarks()
        try:
            offsets = self.offsets(text, ids, not self._has_template, requested.field or FORGOTTEN)
        except ApiError:
            if requested.field is not None:
                raise
            return ids, PromptMarks()  # only breakpoints, which a chat can do without
        return ids, requested.in_tokens(offsets, message_spans, keep, forget)

    def _chat_text(self, messages: Sequence[Message], body: ChatFields, use_tools: bool) -> str:
        """Return a chat as the model reads it; see `chat`."""
        shaped, tools = self._for_template(messages, (body.tools or []) if use_tools else [])
        extra = body.chat_template_kwargs or {}
        if body.continue_final_message and (body.add_generation_prompt or messages[-1].role != "assistant"):
            rule = "it goes with add_generation_prompt=false and a last message of the assistant"
            raise ApiError(400, f"continue_final_message: {rule}", "invalid_value", "continue_final_message")
        if taken := sorted(_OWN & extra.keys()):
            raise ApiError(400, f"{taken[0]} is set by the server", "invalid_value", f"chat_template_kwargs.{taken[0]}")
        if not self._has_template:
            if extra:
                message = "the tokenizer has no chat template, so there is nothing that could show chat_template_kwargs"
                raise ApiError(400, message, "no_chat_template", "chat_template_kwargs")
            return self._with_images(plain_chat(shaped, body.add_generation_prompt), messages)
        how = extra | {"add_generation_prompt": body.add_generation_prompt}
        if body.continue_final_message:
            how |= {"continue_final_message": True}
        return self._with_images(_render(self.tokenizer, shaped, tools, how), messages)

    def _with_images(self, text: str, messages: Sequence[Message]) -> str:
        """Return a chat with the tokens of its images.

        Raises:
            ImageError: a text names the token of images, or the template leaves images out.
        """
        return text if self._images is None else self._images.expand(text, sum(len(one.image_urls) for one in messages))

    def _in_template(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a message in words with its content as the template takes images."""
        if self._images is None:
            return message
        token = self._images.token
        first, *others = message["content"].split(token)
        pieces = [first, *(piece for text in others for piece in (None, text))]
        kept = [piece for piece in pieces if piece != ""] or [""]
        return message | {"content": content_of(kept, token, self._in_parts)}

    def _for_template(
        self, messages: Sequence[Message], tools: Sequence[Tool]
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return messages and tools as the template expects them, or in words if it has no tools."""
        token = "" if self._images is None else self._images.token
        shaped = [_plain(message, token) for message in messages]
        shown = [_whole(tool) for tool in tools]
        if not self._shown.tools:
            return [self._in_template(message) for message in in_words(shaped, shown)], []
        names: dict[str, str] = {}
        for message in shaped:
            for call in message.get("tool_calls", ()):
                function = call["function"]
                names[call.get("id", "")] = function["name"]
                if self._shown.as_text:
                    function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
            if message["role"] == "tool" and message.get("tool_call_id") in names:
                message.setdefault("name", names[message["tool_call_id"]])
        return [self._in_template(message) for message in shaped], shown


def _render(tokenizer: Any, messages: list[Any], tools: list[Any], how: dict[str, Any]) -> str:
    try:
        return write_whole(tokenizer, messages, tools=tools or None, **how)
    except Exception as error:  # the template is a program of the model's, run on what the client sent
        why = str(error) if isinstance(error, OptionError) else f"{type(error).__name__}: {error}"
        message = f"the model's chat template refuses these messages: {why}"
        raise ApiError(400, message, "template_error", "messages") from error


def plain_chat(messages: Sequence[dict[str, Any]], generation_prompt: bool) -> str:
    r"""Return a chat without a template: a line per message, with a name in front.

    Example:
        >>> plain_chat([{"role": "user", "content": "Hi"}], True)
        'User: Hi\nAssistant:'
    """
    lines = [f"{PLAIN_NAMES[message['role']]}: {message.get('content') or ''}" for message in messages]
    return "\n".join([*lines, "Assistant:"] if generation_prompt else lines)


def _plain(message: Message, image_token: str) -> dict[str, Any]:
    """Return a message as templates expect it: one text, and no empty fields.

    A token stands for each image.
    """
    fields = message.model_dump(exclude_none=True, exclude={"annotations", "millpond", "content"})
    if message.content is not None:
        fields["content"] = "".join(image_token if piece is None else piece for piece in message.pieces)
    fields.setdefault("content", "")
    for call in fields.get("tool_calls", ()):
        call.pop("index", None)
    if not fields.get("tool_calls", True):
        del fields["tool_calls"]
    for part in fields.values():
        if isinstance(part, str):
            check_text(part, "messages")
    return fields


def _whole(tool: Tool) -> dict[str, Any]:
    """Return a tool with all that templates look for."""
    fields = tool.model_dump(exclude_none=True)
    empty = {"description": "", "parameters": {"type": "object", "properties": {}}}
    return fields | {"function": empty | fields["function"]}


def check_text(text: str, param: str) -> None:
    """Check that a text can be encoded.

    Raises:
        ApiError: half of a surrogate pair, which is no character.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        message = f"half of a surrogate pair at character {error.start}: not a text"
        raise ApiError(400, message, "invalid_text", param) from None
