"""No message of a chat vanishes: each is in what the template writes, or the chat is refused."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

import millpond as mp
from millpond.errors import OptionError
from millpond.models.chat_template import chat_prompt
from millpond.models.untrusted.whole_chat import write_whole

_TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
#: Templates in the shapes that models bring: which roles they write, and where.
TEMPLATES = {
    "every role": "{% for m in messages %}" + _TURN + "{% endfor %}",
    "known roles only": (
        "{% for m in messages %}{% if m.role == 'user' or m.role == 'assistant' or m.role == 'system' "
        "or m.role == 'tool' %}" + _TURN + "{% endif %}{% endfor %}"
    ),
    "system first": (
        "{% if messages[0].role == 'system' %}<s>{{ messages[0].content }}</s>{% endif %}"
        "{% for m in messages %}{% if m.role == 'user' or m.role == 'assistant' %}" + _TURN + "{% endif %}{% endfor %}"
    ),
    "no system": (
        "{% for m in messages %}{% if m.role == 'user' or m.role == 'assistant' %}" + _TURN + "{% endif %}{% endfor %}"
    ),
    "a system is an error": (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        + _TURN
        + "{% endfor %}"
    ),
    "trimmed": "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}\n{% endfor %}",
}
ROLES = ("system", "developer", "user", "assistant", "tool")
ORDERS = [order for n in (1, 2, 3) for order in itertools.product(ROLES, repeat=n)]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return mp.load_tokenizer("pond-recall")


def written_or_refused(tokenizer: Any, messages: list[dict[str, str]], template: str) -> tuple[str, str]:
    """What a template writes, or why it does not."""
    try:
        return write_whole(tokenizer, messages, chat_template=template), ""
    except Exception as error:  # a template raises what it likes
        return "", str(error)


@pytest.mark.parametrize("name", TEMPLATES)
def test_each_message_is_written_or_the_chat_is_refused(tokenizer: Any, name: str) -> None:
    written = refused = 0
    for order in ORDERS:
        messages = [{"role": role, "content": f"text number {n} of it"} for n, role in enumerate(order)]
        shown, why = written_or_refused(tokenizer, messages, TEMPLATES[name])
        if why:
            assert "leaves it out" in why or "no system role" in why
            refused += 1
            continue
        written += 1
        for message in messages:
            assert message["content"] in shown, (order, shown)
    assert written
    assert bool(refused) == (name not in ("every role", "known roles only", "trimmed"))


def test_a_developer_is_read_as_system_where_that_is_known(tokenizer: Any) -> None:
    messages = [{"role": "developer", "content": "Never say X."}, {"role": "user", "content": "hi"}]
    for name in ("known roles only", "system first"):
        shown = write_whole(tokenizer, messages, chat_template=TEMPLATES[name])
        assert "Never say X." in shown
        assert "developer" not in shown
    assert "developer" in write_whole(tokenizer, messages, chat_template=TEMPLATES["every role"])


def test_the_message_that_would_vanish_is_named(tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "tool", "content": "21 degrees"}]
    with pytest.raises(OptionError, match=r"message 2 has the role 'tool'.*leaves it out"):
        chat_prompt(tokenizer, messages, TEMPLATES["no system"])


def test_an_empty_message_need_not_be_written(tokenizer: Any) -> None:
    messages = [{"role": "system", "content": " "}, {"role": "user", "content": "hi"}]
    assert "hi" in write_whole(tokenizer, messages, chat_template=TEMPLATES["no system"])
