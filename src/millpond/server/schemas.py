"""Request bodies, and constraints on answers in vLLM's words. An unknown field is refused, never ignored."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, StrictBool, StrictFloat, StrictInt, Tag, ValidationError

from millpond.engine.grammar.compiler import MAX_CHOICES, MAX_GRAMMAR
from millpond.engine.grammar.patterns import MAX_CHARACTERS
from millpond.engine.grammar.schema import MAX_BYTES
from millpond.engine.request import MAX_SALT, OnPressure
from millpond.engine.sampling.params import MAX_ALLOWED, MAX_BAD_WORD, MAX_BAD_WORDS
from millpond.prompt_marks import MAX_BREAKPOINTS, MAX_KEPT, MAX_SHARES
from millpond.server.errors import CACHE_FIELDS, ApiError, of_validation
from millpond.server.markdown import MOST_CHARACTERS as MAX_MARKDOWN
from millpond.server.messages import MAX_NAME, MAX_TOOLS, Body, Message, Name, Tool

#: Structures of one structural tag at most.
MAX_STRUCTURES = 128
_FEW = Field(min_length=1, max_length=MAX_STRUCTURES, fail_fast=True)
#: A JSON schema as itself or as its text.
Schema = dict[str, Any] | bool | Annotated[str, Field(max_length=MAX_BYTES)]
Regex = Annotated[str, Field(max_length=MAX_CHARACTERS)]
Choices = Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
Ebnf = Annotated[str, Field(max_length=MAX_GRAMMAR)]
TagOrText = dict[str, Any] | Annotated[str, Field(max_length=MAX_BYTES)]


class Structure(Body):
    """A part of an answer, between two marks, that must be JSON that follows a schema."""

    begin: str
    schema_: dict[str, Any] | bool = Field(alias="schema")
    end: str


class StructuralTag(Body):
    """A structural tag: a format of xgrammar's, or structures after triggers, as in older versions of vLLM."""

    type: Literal["structural_tag"] = "structural_tag"
    format: dict[str, Any] | None = None
    structures: Annotated[list[Structure], _FEW] | None = None
    triggers: Annotated[list[str], _FEW] | None = None

    def constraint(self, field: str) -> dict[str, Any]:
        """Return the format that an answer must follow.

        Raises:
            ApiError: neither a format nor structures with triggers, or both.
        """
        if self.format is not None and self.structures is None and self.triggers is None:
            return self.format
        if self.format is not None or self.structures is None or self.triggers is None:
            message = f"{field}: a structural_tag has either a format, or structures and triggers"
            raise ApiError(400, message, "invalid_value", field)
        tags = [
            {
                "type": "tag",
                "begin": structure.begin,
                "end": structure.end,
                "content": {"type": "json_schema", "json_schema": structure.schema_},
            }
            for structure in self.structures
        ]
        return {"type": "triggered_tags", "triggers": self.triggers, "tags": tags}


class StructuredOutputs(Body):
    """`structured_outputs`: exactly one of these fields."""

    json_: Schema | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: Regex | None = None
    choice: Choices | None = None
    grammar: Ebnf | None = None
    structural_tag: TagOrText | None = None


class GuidedFields(Body):
    """Rules for the whole answer: one of these at most."""

    guided_json: Schema | None = None
    guided_regex: Regex | None = None
    guided_choice: Choices | None = None
    guided_grammar: Ebnf | None = None
    structured_outputs: StructuredOutputs | None = None


def constraint(fields: GuidedFields) -> tuple[str, dict[str, Any]] | None:
    """Return the field that says what an answer must follow, with its `SamplingParams`.

    Raises:
        ApiError: 400, more than one, none inside `structured_outputs`, or no JSON.
    """
    constraints = [
        (name, _words(name.removeprefix("guided_"), value, name))
        for name in ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
        if (value := getattr(fields, name)) is not None
    ]
    if fields.structured_outputs is not None:
        inside = fields.structured_outputs.model_dump(exclude_none=True, by_alias=True)
        nested = [
            (f"structured_outputs.{name}", _words(name, value, f"structured_outputs.{name}"))
            for name, value in inside.items()
            if value is not False
        ]
        if not nested:
            message = "structured_outputs must hold one of json, json_object, regex, choice, grammar, structural_tag"
            raise ApiError(400, message, "invalid_value", "structured_outputs")
        constraints += nested
    if len(constraints) > 1:
        raise two_of(constraints[0][0], constraints[1][0])
    return constraints[0] if constraints else None


def two_of(field: str, other: str) -> ApiError:
    """Return an error about two fields that both say what the answer must follow."""
    message = f"{field} and {other}: an answer can follow one of them; leave the other out"
    return ApiError(400, message, "invalid_value", field)


def _words(name: str, value: Any, field: str) -> dict[str, Any]:
    """Return the `SamplingParams` of one rule."""
    if name == "json":
        return {"json_schema": _parsed(value, field)}
    if name == "json_object":
        return {"json_schema": {"type": "object"}}
    if name == "structural_tag":
        tag = _parsed(value, field)
        return {name: _tag(tag, field) if isinstance(tag, dict) else tag}
    return {name: tuple(value) if name == "choice" else value}


def _tag(tag: dict[str, Any], field: str) -> dict[str, Any]:
    """Return the format of a tag that is given alone, or inside of a whole structural tag."""
    if tag.get("type") != "structural_tag" and "structures" not in tag:
        return tag
    try:
        return StructuralTag.model_validate(tag).constraint(field)
    except ValidationError as error:
        faults = error.errors(include_url=False)
        raise of_validation([{**fault, "loc": (field, *fault["loc"])} for fault in faults]) from None


def _parsed(given: Any, field: str) -> Any:
    """Return a schema or a tag, given as itself or as JSON text.

    Raises:
        ApiError: 400, no JSON, or no JSON object.
    """
    try:
        schema = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"{field} is no JSON: {error}", "invalid_value", field) from None
    if not isinstance(schema, dict | bool):
        raise ApiError(400, f"{field} must be a JSON object, not {type(schema).__name__}", "invalid_value", field)
    return schema


#: Bound of seeds, what 64 bits hold; most tokens, more than any context holds.
_INT64, MAX_TOKENS = 2**63 - 1, 2**31 - 1
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
#: Lists of what clients send end at the first bad value: the errors of all would be many.
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
BadWord = Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD)]
StopText = Annotated[str, Field(min_length=1, max_length=1_000)]
#: Names in `millpond.forget` at most, and one of them: a call's id has `MAX_NAME` characters at most.
MAX_FORGETS = 256
Forgettable = Annotated[str, Field(min_length=1, max_length=MAX_NAME + len("tool:"))]
#: Share of the budget.
Share = Annotated[StrictFloat, Field(gt=0, le=1)]
#: Index into a text, in characters or tokens; whether it is in the prompt is checked later.
Place = Annotated[StrictInt, Field(ge=-MAX_TOKENS, le=MAX_TOKENS)]
SpanShares = Annotated[list[tuple[Place, Place, Share]], Field(max_length=MAX_SHARES, fail_fast=True)]
#: A number for all messages, or spans: an error speaks of the one that was meant.
FairShareField = Annotated[
    Annotated[Share, Tag("share")] | Annotated[SpanShares, Tag("spans")],
    Discriminator(lambda shares: "spans" if isinstance(shares, list) else "share"),
]
#: Names and texts of settings: of a method and its options in one text at most.
MAX_SETTING = 4_000
Setting = Annotated[str, Field(max_length=MAX_SETTING)]
#: Other files of one request at most.
MAX_FILES = 256
#: Options of one method, and formats of as many layers, at most.
MAX_SETTINGS, MAX_FORMATS = 64, 1_024
OptionValue = StrictBool | StrictInt | Annotated[StrictFloat, Field(allow_inf_nan=False)] | Setting | None
#: A name or a note of a client's own, which no answer depends on; OpenAI's have 512 characters at most.
ClientNote = Annotated[str, Field(max_length=512)]


class CacheFields(Body):
    """`millpond`: how this request's cache is kept and when it is served.

    Attributes:
        preset: method, budget and codec in one word, in place of the three.
        max_kl: with the budget "auto", how far predictions may differ from the full cache's, in nats per token.
        watch: keep a snapshot of the cache at the end for /v1/millpond/memory/{id}.
        chunks: [begin, end] of each chunk of a completion's only prompt, in characters of a text, or in tokens.
        forgotten: report in `usage.millpond` how much of each message of a chat the cache no longer holds.
        keep: [begin, end] of spans of a completion's only prompt that every head keeps, in characters of a text, or in
            tokens. In chats, messages and their parts have `millpond.keep` instead.
        fair_shares: share of an even cut of the budget that every head keeps of each message of a chat, at least;
            or [begin, end, share] of spans of a completion's only prompt, in characters of a text, or in tokens.
        forget: parts of a chat that no later token sees: "thoughts", "tool:ID" of a call's answer, "message:N".
        breakpoints: numbers of characters of a completion's only prompt, or of its tokens, from which later prompts
            can continue. In chats, messages and their parts have `cache_control` instead.
        on_pressure: "refuse" the request if any part of its prompt would be evicted, or "evict" as the method does.
        recompute: "auto", or the share of each stored chunk that is computed again, 0 to 1.
    """

    preset: Setting | None = None
    method: Setting | None = None
    budget: StrictInt | StrictFloat | Setting | None = None
    codec: (
        Setting | tuple[Setting, Setting] | Annotated[dict[Setting, Setting], Field(max_length=MAX_FORMATS)] | None
    ) = None
    max_kl: Annotated[StrictInt | StrictFloat, Field(gt=0, le=1e6)] | None = None
    options: Annotated[dict[Setting, OptionValue], Field(max_length=MAX_SETTINGS)] = Field(default_factory=dict)
    priority: int = Field(default=0, ge=-1_000, le=1_000)
    deadline_s: float | None = Field(default=None, gt=0, le=1e9)
    watch: bool = False
    chunks: Annotated[list[tuple[Place, Place]], Field(max_length=256, fail_fast=True)] | None = None
    forgotten: bool = False
    keep: Annotated[list[tuple[Place, Place]], Field(max_length=MAX_KEPT, fail_fast=True)] | None = None
    fair_shares: FairShareField | None = None
    forget: Annotated[list[Forgettable], Field(max_length=MAX_FORGETS, fail_fast=True)] | None = None
    breakpoints: Annotated[list[Place], Field(max_length=MAX_BREAKPOINTS, fail_fast=True)] | None = None
    on_pressure: OnPressure | None = None
    recompute: Literal["auto"] | Annotated[StrictInt | StrictFloat, Field(ge=0, le=1)] = "auto"


CACHE_FIELDS.update(CacheFields.model_fields)


class StreamOptions(Body):
    """What a stream ends with; pieces are sent as they come, without padding that would hide their length."""

    include_usage: bool = False
    include_obfuscation: bool | None = None


class TokenFields(GuidedFields):
    """Choice of tokens and of the cache, in every kind of answer; null stands for the default."""

    model: str | None = None
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100)
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0, le=_INT64)
    min_p: float | None = Field(default=None, ge=0, le=1)
    typical_p: float | None = Field(default=None, gt=0, le=1)
    logit_bias: dict[TokenId, Annotated[float, Field(ge=-100, le=100)]] | None = None
    bad_words: Annotated[list[BadWord], Field(max_length=MAX_BAD_WORDS, fail_fast=True)] | None = None
    allowed_token_ids: Annotated[TokenIds, Field(min_length=1, max_length=MAX_ALLOWED)] | None = None
    min_tokens: int | None = Field(default=None, ge=0, le=MAX_TOKENS)
    seed: int | None = Field(default=None, ge=-_INT64, le=_INT64)
    stop: StopText | Annotated[list[StopText], Field(max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1_000)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT)] | None = None
    millpond: CacheFields = CacheFields()
    # said for the one who runs the server; no answer depends on them
    user: ClientNote | None = None
    metadata: Annotated[dict[ClientNote, ClientNote], Field(max_length=16)] | None = None
    store: bool | None = None
    service_tier: ClientNote | None = None
    prompt_cache_key: ClientNote | None = None
    safety_identifier: ClientNote | None = None


class SamplingFields(TokenFields):
    """Fields that completions and chats have in common."""

    max_tokens: int | None = Field(default=None, ge=0)
    n: int | None = Field(default=None, ge=1, le=128)
    stream_options: StreamOptions | None = None
    return_progress: bool | None = None


class CompletionBody(SamplingFields):
    """POST /v1/completions."""

    prompt: (
        str | TokenIds | Annotated[list[str], Field(fail_fast=True)] | Annotated[list[TokenIds], Field(fail_fast=True)]
    )
    suffix: str | None = None
    best_of: int | None = Field(default=None, ge=1, le=128)
    echo: bool | None = None
    logprobs: int | None = Field(default=None, ge=0, le=20)


class ExtraFile(Body):
    """Another file of the project."""

    filename: str = ""
    text: str


class InfillBody(TokenFields):
    """POST /infill, llama.cpp's.

    Attributes:
        prompt: beginning of the text in the middle. n_predict: most new tokens; -1: as many as fit.
        n_indent: least white space at the beginning of each line but the first; a line with less ends the answer.
        t_max_predict_ms: milliseconds after the first token after which the answer ends as it is; 0: no limit.
        response_fields: parts of the answer that are sent, as paths such as "timings/prompt_n".
    """

    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: Annotated[list[ExtraFile], Field(max_length=MAX_FILES, fail_fast=True)] | None = None
    prompt: str = ""
    n_predict: int | None = Field(default=None, ge=-1, le=MAX_TOKENS)
    n_indent: int = Field(default=0, ge=0, le=MAX_TOKENS)
    t_max_predict_ms: float | None = Field(default=None, ge=0, le=1e12)
    response_fields: Annotated[list[ClientNote], Field(max_length=64)] | None = None
    # said for llama.cpp, which has slots, an order of samplers, and no limit of the prompt's time yet
    id_slot: int | None = None
    cache_prompt: bool | None = None
    samplers: Annotated[list[ClientNote], Field(max_length=64)] | None = None
    t_max_prompt_ms: float | None = None


class JsonSchema(Body):
    """A schema with a name; it is always followed strictly."""

    name: str
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextFormat(Body):
    """Plain text, without a format."""

    type: Literal["text"]


class ObjectFormat(Body):
    """Any JSON object."""

    type: Literal["json_object"]


class SchemaFormat(Body):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class ChatFields(Body):
    """Fields that make a prompt of messages.

    Attributes:
        add_generation_prompt: Whether it ends with the head of an answer.
        continue_final_message: Whether it ends inside the last message, which the answer continues.
    """

    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class NamedFunction(Body):
    """A function of one of the tools."""

    name: Name


class NamedTool(Body):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class ChatBody(SamplingFields, ChatFields):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, fail_fast=True)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    response_format: (
        Annotated[TextFormat | ObjectFormat | SchemaFormat | StructuralTag, Field(discriminator="type")] | None
    ) = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None
    # null is what clients send who mean nothing by them; see `UNSUPPORTED`
    audio: None = None
    function_call: None = None
    functions: None = None
    prediction: None = None
    reasoning_effort: None = None
    verbosity: None = None
    web_search_options: None = None


class TokenizeBody(ChatFields):
    """POST /tokenize: either a text or messages."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool = True
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: TokenIds


class MarkdownBody(Body):
    """POST /page/markdown."""

    text: str = Field(max_length=MAX_MARKDOWN)
