"""Process of `millpond.models.untrusted.template`: a chat template from stdin renders chats, under limits.

It runs as a script without the package, so that it starts in a moment.
"""

from __future__ import annotations

import json
import sys
from datetime import datetime
from typing import Any

#: Seconds of processor time, bytes of memory, and characters of one chat, at most.
_SECONDS, _MEMORY, _LENGTH = 2, 768 << 20, 4 << 20
_USER, _SYSTEM = {"role": "user", "content": "Hi"}, {"role": "system", "content": "Be brief."}
_ANSWER = {"role": "assistant", "content": "Yes."}
_CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "aaaaaaaa1", "type": "function", "function": {"name": "look", "arguments": {"at": "it"}}}],
}
_RESULT = {"role": "tool", "name": "look", "tool_call_id": "aaaaaaaa1", "content": "a pond"}
_TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string", "description": "What."}}},
    },
}
_CHATS: tuple[tuple[list[dict[str, Any]], list[dict[str, Any]] | None], ...] = (
    ([_USER], None),
    ([_SYSTEM, _USER], None),
    ([_USER, _ANSWER], None),
    ([_SYSTEM, *[_USER, _ANSWER] * 8, _USER], None),
    ([_USER, _CALL, _RESULT, _ANSWER, _USER], [_TOOL]),
)


def _limit() -> None:
    import resource  # which Windows has not

    resource.setrlimit(resource.RLIMIT_CPU, (_SECONDS, _SECONDS + 1))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def _environment() -> Any:
    """Return the sandbox that transformers gives to templates."""
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        tags = {"generation"}  # noqa: RUF012 - jinja's own type

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    def tojson(value: Any, **how: Any) -> str:
        return json.dumps(value, **how)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": refuse, "strftime_now": lambda how: datetime.now().strftime(how)}
    return environment


def _fault(source: str) -> str | None:
    """Return the fault of a template, or None if no chat would suffer from it."""
    import jinja2

    environment = _environment()
    try:
        template = environment.from_string(source)
    except (jinja2.TemplateError, SyntaxError) as error:
        return f"is none ({type(error).__name__}: {str(error)[:200]})"
    except RecursionError:
        return "is nested too deeply"
    for messages, tools in _CHATS:
        length = 0
        try:
            for part in template.generate(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=True,
                bos_token="<s>",
                eos_token="</s>",
                unk_token="<unk>",
                pad_token="<pad>",
            ):
                length += len(part)
                if length > _LENGTH:
                    return f"writes more than {_LENGTH:,} characters for a short chat"
        except MemoryError:
            return f"takes more than {_MEMORY:,} bytes of memory for a short chat"
        except Exception:  # it refuses this chat, as it may
            continue
    return None


if __name__ == "__main__":
    given = sys.stdin.buffer.read().decode("utf-8")
    _limit()
    if (fault := _fault(given)) is not None:
        sys.stdout.write(fault)
        sys.stdout.flush()
        sys.exit(1)
