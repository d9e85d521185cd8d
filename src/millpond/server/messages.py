"""Messages of chats as clients send them, answers of this server among them, and the tools that they may name."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    PrivateAttr,
    StrictBool,
    Tag,
    field_validator,
    model_validator,
)

from millpond.server.errors import KNOWN_FIELDS

#: Of one chat at most: tools, and calls in one message.
MAX_TOOLS, MAX_CALLS = 128, 128
#: Characters of a name or an id, and of the JSON of one tool's parameters or one call's arguments, at most.
MAX_NAME, MAX_JSON = 256, 128 * 1024
#: What names of tools are made of.
NAMES = r"^[\w.:/-]+$"
Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]


def _short(value: Any) -> Any:
    """Return a value that is not longer than `MAX_JSON`, see `length_of`."""
    length_of(value)
    return value


#: Tags of what is a text or a list; that of lists replaces an error, where "" says nothing more.
TEXT, LIST = "text", ""
T = TypeVar("T")


def text_or_list(value: Any) -> str:
    """Return the tag of a value."""
    return TEXT if isinstance(value, str) else LIST


#: A text, or a list of parts.
TextOr = Annotated[
    Annotated[str, Tag(TEXT)] | Annotated[list[T], Field(fail_fast=True), Tag(LIST)], Discriminator(text_or_list)
]

#: What says again what is said elsewhere, and is not read.
Echo = Annotated[Any, AfterValidator(_short), Field(exclude=True)]


class Body(BaseModel):
    """Refuses unknown fields, infinities and NaN."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        KNOWN_FIELDS.update(cls.model_fields)


class CacheControl(Body):
    """Anthropic's mark: later chats can continue from here, as long as there is memory; `ttl` has no effect."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class Kept(Body):
    """`millpond` of a message, or of a part of one: whether every head of every layer keeps it."""

    keep: StrictBool = False


class TextPart(Body):
    """A piece of a message; as a chunk it is a separate text, whose keys and values the chunk store keeps."""

    type: Literal["text"]
    text: str
    chunk: StrictBool = False
    cache_control: CacheControl | None = Field(default=None, exclude=True)
    millpond: Kept | None = None


class ImageUrl(Body):
    """An image in a data: URL; nothing is fetched, and the model decides how it is scaled."""

    url: str
    detail: Literal["auto"] | None = None


class ImagePart(Body):
    """An image in a message of the user."""

    type: Literal["image_url"]
    image_url: ImageUrl
    cache_control: CacheControl | None = Field(default=None, exclude=True)

    @property
    def text(self) -> str:
        """Text of it: none."""
        return ""

    @property
    def chunk(self) -> bool:
        """Whether it is a chunk: never."""
        return False

    @property
    def millpond(self) -> None:
        """Treatment of its own: none."""
        return None


#: A piece of a message.
Part = Annotated[TextPart | ImagePart, Field(discriminator="type")]
Parts = list[TextPart | ImagePart]


class CalledFunction(Body):
    """A called function and its arguments: clients send back the JSON that they got, and templates take the values.

    Attributes:
        arguments: an object, as itself or as its JSON. parsed_arguments: what OpenAI's client made of it.
    """

    name: Name
    arguments: dict[str, Any]
    parsed_arguments: Echo = None
    _length: int = PrivateAttr(0)

    @property
    def length(self) -> int:
        """Characters of it, about."""
        return len(self.name) + self._length

    @field_validator("arguments", mode="before")
    @classmethod
    def _values(cls, given: Any) -> Any:
        return arguments_of(given) if isinstance(given, str) else given

    @model_validator(mode="after")
    def _short(self) -> CalledFunction:
        self._length = length_of(self.arguments)
        return self


class ToolCall(Body):
    """A call in a message of the assistant; `index` numbers the calls of a stream in their order."""

    id: Name | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = Field(default=None, ge=0, le=MAX_CALLS)


class Message(Body):
    """One message of a chat, as the template gets it; other fields of the server's answers are accepted if empty."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: TextOr[Part] | None = None
    name: Name | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_CALLS, fail_fast=True)] | None = None
    tool_call_id: Name | None = None
    millpond: Kept | None = None
    reasoning_content: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    cache_control: CacheControl | None = Field(default=None, exclude=True)
    parsed: Echo = None
    provider_specific_fields: Echo = None

    @model_validator(mode="after")
    def _images_of_users(self) -> Message:
        if self.role != "user" and self.image_urls:
            raise ValueError(f"a message of the {self.role} has an image; only those of the user may")
        return self

    @property
    def ends_with_breakpoint(self) -> bool:
        """Whether it, or a part of it, is marked with `cache_control`."""
        parts = self.content if isinstance(self.content, list) else []
        return self.cache_control is not None or any(part.cache_control is not None for part in parts)

    @property
    def text(self) -> str:
        """All text of it."""
        content = self.content
        return "".join(part.text for part in content) if isinstance(content, list) else content or ""

    @property
    def image_urls(self) -> list[str]:
        """URLs of its images."""
        parts = self.content if isinstance(self.content, list) else []
        return [part.image_url.url for part in parts if isinstance(part, ImagePart)]

    @property
    def pieces(self) -> list[str | None]:
        """Its texts, and None for each image."""
        if not isinstance(self.content, list):
            return [self.content or ""]
        return [part.text if isinstance(part, TextPart) else None for part in self.content]

    @property
    def has_chunks(self) -> bool:
        """Whether a part of it is marked as a chunk."""
        return isinstance(self.content, list) and any(part.chunk for part in self.content)

    @property
    def length(self) -> int:
        """Characters of its text, about."""
        content = self.content or ""
        text = len(content) if isinstance(content, str) else sum(len(part.text) for part in content)
        return text + len(self.reasoning_content or "") + sum(call.function.length for call in self.tool_calls or ())


class Function(Body):
    """Name, description and parameters of a tool."""

    name: Annotated[str, Field(pattern=NAMES, max_length=MAX_NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    _length: int = PrivateAttr(0)

    @property
    def length(self) -> int:
        """Characters of it, about."""
        return len(self.name) + len(self.description or "") + self._length

    @model_validator(mode="after")
    def _short(self) -> Function:
        self._length = length_of(self.parameters)
        return self


class Tool(Body):
    """A tool that the template shows to the model."""

    type: Literal["function"]
    function: Function


def arguments_of(text: str) -> dict[str, Any]:
    """Return the arguments of a call from their JSON.

    Raises:
        ValueError: no JSON, or no object.

    Example:
        >>> arguments_of('{"city": "Bern"}')
        {'city': 'Bern'}
    """
    try:
        arguments = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the arguments of a call must be JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of a call must be a JSON object, not {type(arguments).__name__}")
    return arguments


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def length_of(value: Any) -> int:
    """Return the characters of a value's JSON.

    Raises:
        ValueError: more than `MAX_JSON`, or the value is not JSON.
    """
    try:
        length = len(json.dumps(value, allow_nan=False))
    except RecursionError:
        raise ValueError("values are nested too deep") from None
    if length > MAX_JSON:
        raise ValueError(f"{length:,} characters of JSON, and may have {MAX_JSON:,}")
    return length
