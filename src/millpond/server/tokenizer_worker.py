"""Tokenization and detokenization away from the event loop.

Long texts have a thread of their own, so that short ones wait for none of them.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Awaitable, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from millpond.engine.chunks.prompt import Prompt, with_ids
from millpond.engine.token_bytes import TokenBytes
from millpond.errors import OptionError
from millpond.models.untrusted.whole_chat import write_whole
from millpond.prompt_marks import PromptMarks, Span, TokenOffsets
from millpond.server.client_pacing import in_thread
from millpond.server.errors import ApiError
from millpond.server.fill_in import fill_in_of
from millpond.server.llm_protocol import ServedLLM
from millpond.server.message_spans import EnclosedMessages, MarkedChunks
from millpond.server.messages import Message, Tool
from millpond.server.prompt_marks import FORGOTTEN, ChatMarks, RequestedMarks
from millpond.server.schemas import ChatFields, TokenFields
from millpond.server.text_cost import LONG_RUN, check_runs
from millpond.server.tools.template import ask_template, in_words

T = TypeVar("T")

#: For tokenizers without a chat template: names before the messages, and the model writes until the user's next turn.
PLAIN_NAMES = {"system": "System", "developer": "System", "user": "User", "assistant": "Assistant", "tool": "Tool"}
PLAIN_STOP = "\nUser:"
#: Characters from which on a text is a long one; and most of them per token of the model's context.
_LONG, _PER_TOKEN = 2**15, 32
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


class TokenizerWorker:
    """The tokenizer of a model in a thread of its own, and a copy in another for long texts.

    Attributes:
        exists: Whether the model has a tokenizer.
        has_template: Whether that has a chat template; else chats are written plainly.
        shown: Treatment of tools by the template.
        fill_in: Tokens for text in the middle; None: the model has no tokens for that.
    """

    def __init__(self, llm: ServedLLM) -> None:
        self.exists = llm.tokenizer is not None
        self.has_template = bool(getattr(llm.tokenizer, "chat_template", None))
        self.shown = ask_template(llm.tokenizer)
        self.fill_in = fill_in_of(llm.tokenizer)
        self._tokenizer = llm.tokenizer
        self._vocab_size = llm.vocab_size
        self._most = max(_LONG, _PER_TOKEN * llm.text_limit)
        self._threads = {long: ThreadPoolExecutor(1, "tokenizer") for long in (False, True)}
        self._tokenizers = {False: llm.tokenizer}  # two threads cannot share one

    def close(self) -> None:
        """Let the threads go."""
        for thread in self._threads.values():
            thread.shutdown(wait=False, cancel_futures=True)

    def need(self, what: str, param: str | None = None) -> None:
        """Check that there is a tokenizer.

        Raises:
            ApiError: the model has no tokenizer, and `what` needs one.
        """
        if self._tokenizer is None:
            message = f"{what} needs a tokenizer, and this model has none: send the prompt of a completion as token ids"
            raise ApiError(400, message, "no_tokenizer", param)

    async def encode(self, text: str, special: bool = True) -> tuple[int, ...]:
        """Return the ids of a text, with the tokenizer's special tokens around it or without.

        Raises:
            ApiError: the text is no Unicode, far longer than the model's context, or there is no tokenizer.
        """
        self.need("a text", "prompt")
        self.check_length(len(text), "prompt")
        check_text(text, "prompt")
        await self._check_runs([text], "prompt")
        return await self._run(lambda own: tuple(own.encode(text, add_special_tokens=special)), len(text))

    async def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens included.

        Raises:
            ApiError: an id that is no token, or there is no tokenizer.
        """
        self.need("the text of tokens", "tokens")
        self.check(ids, "tokens")
        return await self._run(lambda own: TokenBytes(own).text(ids, False), len(ids))

    async def texts(self, ids: Sequence[int]) -> list[str]:
        """Return the text of every id alone; `token_id:N` where there is no tokenizer."""
        if self._tokenizer is None:
            return [f"token_id:{i}" for i in ids]
        return await self._run(lambda own: [TokenBytes(own).of(i).decode("utf-8", "replace") for i in ids], len(ids))

    def check(self, ids: Sequence[int], param: str) -> None:
        """Check token ids.

        Raises:
            ApiError: an id that is no token of this model.
        """
        worst = max(ids, default=0)
        if worst >= self._vocab_size or min(ids, default=0) < 0:
            rule = f"the model's tokens are 0 to {self._vocab_size - 1}"
            raise ApiError(400, f"token id {worst}: {rule}", "invalid_token", param)

    def check_fields(self, body: TokenFields) -> None:
        """Check the token ids in fields of a body.

        Raises:
            ApiError: a field names an id that is no token of this model.
        """
        self.check(list(body.logit_bias or ()), "logit_bias")
        self.check(body.stop_token_ids or (), "stop_token_ids")
        self.check(body.allowed_token_ids or (), "allowed_token_ids")
        for what, name in (("a stop text", "stop"), ("a bad word", "bad_words")):
            if getattr(body, name):
                self.need(what, name)
        for word in body.bad_words or ():
            check_text(word, "bad_words")

    async def chat(
        self, messages: Sequence[Message], body: ChatFields, use_tools: bool = True
    ) -> tuple[str, tuple[int, ...]]:
        """Return a chat as the model reads it: the text, and its ids.

        Raises:
            ApiError: the template refuses these messages, there are tools and no template that shows them, or there is
                no tokenizer.
        """
        text = await self._chat_text(messages, body, use_tools)
        return text, await self.encode(text, special=not self.has_template)

    async def _chat_text(self, messages: Sequence[Message], body: ChatFields, use_tools: bool) -> str:
        """Return a chat as the model reads it; see `chat`."""
        self.need("a chat", "messages")
        shown = (body.tools or []) if use_tools else []
        size = sum(message.length for message in messages) + sum(tool.function.length for tool in shown)
        self.check_length(size, "messages")
        shaped, tools = await self._run(lambda _: self._for_template(messages, shown), size)
        extra = body.chat_template_kwargs or {}
        if body.continue_final_message and (body.add_generation_prompt or messages[-1].role != "assistant"):
            rule = "it goes with add_generation_prompt=false and a last message of the assistant"
            raise ApiError(400, f"continue_final_message: {rule}", "invalid_value", "continue_final_message")
        if taken := sorted(_OWN & extra.keys()):
            raise ApiError(400, f"{taken[0]} is set by the server", "invalid_value", f"chat_template_kwargs.{taken[0]}")
        if not self.has_template:
            if extra:
                message = "the tokenizer has no chat template, so there is nothing that could show chat_template_kwargs"
                raise ApiError(400, message, "no_chat_template", "chat_template_kwargs")
            return plain_chat(shaped, body.add_generation_prompt)
        how = extra | {"add_generation_prompt": body.add_generation_prompt}
        if body.continue_final_message:
            how |= {"continue_final_message": True}
        return await self._run(lambda own: _render(own, shaped, tools, how), size)

    async def chunked(self, prompt: Prompt) -> Prompt:
        """Return the same prompt with token ids in place of texts.

        Raises:
            ApiError: a text that is no Unicode or far longer than the model's context; or there is no tokenizer.
        """
        texts = [text for text in prompt.texts if isinstance(text, str)]
        if texts:
            self.need("a text", "prompt")
        self.check_length(sum(map(len, texts)), "prompt")
        for text in texts:
            check_text(text, "prompt")
        await self._check_runs(texts, "prompt")
        return await self._run(lambda own: with_ids(prompt, own), sum(map(len, texts)))

    async def read_chat(
        self, messages: Sequence[Message], body: ChatFields, use_tools: bool, requested: ChatMarks
    ) -> tuple[tuple[int, ...] | Prompt, PromptMarks]:
        """Return a chat as the model reads it, in token ids, and its marks.

        Raises:
            ApiError: as `chat`; or the template changes messages, or the order of chunks; or the tokenizer tells no
                characters of tokens.
            OptionError: see `ChatMarks.in_tokens`.
        """
        if requested.is_chunked:
            return await self._chunked_chat(messages, body, use_tools), PromptMarks()
        text, ids = await self.chat(messages, body, use_tools)

        async def spans(enclosed: EnclosedMessages) -> list[Span]:
            return enclosed.spans(await self._chat_text(enclosed.messages, body, use_tools), text)

        message_spans = await spans(EnclosedMessages(messages)) if requested.of_each else []
        keep = [] if requested.keep is None else await spans(requested.keep)
        forget = [span for one in requested.forget for span in await spans(one)]
        if not requested.of_each and requested.breakpoints:
            message_spans = await self._message_ends(spans, messages)
        if requested.field is None and not message_spans:
            return ids, PromptMarks()
        try:
            offsets = await self._offsets(text, ids, not self.has_template, requested.field or FORGOTTEN)
        except ApiError:
            if requested.field is not None:
                raise
            return ids, PromptMarks()  # only breakpoints, which a chat can do without
        return ids, requested.in_tokens(offsets, message_spans, keep, forget)

    async def _message_ends(
        self, spans: Callable[[EnclosedMessages], Awaitable[list[Span]]], messages: Sequence[Message]
    ) -> list[Span]:
        """Return the ends of messages whose beginnings a template may omit; none: not known."""
        try:
            return await spans(EnclosedMessages(messages, ends=True))
        except ApiError:
            return []

    async def _chunked_chat(self, messages: Sequence[Message], body: ChatFields, use_tools: bool) -> Prompt:
        """Return a chat with chunks as the model reads it, in token ids.

        Raises:
            ApiError: as `chat`; or the template changes the order of chunks.
        """
        self.check_length(sum(message.length for message in messages), "messages")
        marked = MarkedChunks(messages)
        text = await self._chat_text(marked.messages, body, use_tools)
        parts = marked.split(text)
        # what a template writes has its special tokens already
        return await self.chunked(Prompt([(), *parts] if self.has_template else parts))

    async def in_text(self, text: str, ids: tuple[int, ...], requested: RequestedMarks) -> PromptMarks:
        """Return the marks of a completion's text, in tokens.

        Args:
            text: The text.
            ids: Ids of the text.
            requested: Marks in characters.

        Raises:
            ApiError: the tokenizer tells no characters of tokens.
        """
        return requested.marks.in_tokens(await self._offsets(text, ids, True, requested.field))

    async def _offsets(self, text: str, ids: tuple[int, ...], special: bool, field: str) -> TokenOffsets:
        """Return the positions of a text's characters among its ids.

        field: of the body, which asks for it.

        Raises:
            ApiError: the tokenizer does not tell which characters a token stands for.
        """
        if getattr(self._tokenizer, "is_fast", False):
            read = await self._run(
                lambda own: own(text, add_special_tokens=special, return_offsets_mapping=True), len(text)
            )
            if tuple(read["input_ids"]) == ids:
                return TokenOffsets(read["offset_mapping"])
        message = "this model's tokenizer does not tell which characters a token stands for"
        raise ApiError(400, message, "unsupported_parameter", field)

    def special(self, texts: Collection[str]) -> tuple[int, ...]:
        """Return the ids of the special tokens that are written so."""
        added: dict[int, Any] = getattr(self._tokenizer, "added_tokens_decoder", {})
        return tuple(token for token, about in added.items() if about.special and about.content in texts)

    def _for_template(
        self, messages: Sequence[Message], tools: Sequence[Tool]
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return messages and tools as the template expects them, or in words if it has no tools."""
        shaped = [_plain(message) for message in messages]
        shown = [_whole(tool) for tool in tools]
        if not self.shown.tools:
            return in_words(shaped, shown), []
        names: dict[str, str] = {}
        for message in shaped:
            for call in message.get("tool_calls", ()):
                function = call["function"]
                names[call.get("id", "")] = function["name"]
                if self.shown.as_text:
                    function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
            if message["role"] == "tool" and message.get("tool_call_id") in names:
                message.setdefault("name", names[message["tool_call_id"]])
        return shaped, shown

    def check_length(self, characters: int, param: str) -> None:
        """Check the length of a text.

        Raises:
            ApiError: far more characters than the model's context holds.
        """
        if characters > self._most:
            message = (
                f"{characters:,} characters: this server reads texts of at most {self._most:,}, {_PER_TOKEN} per token "
                "of the model's context"
            )
            raise ApiError(400, message, "context_length_exceeded", param)

    async def _check_runs(self, texts: Sequence[str], param: str) -> None:
        """Check the runs in texts.

        Raises:
            ApiError: a text has runs that this tokenizer would take seconds for.
        """

        def check(own: Any) -> None:
            for text in texts:
                check_runs(text, lambda part: own.encode(part, add_special_tokens=False), param)

        if any(len(text) >= LONG_RUN for text in texts):
            await self._run(check, sum(map(len, texts)))

    async def _run(self, work: Callable[[Any], T], size: int) -> T:
        """Run `work` with a tokenizer, for a text of `size` characters."""
        loop, long = asyncio.get_running_loop(), size > _LONG
        if long not in self._tokenizers:
            copied = loop.run_in_executor(self._threads[False], copy.deepcopy, self._tokenizer)
            self._tokenizers[long] = await copied
        return await in_thread(self._threads[long], work, self._tokenizers[long])


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


def _plain(message: Message) -> dict[str, Any]:
    """Return a message as templates expect it: one text, and no empty fields."""
    fields = message.model_dump(exclude_none=True, exclude={"annotations", "millpond"})
    if isinstance(message.content, list):
        fields["content"] = "".join(part.text for part in message.content)
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
