"""Tools of a chat: those that are shown, whether one must be called, and how often."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from millpond.server.errors import ApiError
from millpond.server.messages import MAX_CALLS, MAX_JSON, Function
from millpond.server.schemas import ChatBody, NamedTool
from millpond.server.tools.formats import CallFormat, Hermes, Llama3, Mistral, Tag
from millpond.server.tools.reader import Reader
from millpond.server.tools.template import Shown


def format_of(parser: str, shown: Shown) -> CallFormat | None:
    """Return the format of calls by its name; None: calls are not read.

    See `ServerSettings.tool_parser`.
    """
    form = shown.format()
    if parser == "auto" or (form is not None and form.name == parser):
        return form
    formats: dict[str, CallFormat] = {"hermes": Hermes(), "llama3": Llama3(), "mistral": Mistral()}
    return formats.get(parser)


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of one chat that can be called.

    Attributes:
        format: Format of calls.
        functions: Functions that may be called.
        most: Most calls in one answer.
        must: Whether there must be one.
    """

    format: CallFormat
    functions: tuple[Function, ...]
    most: int
    must: bool

    def reader(self, held: bool) -> Reader:
        """Return a reader that takes calls out of one answer.

        Args:
            held: Whether the answer is held to a `constraint`.
        """
        return self.format.reader({function.name for function in self.functions}, self.most, held)

    def constraint(self, schema: Mapping[str, Any] | None) -> Tag | None:
        """Return what an answer must follow for its calls; None: nothing but `schema`.

        Args:
            schema: Schema of the answer where it is no call.

        Raises:
            ApiError: parameters of a tool are no object, or all are too long.
        """
        many, strict = self.most > 1, any(function.strict for function in self.functions)
        if not (self.must or strict or schema is not None):
            return None
        length = sum(function.length for function in self.functions)
        if length > MAX_JSON:
            message = f"tools to which answers are held have {length:,} characters and may have {MAX_JSON:,} together"
            raise ApiError(400, message, "invalid_value", "tools")
        try:
            if self.must:
                return self.format.calls(self.functions, many)
            if schema is not None:
                answer = {"type": "json_schema", "json_schema": schema}
                return {"type": "or", "elements": [answer, self.format.calls(self.functions, many)]}
            free = {"parameters": {"type": "object"}}
            held = [one if one.strict else one.model_copy(update=free) for one in self.functions]
            return self.format.text_and_calls(held, many)
        except ValueError as error:
            raise ApiError(400, str(error), "invalid_value", "tools") from None


def tools_of(body: ChatBody, form: CallFormat | None, shown: Shown) -> Tools | None:
    """Return the tools of a chat; None: none can be called.

    Raises:
        ApiError: a tool must be called, and there is none, none of that name, or no format to call it in.
    """
    choice, tools = body.tool_choice or "auto", body.tools or []
    if choice == "none" or (choice == "auto" and (form is None or not tools)):
        return None
    functions = [tool.function for tool in tools]
    if twice := sorted({one.name for one in functions if sum(one.name == other.name for other in functions) > 1}):
        raise ApiError(400, f"two tools are called {twice[0]!r}", "invalid_value", "tools")
    if isinstance(choice, NamedTool):
        functions = [function for function in functions if function.name == choice.function.name]
    if not functions:
        wanted = repr(choice.function.name) if isinstance(choice, NamedTool) else "at least one"
        message = f"tool_choice asks for a tool, and {wanted} is not in tools"
        raise ApiError(400, message, "invalid_value", "tool_choice")
    if form is None:
        message = "a tool cannot be required: this server knows no format of calls for the model; see --tool-parser"
        raise ApiError(400, message, "unsupported_parameter", "tool_choice")
    must = choice != "auto"
    if must and body.response_format is not None and body.response_format.type != "text":
        message = "tool_choice asks for a call and response_format for something else: leave one of them out"
        raise ApiError(400, message, "invalid_value", "response_format")
    one = body.parallel_tool_calls is False or isinstance(choice, NamedTool) or not shown.many
    return Tools(form, tuple(functions), 1 if one else MAX_CALLS, must)
