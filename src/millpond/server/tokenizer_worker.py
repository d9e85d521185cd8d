"""Tokenization and detokenization away from the event loop.

Long texts have a thread of their own, so that short ones wait for none of them.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from millpond.engine.chunks.prompt import Prompt
from millpond.engine.token_bytes import TokenBytes
from millpond.prompt_marks import PromptMarks
from millpond.server.client_pacing import in_thread
from millpond.server.errors import ApiError
from millpond.server.fill_in import fill_in_of
from millpond.server.llm_protocol import ServedLLM
from millpond.server.messages import Message
from millpond.server.prompt_marks import ChatMarks, RequestedMarks
from millpond.server.schemas import ChatFields, TokenFields
from millpond.server.text_reader import PER_TOKEN, SHORT, LongTextError, TextReader, check_text
from millpond.server.tools.template import ask_template

T = TypeVar("T")


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
        self._vocab_size = llm.vocab_size
        self._images = llm.images
        self._max_length = max(SHORT, PER_TOKEN * llm.text_limit)
        self._threads = {is_long: ThreadPoolExecutor(1, "tokenizer") for is_long in (False, True)}
        self._short = TextReader(llm.tokenizer, self.shown, self._max_length, is_short=True, images=llm.images)
        self._long: TextReader | None = None  # two threads cannot share a tokenizer

    def close(self) -> None:
        """Let the threads go."""
        for thread in self._threads.values():
            thread.shutdown(wait=False, cancel_futures=True)

    def need(self, what: str, param: str | None = None) -> None:
        """Check that there is a tokenizer.

        Raises:
            ApiError: the model has no tokenizer, and `what` needs one.
        """
        if not self.exists:
            message = f"{what} needs a tokenizer, and this model has none: send the prompt of a completion as token ids"
            raise ApiError(400, message, "no_tokenizer", param)

    def check_length(self, characters: int, param: str) -> None:
        """Check the length of a text; see `TextReader.check_length`."""
        self._short.check_length(characters, param)

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

    def special(self, texts: Collection[str]) -> tuple[int, ...]:
        """Return the ids of the special tokens that are written so."""
        added: dict[int, Any] = getattr(self._short.tokenizer, "added_tokens_decoder", {})
        return tuple(token for token, about in added.items() if about.special and about.content in texts)

    async def encode(self, text: str, special: bool = True) -> tuple[int, ...]:
        """Return the ids of a text, with the tokenizer's special tokens around it or without.

        Raises:
            ApiError: see `TextReader.ids_of`; or there is no tokenizer.
        """
        self.need("a text", "prompt")
        self.check_length(len(text), "prompt")
        return await self._run(lambda reader: reader.ids_of(text, special), len(text))

    async def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens included.

        Raises:
            ApiError: an id that is no token, or there is no tokenizer.
        """
        self.need("the text of tokens", "tokens")
        self.check(ids, "tokens")
        return await self._run(lambda reader: TokenBytes(reader.tokenizer).text(ids, False), len(ids))

    async def texts(self, ids: Sequence[int]) -> list[str]:
        """Return the text of every id alone; `token_id:N` where there is no tokenizer."""
        if not self.exists:
            return [f"token_id:{i}" for i in ids]

        def each(reader: TextReader) -> list[str]:
            return [TokenBytes(reader.tokenizer).of(i).decode("utf-8", "replace") for i in ids]

        return await self._run(each, len(ids))

    async def chat(
        self, messages: Sequence[Message], body: ChatFields, use_tools: bool = True
    ) -> tuple[str, tuple[int, ...]]:
        """Return a chat as the model reads it: the text, and its ids.

        Raises:
            ApiError: see `TextReader.chat`; or there is no tokenizer.
        """
        size = self._chat_size(messages, body, use_tools)
        return await self._run(lambda reader: reader.chat(messages, body, use_tools), size)

    async def read_chat(
        self, messages: Sequence[Message], body: ChatFields, use_tools: bool, requested: ChatMarks
    ) -> tuple[tuple[int, ...] | Prompt, PromptMarks]:
        """Return a chat as the model reads it, in token ids, and its marks.

        Raises:
            ApiError, OptionError: see `TextReader.read_chat`; or there is no tokenizer.
        """
        size = self._chat_size(messages, body, use_tools)
        return await self._run(lambda reader: reader.read_chat(messages, body, use_tools, requested), size)

    def _chat_size(self, messages: Sequence[Message], body: ChatFields, use_tools: bool) -> int:
        """Return the characters of a chat, about.

        Raises:
            ApiError: there is no tokenizer, or far more characters than the model's context holds.
        """
        self.need("a chat", "messages")
        tools = (body.tools or []) if use_tools else []
        size = sum(message.length for message in messages) + sum(tool.function.length for tool in tools)
        self.check_length(size, "messages")
        return size

    async def chunked(self, prompt: Prompt) -> Prompt:
        """Return the same prompt with token ids in place of texts.

        Raises:
            ApiError: see `TextReader.chunked`; or there is no tokenizer.
        """
        texts = [text for text in prompt.texts if isinstance(text, str)]
        if texts:
            self.need("a text", "prompt")
        size = sum(map(len, texts))
        self.check_length(size, "prompt")
        return await self._run(lambda reader: reader.chunked(prompt), size)

    async def in_text(self, text: str, ids: tuple[int, ...], requested: RequestedMarks) -> PromptMarks:
        """Return the marks of a completion's text, in tokens; see `TextReader.in_text`."""
        return await self._run(lambda reader: reader.in_text(text, ids, requested), len(text))

    async def _run(self, work: Callable[[TextReader], T], size: int) -> T:
        """Run `work`, once, on a text of `size` characters.

        A text that turns out longer is read in the thread of long ones.
        """
        if size <= SHORT:
            try:
                return await in_thread(self._threads[False], work, self._short)
            except LongTextError:
                pass
        if self._long is None:
            tokenizer = await asyncio.get_running_loop().run_in_executor(
                self._threads[False], copy.deepcopy, self._short.tokenizer
            )
            self._long = TextReader(tokenizer, self.shown, self._max_length, is_short=False, images=self._images)
        return await in_thread(self._threads[True], work, self._long)
