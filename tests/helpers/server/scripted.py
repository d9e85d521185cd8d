"""A fake engine that writes given texts, a token of a few characters at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from millpond.engine.outputs import FinishReason, RequestOutput
from millpond.engine.request import Request
from tests.engine.test_constraint import byte_tokenizer
from tests.helpers.server.fake import FakeLLM

#: A chat template that shows tools and calls as Hermes does.
HERMES = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}{% for call in message.tool_calls %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}\n{% endfor %}"
)


class ScriptedLLM(FakeLLM):
    """A `ServedLLM` that answers its first request with the first text, and so on; the last text again and again.

    Args:
        step: characters of a token. reason: of the end, where the text is out before `max_tokens`.
    """

    def __init__(self, *texts: str, step: int = 3, reason: FinishReason = "stop") -> None:
        tokenizer = byte_tokenizer()
        tokenizer.chat_template = HERMES
        super().__init__(context_length=100_000, tokenizer=tokenizer)
        self.vocab_size = len(tokenizer)
        self.texts, self.step, self.ends = texts, step, reason

    def says(self, *texts: str) -> None:
        """What it answers from now on."""
        self.texts = texts
        self.asked.clear()

    async def stream(self, request: Request) -> Any:
        text = self.texts[min(len(self.asked), len(self.texts) - 1)]
        self.asked.append(request)
        made = range(0, len(text) + self.step, self.step)
        for end in made:
            yield self._output(request, text[:end], None if end < len(text) else self.ends)

    def _output(self, request: Request, text: str, reason: FinishReason | None) -> RequestOutput:
        length = -(-len(text) // self.step)
        output = super().output(request, length, reason, 0.0)
        completions = [self._with(one, text) for one in output.completions]
        return type(output)(
            output.request_id,
            None,
            output.prompt_token_ids,
            tuple(completions),
            output.times,
            None,
            finished=reason is not None,
        )

    @staticmethod
    def _with(completion: Any, text: str) -> Any:
        return type(completion)(
            completion.index,
            text,
            completion.token_ids,
            completion.logprobs,
            completion.finish_reason,
            None,
            completion.kv,
        )

    def answer(self, prompt: Sequence[int], index: int, length: int) -> tuple[int, ...]:
        return tuple(2 + i % 90 for i in range(length))

    def prompt(self, number: int = -1) -> str:
        """What the model read."""
        return str(self.tokenizer.decode(list(self.asked[number].prompt)))
