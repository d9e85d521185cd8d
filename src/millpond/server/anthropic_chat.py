"""A conversation of Anthropic's interface as a chat of ours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from millpond.server.anthropic_schemas import (
    AnthropicMessage,
    AnyChoice,
    AutoChoice,
    Block,
    MessagesBody,
    NoChoice,
    PromptFields,
    TextBlock,
    ThinkingBlock,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
)
from millpond.server.messages import CalledFunction, Function, Message, Parts, TextPart, Tool, ToolCall
from millpond.server.schemas import (
    ChatBody,
    ChatFields,
    JsonSchema,
    NamedFunction,
    NamedTool,
    SchemaFormat,
    TokenFields,
)

#: `reasoning_effort` of templates by Anthropic's `effort`, where the two differ.
_EFFORTS = {"xhigh": "high", "max": "high"}


def chat_fields(body: PromptFields, has_template: bool) -> ChatFields:
    """Return what makes the prompt besides the messages.

    Args:
        body: Body of the request.
        has_template: Whether the tokenizer has a chat template, which takes arguments.
    """
    last = body.messages[-1]
    continues = last.role == "assistant" and not any(isinstance(block, ToolUseBlock) for block in _blocks(last))
    fields: dict[str, Any] = {}
    if has_template and body.thinking is not None:
        fields["enable_thinking"] = body.thinking.type != "disabled"
    if has_template and body.output_config is not None and (effort := body.output_config.effort) is not None:
        fields["reasoning_effort"] = _EFFORTS.get(effort, effort)
    tools = [
        Tool(
            type="function",
            function=Function(name=one.name, description=one.told, parameters=one.input_schema, strict=one.strict),
        )
        for one in body.tools or ()
    ]
    return ChatFields(
        tools=tools or None,
        chat_template_kwargs=fields | (body.chat_template_kwargs or {}) or None,
        add_generation_prompt=not continues,
        continue_final_message=continues,
    )


def chat_messages(body: PromptFields) -> list[Message]:
    """Return the conversation, with the instructions as its first message."""
    system = [] if not body.system else [Message(role="system", content=_text(body.system))]
    return [*system, *(one for message in body.messages for one in _messages(message))]


def use_tools(body: PromptFields) -> bool:
    """Whether tools are shown to the model."""
    return not isinstance(body.tool_choice, NoChoice)


def chat_of(body: MessagesBody, has_template: bool) -> ChatBody:
    """Return the same as a body of /v1/chat/completions."""
    same = {name: getattr(body, name) for name in TokenFields.model_fields if name not in ("metadata", "stop")}
    choice, schema = body.tool_choice, None if body.output_config is None else body.output_config.format
    if isinstance(choice, ToolChoice):
        same["tool_choice"] = NamedTool(type="function", function=NamedFunction(name=choice.name))
    elif choice is not None:
        same["tool_choice"] = {"any": "required"}.get(choice.type, choice.type)
    if isinstance(choice, AutoChoice | AnyChoice | ToolChoice) and choice.disable_parallel_tool_use:
        same["parallel_tool_calls"] = False
    if schema is not None:
        named = JsonSchema(name="answer", schema=schema.schema_)
        same["response_format"] = SchemaFormat(type="json_schema", json_schema=named)
    fields = chat_fields(body, has_template)
    # the values are checked: those of `TokenFields` with `body`, the others where they were made
    return ChatBody.model_construct(
        messages=chat_messages(body),
        max_tokens=body.max_tokens,
        stop=body.stop_sequences,
        **{name: getattr(fields, name) for name in ChatFields.model_fields},
        **same,
    )


def _blocks(message: AnthropicMessage) -> Sequence[Block]:
    content = message.content
    return [TextBlock(type="text", text=content)] if isinstance(content, str) else content


def _messages(message: AnthropicMessage) -> list[Message]:
    """Return a message of ours, or several, one for each result of a tool, in their order."""
    if isinstance(message.content, str):
        return [Message(role=message.role, content=message.content)]
    if message.role == "assistant":
        return [_answer(message.content)]
    messages: list[Message] = []
    texts: list[TextBlock] = []
    for block in message.content:
        if isinstance(block, TextBlock):
            texts.append(block)
        elif isinstance(block, ToolResultBlock):
            if texts:
                messages.append(Message(role=message.role, content=_text(texts)))
                texts = []
            messages.append(_result(block))
    return [*messages, Message(role=message.role, content=_text(texts))] if texts or not messages else messages


def _answer(blocks: Sequence[Block]) -> Message:
    """Return the model's message: thoughts, text and calls."""
    thoughts = "\n".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    calls = [block for block in blocks if isinstance(block, ToolUseBlock)]
    text = _text([block for block in blocks if isinstance(block, TextBlock)])
    return Message(
        role="assistant",
        content=text or None,
        reasoning_content=thoughts or None,
        tool_calls=[_call(block) for block in calls] or None,
        cache_control=_mark(calls),
    )


def _call(block: ToolUseBlock) -> ToolCall:
    return ToolCall(id=block.id, function=CalledFunction(name=block.name, arguments=block.input))


def _result(block: ToolResultBlock) -> Message:
    """Return the result of a tool as a message.

    That it failed is said in words, since templates know no other way.
    """
    parts = _text(block.content or "")
    text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
    if block.is_error and not text.lower().lstrip().startswith("error"):
        text = f"Error: {text}"
    marks = [block, *(block.content if isinstance(block.content, list) else ())]
    return Message(role="tool", tool_call_id=block.tool_use_id, content=text, cache_control=_mark(marks))


def _mark(blocks: Iterable[Any]) -> Any:
    return next((mark for block in reversed(list(blocks)) if (mark := getattr(block, "cache_control", None))), None)


def _text(content: str | Sequence[Any]) -> str | Parts:
    """Return a text as it is, or the parts of blocks, each of which begins a line of its own."""
    if isinstance(content, str):
        return content
    parts: Parts = []
    for number, block in enumerate(content):
        ends_line = number == len(content) - 1 or block.text.endswith("\n")
        text = block.text if ends_line else f"{block.text}\n"
        parts.append(TextPart(type="text", text=text, cache_control=block.cache_control))
    return parts
