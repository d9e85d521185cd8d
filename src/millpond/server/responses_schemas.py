"""Request bodies of /v1/responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, field_validator

from millpond.server.messages import (
    MOST_NAME,
    MOST_TOOLS,
    NAMES,
    Body,
    CalledFunction,
    Function,
    Message,
    Name,
    Tool,
    ToolCall,
    arguments_of,
    length_of,
)
from millpond.server.messages import TextPart as ChatPart
from millpond.server.schemas import Label, ObjectFormat, StreamOptions, TextFormat, TokenFields

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
        Annotated[str, Tag(_TEXT)] | Annotated[list[InputPart], Field(fail_fast=True), Tag(_LIST)], Discriminator(_kind)
    ]
    id: Label | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    phase: Label | None = None

    def as_chat(self) -> Message:
        """The same as a message of a chat."""
        content = self.content
        if not isinstance(content, str):
            return Message(role=self.role, content=[ChatPart(type="text", text=part.text) for part in content])
        return Message(role=self.role, content=content)


class FunctionCall(Body):
    """A call of a tool that the model made."""

    type: Literal["function_call"]
    call_id: Name
    name: Name
    arguments: str
    id: Label | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None

    @field_validator("arguments")
    @classmethod
    def _is_object(cls, given: str) -> str:
        length_of(arguments_of(given))
        return given

    def as_call(self) -> ToolCall:
        """The same as a call of a chat."""
        values = arguments_of(self.arguments)
        return ToolCall(id=self.call_id, function=CalledFunction(name=self.name, arguments=values))


class FunctionOutput(Body):
    """What a tool answered."""

    type: Literal["function_call_output"]
    call_id: Name
    output: Annotated[
        Annotated[str, Tag(_TEXT)] | Annotated[list[InputPart], Field(fail_fast=True), Tag(_LIST)], Discriminator(_kind)
    ]
    id: Label | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None

    def as_chat(self) -> Message:
        """The same as a message of a chat."""
        said = self.output if isinstance(self.output, str) else "".join(part.text for part in self.output)
        return Message(role="tool", tool_call_id=self.call_id, content=said)


def _item(value: Any) -> str:
    """The tag of an item of the input; "" for messages, which need not say that they are."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return kind if kind in ("function_call", "function_call_output") else ""


InputItem = Annotated[
    Annotated[InputMessage, Tag("")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionOutput, Tag("function_call_output")],
    Discriminator(_item),
]


def _function(given: Any) -> Any:
    """A tool, unless it is one that this server would have to run.

    Raises:
        ValueError: it is, by its name.
    """
    kind = given.get("type") if isinstance(given, dict) else "function"
    if kind != "function":
        raise ValueError(f"a tool of type {str(kind)[:80]!r} is not run here; offer functions, which the client runs")
    return given


class FunctionTool(Body):
    """A tool that the client runs."""

    type: Literal["function"]
    name: Annotated[str, Field(pattern=NAMES, max_length=MOST_NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def as_chat(self) -> Tool:
        """The same as a tool of a chat."""
        function = self.model_dump(exclude={"type"})
        return Tool(type="function", function=Function(**function))


class ChosenFunction(Body):
    """The tool that must be called."""

    type: Literal["function"]
    name: Name


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
        Annotated[str, Tag(_TEXT)] | Annotated[list[InputItem], Field(min_length=1, fail_fast=True), Tag(_LIST)],
        Discriminator(_kind),
    ]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    text: TextConfig | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    stream_options: StreamOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: (
        Annotated[
            list[Annotated[FunctionTool, BeforeValidator(_function)]], Field(max_length=MOST_TOOLS, fail_fast=True)
        ]
        | None
    ) = None
    tool_choice: Literal["auto", "none", "required"] | ChosenFunction | None = None
    parallel_tool_calls: bool | None = None
    # the only values that can be obeyed
    background: Literal[False] | None = None
    max_tool_calls: int | None = None  # of tools that a server runs itself, of which there are none
    prompt_cache_retention: Label | None = None
    truncation: Literal["disabled"] | None = None
    # null is what clients send who mean nothing by them; see `UNSUPPORTED`
    conversation: None = None
    previous_response_id: None = None
    prompt: None = None
    reasoning: None = None
