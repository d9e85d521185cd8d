"""Every field of every body by name, for suggestions."""

from __future__ import annotations

from millpond.server.anthropic_schemas import AnthropicMessage, AnthropicTool, MessagesBody
from millpond.server.messages import Message, Tool
from millpond.server.responses import InputMessage, ResponseBody, TextConfig
from millpond.server.schemas import (
    CacheFields,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    InfillBody,
    StreamOptions,
    TokenizeBody,
)

KNOWN = sorted(
    {
        name
        for body in (
            CompletionBody,
            ChatBody,
            CacheFields,
            StreamOptions,
            Message,
            Tool,
            TokenizeBody,
            DetokenizeBody,
            InfillBody,
            ResponseBody,
            InputMessage,
            TextConfig,
            MessagesBody,
            AnthropicMessage,
            AnthropicTool,
        )
        for name in body.model_fields
    }
)
