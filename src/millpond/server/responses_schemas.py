"""Request bodies of /v1/responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator

from millpond.server.messages import Body, Message
from millpond.server.messages import TextPart as ChatPart
from millpond.server.schemas import Label, ObjectFormat, StreamOptions, TextFormat, TokenFields

#: Where calls of tools are answered.
_TOOLS = "tools are called in chats: POST /v1/chat/completions"


#: Tags of what is a text or a list; that of lists replaces an error, where "" says nothing more.
_TEXT, _LIST = "text", ""


def _kind(value: Any) -> str:
    return _TEXT if isinstance(value, str) else _LIST


class InputPart(Body):
    """A piece of a message; fields of our own answers other than the text are ignored."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    parsed: Any = None


class InputMessage(Body):
    """One message; other fields of our own answers are accepted."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        Annotated[str, Tag(_TEXT)] | Annotated[list[InputPart], Field(fail_fast=True), Tag(_LIST)],
        Discriminator(_kind),
    ]
    id: Label | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    phase: Label | None = None

    @field_validator("type", mode="before")
    @classmethod
    def _is_text(cls, given: Any) -> Any:
        if isinstance(given, str) and given.startswith(("function_call", "custom_tool_call")):
            raise ValueError(_TOOLS)
        return given

    def as_chat(self) -> Message:
        """The same as a message of a chat."""
        content = self.content
        if not isinstance(content, str):
            return Message(role=self.role, content=[ChatPart(type="text", text=part.text) for part in content])
        return Message(role=self.role, content=content)


class NamedSchema(Body):
    """JSON that follows a schema; ours is always strict."""

    type: Literal["json_schema"]
    name: Label
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextConfig(Body):
    """What the text must follow."""

    format: Annotated[TextFormat | ObjectFormat | NamedSchema, Field(discriminator="type")] | None = None
    verbosity: None = None


class ResponseBody(TokenFields):
    """POST /v1/responses."""

    input: Annotated[
        Annotated[str, Tag(_TEXT)]
        | Annotated[list[InputMessage], Field(min_length=1, fail_fast=True), Tag(_LIST)],
        Discriminator(_kind),
    ]  # fmt: skip
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    text: TextConfig | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    stream_options: StreamOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # the only values that can be obeyed, or say nothing where there are no tools
    background: Literal[False] | None = None
    max_tool_calls: int | None = None
    parallel_tool_calls: bool | None = None
    prompt_cache_retention: Label | None = None
    tool_choice: Literal["auto", "none"] | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    truncation: Literal["disabled"] | None = None
    # null is what clients send who mean nothing by them; see `UNSUPPORTED`
    conversation: None = None
    previous_response_id: None = None
    prompt: None = None
    reasoning: None = None

    @field_validator("tools", mode="before")
    @classmethod
    def _no_tools(cls, given: Any) -> Any:
        if given:
            raise ValueError(_TOOLS)
        return given
