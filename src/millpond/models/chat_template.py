"""Chat templates around a text: the prefix and suffix of a question, and the end of a turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from millpond.errors import OptionError
from millpond.models.untrusted.render import write_chat
from millpond.models.untrusted.whole_chat import write_whole

#: Placeholder for a text, to find what a template writes around it; no template contains it.
_TEXT = "\u2042text\u2042"


#: What a chat consists of: a role and what it says.
Message = Mapping[str, Any]


class Around(NamedTuple):
    """Text of a template before and after the words of a user, head of the answer included."""

    before: str
    behind: str


def has_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer brings a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))


def around_user(tokenizer: PreTrainedTokenizerBase) -> Around:
    """Return the template's text around the one message of a user.

    Raises:
        OptionError: the template does not write the message as it is, or does not end.
    """
    chat_text = write_chat(tokenizer, [{"role": "user", "content": _TEXT}], add_generation_prompt=True)
    before, text, after = chat_text.partition(_TEXT)
    if not text:
        raise OptionError("this chat template does not show a message as it is; use --no-chat")
    return Around(before, after)


def turn_ends(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the special token that the template writes after an answer, if it writes one.

    A turn ends with it.
    """
    if not has_template(tokenizer):
        return []
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _TEXT}]
    after = write_chat(tokenizer, messages).partition(_TEXT)[2].lstrip()
    first = tokenizer.encode(after, add_special_tokens=False)[:1] if after else []
    return [i for i in first if i in tokenizer.all_special_ids]


def end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int] | None:
    """Return ids that end an answer of a chat, as `eos_token_id` of `generate()`.

    None stands for those that the model names itself.
    """
    named = model.generation_config.eos_token_id if model.generation_config is not None else None
    own_ids = [named] if isinstance(named, int) else list(named or [])
    return [*own_ids, *(i for i in turn_ends(tokenizer) if i not in own_ids)] or None


def chat_ids(
    tokenizer: Any, messages: Sequence[Message], template: str | None = None, how: Mapping[str, Any] | None = None
) -> list[int]:
    """Return the token ids of a conversation up to the head of the answer.

    Args:
        tokenizer: Tokenizer with a chat template.
        messages: Messages of the conversation.
        template: Template to use instead of the tokenizer's.
        how: More arguments for the template.

    Raises:
        OptionError: no tokenizer or no template, no messages, one without a role, or tools or calls that the
            template leaves out.
    """
    if tokenizer is None or (template is None and not has_template(tokenizer)):
        raise OptionError("this model brings no chat template: give chat_template=, or a prompt to generate()")
    if not messages:
        raise OptionError("a conversation without messages has no answer; give one at least")
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise OptionError(f"{repr(message)[:80]} is no message: write {{'role': 'user', 'content': 'text'}}")
    template_option: dict[str, Any] = {} if template is None else {"chat_template": template}
    texts = [{**message, "content": _text_of(message.get("content"))} for message in messages]
    template_option = {"add_generation_prompt": True, **template_option, **(how or {})}
    chat_text = write_whole(tokenizer, texts, **template_option)
    without = [{name: value for name, value in message.items() if name != "tool_calls"} for message in texts]
    for feature, is_present, others in (
        ("tools", bool(template_option.get("tools")), (texts, {**template_option, "tools": None})),
        ("calls of tools", any(entry.get("tool_calls") for entry in texts), (without, template_option)),
    ):
        if is_present and write_whole(tokenizer, others[0], **others[1]) == chat_text:
            raise OptionError(
                f"this model's chat template leaves {feature} out, and the model would not read them: write them "
                "into a message, take another template (chat_template=), or ask the server, which writes them into "
                "messages"
            )
    ids: list[int] = tokenizer.encode(chat_text, add_special_tokens=False)
    return ids


def _text_of(content: Any) -> Any:
    """Return the text of a message, also if it comes in parts.

    Raises:
        OptionError: a part that is no text.
    """
    if content is None:
        return ""
    if isinstance(content, str) or not isinstance(content, Sequence):
        return content
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise OptionError(f"{repr(part)[:80]} is no part of a message: write {{'type': 'text', 'text': 'text'}}")
    return "".join(part["text"] for part in content)
