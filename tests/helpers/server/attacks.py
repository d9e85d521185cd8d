"""Every kind of hostile request, by name: what an attacker does, and the status that came back (0: none)."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from functools import cache, partial
from typing import Any

from tests.helpers.server.attacker import Attacker
from tests.helpers.server.hostile import BODIES, CHAT, TEXT

Attack = Callable[[Attacker], int]

SAID: list[dict[str, Any]] = [{"role": "user", "content": "x"}]
HOST = b"Host: 127.0.0.1\r\n"
HEAD = b"POST /v1/completions HTTP/1.1\r\n" + HOST + b"Content-Type: application/json\r\n"
#: Tokens that the bundled model knows, and that its context holds.
VOCAB, CONTEXT = 700, 4_096


@cache
def _body(name: str) -> bytes:
    return BODIES[name][1]().encode()


def _text(**fields: Any) -> Attack:
    return lambda one: one.ask(TEXT, {"prompt": "x", "max_tokens": 2} | fields)


def _schema(schema: Any) -> Attack:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return lambda one: one.ask(CHAT, {"messages": SAID, "max_tokens": 4, "response_format": wanted})


def _fresh_schema(one: Attacker) -> int:
    """One that nobody has asked for before."""
    fields = {f"k{one.draw.random()}": {"enum": [f"v{i}" for i in range(200)]} for _ in range(4)}
    return _schema({"type": "object", "properties": fields, "required": list(fields)})(one)


def _option(method: str, **options: str) -> Attack:
    return _text(millpond={"method": method, "options": options})


@cache
def _pipe() -> str:
    path = os.path.join(tempfile.mkdtemp(), "pipe")
    os.mkfifo(path)
    return path


def _ids(one: Attacker, n: int) -> list[int]:
    return [one.draw.randrange(3, VOCAB) for _ in range(n)]


def _long(one: Attacker, n: int = 1, tokens: int = CONTEXT - 8, **fields: Any) -> int:
    return one.ask(TEXT, {"prompt": [_ids(one, tokens) for _ in range(n)], "max_tokens": 4} | fields)


def _leave(n_bytes: int, **fields: Any) -> Attack:
    body = {"prompt": "x", "max_tokens": 4_000, "ignore_eos": True} | fields
    return lambda one: one.leave_after(body, n_bytes)


def _raw(*pieces: bytes, listen: bool = True) -> Attack:
    return lambda one: one.say(*pieces, listen=listen)


def _get(path: str, method: str = "GET", **headers: str) -> Attack:
    return lambda one: one.request(method, path, headers=headers)


def _idle(begun: bytes, number: int = 20) -> Attack:
    """Connections that say this much and no more."""

    def connect(one: Attacker) -> int:
        for _ in range(number):
            made = one.connect()
            made.sendall(begun)
            one.hold(made)
        return 0

    return connect


def _markdown(text: str) -> Attack:
    return lambda one: one.ask("/page/markdown", {"text": text})


def _nested(depth: int) -> Any:
    found: Any = {"type": "string"}
    for _ in range(depth):
        found = {"type": "object", "properties": {"a": found}, "required": ["a"]}
    return found


ATTACKS: dict[str, Attack] = {
    **{
        name: partial(lambda path, name, one: one.ask(path, _body(name)), path, name)
        for name, (path, _, _) in BODIES.items()
    },
    # files
    "a device": _option("duo_attention", heads="/dev/zero"),
    "a pipe": lambda one: _option("duo_attention", heads=_pipe())(one),
    "filters": _option("qfilters", filters="/etc/passwd"),
    "patterns": _option("minference", patterns="/dev/random"),
    "a path inside": _option("pyramidkv", score="duo_attention/heads=pipe"),
    # grammars
    "an enum of 20,000": _schema({"enum": [f"value {i}" for i in range(20_000)]}),
    "an enum that is admitted": _schema({"enum": [f"value {i}" for i in range(1_000)]}),
    "no value can follow": _schema({"type": "integer", "minimum": 5, "maximum": 1}),
    "not enforced": _schema({"type": "array", "contains": {"type": "string"}, "uniqueItems": True}),
    "a remote schema": _schema({"$ref": "http://127.0.0.1:1/schema.json"}),
    "a schema of itself": _schema({"$ref": "#"}),
    "a schema in itself": _schema({"type": "array", "items": {"$ref": "#"}}),
    "a deep schema": _schema(_nested(31)),
    "too deep a schema": _schema(_nested(200)),
    "a pattern that explodes": _schema({"type": "string", "pattern": "^((a|b|c|d){1,500}){1,500}$"}),
    "a pattern that goes back": _schema({"type": "string", "pattern": "^(a+)+(b+)+(a|a)*$"}),
    "a long string": _schema({"type": "string", "minLength": 100_000, "maxLength": 10**9}),
    "many items": _schema({"type": "array", "items": {"type": "integer"}, "minItems": 10**6}),
    "many properties": _schema({"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(1_900)}}),
    "a schema of its own": _fresh_schema,
    # numbers
    "n": _text(n=128, max_tokens=50, ignore_eos=True),
    "n beyond": _text(n=129),
    "best of": _text(best_of=10**9),
    "log probabilities": _text(n=16, logprobs=20, max_tokens=50, ignore_eos=True),
    "log probabilities of a prompt": lambda one: _long(one, tokens=2_000, echo=True, logprobs=20),
    "stop texts": _text(stop=["x" * 990 + str(i) for i in range(16)], max_tokens=50, ignore_eos=True),
    "stop ids": _text(stop_token_ids=list(range(700)) * 2),
    "a bias of all": _text(logit_bias={str(i): 100 for i in range(700)}),
    "tokens without end": _text(max_tokens=10**9),
    "infinities": lambda one: one.ask(TEXT, '{"prompt": "x", "temperature": Infinity, "top_p": NaN}'),
    "a deadline now": _text(millpond={"deadline_s": 1e-9}),
    "a deadline soon": _text(millpond={"deadline_s": 0.05}, max_tokens=4_000, ignore_eos=True),
    "a deadline that is none": _text(millpond={"deadline_s": -1}),
    "going first": _text(millpond={"priority": -1_000}),
    "going last": _text(millpond={"priority": 1_000}),
    "budgets": lambda one: _text(millpond={"method": "snapkv", "budget": one.draw.randrange(40, 4_000)})(one),
    "codecs": lambda one: _text(millpond={"codec": one.draw.choice(["int4", "int2", "fp8", "int99"])})(one),
    "no budget": _text(millpond={"budget": "0B"}),
    "salts": lambda one: _text(cache_salt=f"{one.draw.random()}" + "x" * 200)(one),
    "too long a salt": _text(cache_salt="x" * 10_000),
    # texts
    "broken bytes": lambda one: one.ask(TEXT, b'{"prompt": "\xff\xfe\x80"}'),
    "half a pair": lambda one: one.ask(TEXT, '{"prompt": "\\ud800", "max_tokens": 2}'),
    "zeros": lambda one: one.ask(TEXT, '{"prompt": "\\u0000\\u0000", "max_tokens": 2}'),
    "marks on marks": _text(prompt="e" + "\u0301" * 20_000),
    "one long word": _text(prompt="a" * 250_000),
    "deep values": lambda one: one.ask(TEXT, '{"metadata": ' + '{"a":' * 5_000 + "1" + "}" * 5_000 + "}"),
    "no JSON": lambda one: one.ask(TEXT, b"\x00" * 100_000),
    "another kind": lambda one: one.ask(TEXT, "prompt=x", "application/x-www-form-urlencoded"),
    "many parts": lambda one: one.ask(
        CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 4_000}], "max_tokens": 2}
    ),
    # the queue
    "a whole context": _long,
    "many whole contexts": lambda one: _long(one, 6),
    "many prompts": lambda one: one.ask(TEXT, {"prompt": ["x"] * 200, "max_tokens": 2}),
    "too many prompts": lambda one: one.ask(TEXT, {"prompt": ["x"] * 5_000, "max_tokens": 2}),
    # other routes
    "a long text to ids": lambda one: one.ask("/tokenize", {"prompt": "anna kettle " * 20_000}),
    "too long a text to ids": lambda one: one.ask("/tokenize", {"prompt": "anna kettle " * 500_000}),
    "many ids to text": lambda one: one.ask("/detokenize", {"tokens": _ids(one, 100_000)}),
    "markdown in markdown": _markdown("> " * 20_000),
    "lists in lists": _markdown("".join(f"{' ' * 2 * i}- x\n" for i in range(200))),
    "marks": _markdown("[" * 2_000),
    "a table": _markdown("|a|b|\n|-|-|\n" + "|x|y|\n" * 7_000),
    "markdown of 15 MB": _markdown("x" * 15_000_000),
    "the memory of nobody": _get("/v1/millpond/memory/cmpl-0?layer=9999&since=2147483648"),
    "a layer beyond": _get("/v1/millpond/memory/cmpl-0?layer=99999999999999999999"),
    "a long path": _get("/" + "x" * 8_000),
    "a path upwards": _get("/page/../../../../etc/passwd"),
    "a path of escapes": _get("/page/%2e%2e%2f%2e%2e%2fetc%2fpasswd%00"),
    "a model's name": _get("/v1/models/" + "%ff" * 2_000),
    "metrics": _get("/metrics"),
    "another method": _get("/v1/completions", "DELETE"),
    "a method of its own": _get("/v1/completions", "X" * 500),
    # the wire
    "another host": _get("/v1/models", Host="evil.example"),
    "an address of its own": _get("/v1/models", **{"X-Forwarded-For": "127.0.0.1", "Forwarded": "for=127.0.0.1"}),
    "a header without end": _raw(HEAD, *[b"X: " + b"x" * 8_000 + b"\r\n"] * 20),
    "no HTTP": _raw(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200)),
    "HTTP/1.0": _raw(b"GET /health HTTP/1.0\r\n\r\n"),
    "HTTP/9.9": _raw(b"GET /health HTTP/9.9\r\n" + HOST + b"\r\n"),
    "a web socket": _raw(b"GET / HTTP/1.1\r\n" + HOST + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n"),
    "chunks without end": _raw(HEAD + b"Transfer-Encoding: chunked\r\n\r\n", *[b"1\r\n \r\n" * 500] * 20),
    "a length that is none": _raw(HEAD + b"Content-Length: -5\r\n\r\n{}"),
    "two lengths": _raw(HEAD + b"Content-Length: 5\r\nContent-Length: 50\r\n\r\n{}"),
    "a length that is huge": _raw(HEAD + b"Content-Length: " + b"9" * 30 + b"\r\n\r\n{}"),
    "a longer body than said": _raw(HEAD + b"Content-Length: 2\r\n\r\n{}" + b"x" * 50_000),
    "a shorter body than said": _raw(HEAD + b"Content-Length: 5000\r\n\r\n{}"),
    "many at once": _raw(*[b"GET /metrics HTTP/1.1\r\n" + HOST + b"\r\n"] * 20, listen=False),
    "connections that say nothing": _idle(b""),
    "half a header": _idle(HEAD),
    "half a body": _idle(HEAD + b"Content-Length: 4000000\r\n\r\n" + b" " * 100_000, 4),
    # going away
    "away at once": _leave(0),
    "away in a stream": _leave(2_000, stream=True),
    "away in many streams": _leave(5_000, stream=True, n=8),
    "away before the answer": _leave(0, n=16),
}

#: Those that take seconds of the engine or of the process that compiles grammars, and many of 16 MB.
LONG = {
    "n",
    "log probabilities",
    "log probabilities of a prompt",
    "many parts",
    "a whole context",
    "many whole contexts",
    "many prompts",
    "an enum that is admitted",
    "many properties",
    "a pattern that explodes",
    "a deep schema",
    "a schema in itself",
    "going last",
    "codecs",
    "unknown keys",
    "messages",
    "brackets",
    "escaped quotes",
    "lists of lists",
    "quotes",
    "a long number",
    "white space",
    "a long text",
    "a long name",
    "a long model",
    "markdown of 15 MB",
    "too long a text to ids",
    "many ids to text",
}
#: Statuses that are answers: to a legal request, to one that cannot be, to one too many.
FINE = {200, 204, 400, 403, 404, 405, 408, 411, 413, 421, 422, 429, 503}
