"""Request bodies of /v1/messages and /v1/messages/count_tokens, Anthropic's interface."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StrictBool, field_validator, model_validator

from millpond.server.messages import MAX_NAME, MAX_TOOLS, NAMES, Body, CacheControl, Echo, Name, TextOr, length_of
from millpond.server.schemas import ClientNote, StopText, TokenFields

#: Blocks that no model here reads, or that Anthropic's own servers make.
_UNREAD = {
    "image": "models here read text; describe the picture, or leave it out",
    "document": "models here read text; send the document's text in a text block",
    "search_result": "send the result's text in a text block",
    "redacted_thinking": "it can be read by the server that wrote it alone; leave it out",
    "container_upload": "there is no container; send the file's text in a text block",
}
_OF_SERVERS = "this server runs no tools of its own; leave the block out"


def _readable(given: Any) -> Any:
    """Return a block, unless it is one that no model here reads.

    Raises:
        ValueError: it is, by its name.
    """
    kind = given.get("type") if isinstance(given, dict) else "text"
    if not isinstance(kind, str):
        raise ValueError("a block has a type, such as {'type': 'text', 'text': 'Hello'}")
    if kind not in ("text", "tool_use", "tool_result", "thinking"):
        of_servers = kind == "server_tool_use" or kind.endswith("_tool_result")
        other = _OF_SERVERS if of_servers else "blocks are text, tool_use, tool_result and thinking"
        raise ValueError(f"a block of type {kind[:80]!r} cannot be read: {_UNREAD.get(kind, other)}")
    return given


def _known(given: Any) -> Any:
    """Return a tool, unless it is one of Anthropic's own servers or models.

    Raises:
        ValueError: it is, by its name.
    """
    kind = given.get("type") if isinstance(given, dict) else None
    if kind not in (None, "custom"):
        raise ValueError(
            f"a tool of type {str(kind)[:80]!r} is not known here; offer one of your own with a name, a description "
            "and an input_schema"
        )
    return given


class TextBlock(Body):
    """A piece of text; citations are ignored, since they repeat what the text says."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: Echo = None


class ToolUseBlock(Body):
    """A call of a tool that the model made; `caller` is always the model itself."""

    type: Literal["tool_use"]
    id: Name
    name: Name
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: Echo = None
    toolset_name: None = None

    @field_validator("input")
    @classmethod
    def _short(cls, given: dict[str, Any]) -> dict[str, Any]:
        length_of(given)
        return given


class ThinkingBlock(Body):
    """Thoughts of an earlier answer, which the template shows or not; their signature is not checked."""

    type: Literal["thinking"]
    thinking: str
    signature: Echo = None


ResultPart = Annotated[TextBlock, BeforeValidator(_readable)]


class ToolResultBlock(Body):
    """The result of a tool, or why it failed."""

    type: Literal["tool_result"]
    tool_use_id: Name
    content: TextOr[ResultPart] | None = None
    is_error: StrictBool | None = None
    cache_control: CacheControl | None = None
    toolset_name: None = None


Block = Annotated[
    Annotated[TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock, Field(discriminator="type")],
    BeforeValidator(_readable),
]
#: Which blocks go with which role.
_BLOCKS: dict[str, tuple[type[Body], ...]] = {
    "user": (TextBlock, ToolResultBlock),
    "assistant": (TextBlock, ToolUseBlock, ThinkingBlock),
    "system": (TextBlock,),
}


class AnthropicMessage(Body):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: TextOr[Block]

    @model_validator(mode="after")
    def _of_role(self) -> AnthropicMessage:
        for block in self.content if isinstance(self.content, list) else ():
            if not isinstance(block, _BLOCKS[self.role]):
                raise ValueError(f"a message of the role {self.role!r} has no block of type {block.type!r}")
        return self


class AnthropicTool(Body):
    """A tool that the client runs."""

    type: Literal["custom"] | None = None
    name: Annotated[str, Field(pattern=NAMES, max_length=MAX_NAME)]
    description: str | None = None
    input_schema: dict[str, Any]
    input_examples: list[dict[str, Any]] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None

    @model_validator(mode="after")
    def _short(self) -> AnthropicTool:
        length_of([self.input_schema, self.input_examples])
        return self

    @property
    def told(self) -> str | None:
        """The description, with the examples of calls."""
        if not self.input_examples:
            return self.description
        shown = "\n".join(json.dumps(one, ensure_ascii=False) for one in self.input_examples)
        return f"{self.description or ''}\n\nExamples of its input:\n{shown}".lstrip()


OfferedTool = Annotated[AnthropicTool, BeforeValidator(_known)]


class AutoChoice(Body):
    """The model decides whether it calls tools."""

    type: Literal["auto"]
    disable_parallel_tool_use: bool = False


class AnyChoice(Body):
    """The model must call one of the tools."""

    type: Literal["any"]
    disable_parallel_tool_use: bool = False


class ToolChoice(Body):
    """The model must call this tool."""

    type: Literal["tool"]
    name: Name
    disable_parallel_tool_use: bool = False


class NoChoice(Body):
    """The model must not call a tool."""

    type: Literal["none"]


class Thinking(Body):
    """Whether the model may think before it answers (`enable_thinking` of templates that take it)."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(default=None, ge=1)
    display: Literal["summarized", "omitted"] | None = None


class AnthropicSchema(Body):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """The schema of the answer, and how much the model thinks (`reasoning_effort` of templates that take it)."""

    format: AnthropicSchema | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class KeepThinking(Body):
    """Pass the thoughts of all turns to the template."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]


class ContextManagement(Body):
    """Edits of the conversation before it is read; only edits that change nothing are accepted."""

    edits: list[KeepThinking] | None = None


class PromptFields(Body):
    """Fields that make a prompt of a conversation, in both routes."""

    model: str | None = None
    messages: Annotated[list[AnthropicMessage], Field(min_length=1, fail_fast=True)]
    system: TextOr[TextBlock] | None = None
    tools: Annotated[list[OfferedTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Annotated[AutoChoice | AnyChoice | ToolChoice | NoChoice, Field(discriminator="type")] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    cache_control: CacheControl | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # said for Anthropic's servers; no answer of this one depends on them
    speed: Literal["standard"] | None = None
    user_profile_id: ClientNote | None = None
    workspace_id: ClientNote | None = None
    # the only values that can be obeyed
    mcp_servers: Annotated[list[Any], Field(max_length=0)] | None = None
    container: None = None


class CountTokensBody(PromptFields):
    """POST /v1/messages/count_tokens."""


class MessagesBody(PromptFields, TokenFields):
    """POST /v1/messages."""

    max_tokens: int = Field(ge=1)
    stop_sequences: Annotated[list[StopText], Field(max_length=16)] | None = None
    metadata: Annotated[dict[ClientNote, ClientNote | None], Field(max_length=16)] | None = None  # type: ignore[assignment]
    inference_geo: ClientNote | None = None
    diagnostics: None = None
    stop: None = None
