"""Chat templates around a text: the prefix and suffix of a question, and the end of a turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from millpond.errors import ImageError, OptionError
from millpond.images.picture import Picture
from millpond.images.reader import ImageReader
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


def shows_parts(tokenizer: Any, image_token: str, **how: Any) -> bool:
    """Whether a chat template takes messages as lists of parts.

    It then writes a token for each image among them.

    Args:
        tokenizer: Tokenizer with a chat template.
        image_token: The token.
        **how: Arguments of the template.
    """
    parts = [{"type": "image"}, {"type": "text", "text": _TEXT}]
    try:
        text = write_chat(tokenizer, [{"role": "user", "content": parts}], **how)
    except Exception:  # the template is a program of the model's, and takes texts alone
        return False
    return text.count(image_token) == 1 and text.count(_TEXT) == 1 and "'type'" not in text and '"type"' not in text


def content_of(pieces: Sequence[str | None], image_token: str, in_parts: bool) -> str | list[dict[str, str]]:
    """Return the content of a message as a template takes it, see `shows_parts`.

    Args:
        pieces: Texts, and None for an image.
        image_token: Token that stands for an image in a text.
        in_parts: Whether the template takes a list of parts.

    Example:
        >>> content_of([None, "What is it?"], "<image>", False)
        '<image>\\nWhat is it?'
    """
    if not in_parts:
        return "".join(f"{image_token}\n" if piece is None else piece for piece in pieces)
    return [{"type": "image"} if piece is None else {"type": "text", "text": piece} for piece in pieces]


def chat_prompt(
    tokenizer: Any,
    messages: Sequence[Message],
    template: str | None = None,
    how: Mapping[str, Any] | None = None,
    images: ImageReader | None = None,
) -> tuple[list[int], tuple[Picture, ...]]:
    """Return the token ids of a conversation up to the head of the answer, and its pictures.

    Args:
        tokenizer: Tokenizer with a chat template.
        messages: Messages of the conversation.
        template: Template to use instead of the tokenizer's.
        how: More arguments for the template.
        images: Reads images; None: the model takes text alone.

    Raises:
        ImageError: images for a model of text, or one that is refused, see `ImageReader.read`.
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
    pieces = [_pieces_of(message.get("content")) for message in messages]
    urls = [piece.url for message_pieces in pieces for piece in message_pieces if isinstance(piece, _Image)]
    if images is None and urls:
        raise ImageError(
            f"{len(urls)} images: this model takes text alone, or was loaded without its image processor; leave them "
            "out, or give image_processor="
        )
    if images is not None:
        images.limits.check_count(len(urls))
    in_parts = images is not None and shows_parts(tokenizer, images.token, **template_option)
    token = "" if images is None else images.token
    texts = [
        {**message, "content": _shaped(own, token, in_parts)} for message, own in zip(messages, pieces, strict=True)
    ]
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
    chat_text = chat_text if images is None else images.expand(chat_text, len(urls))
    ids: list[int] = tokenizer.encode(chat_text, add_special_tokens=False)
    return ids, () if images is None else images.read_all(urls)


class _Image(NamedTuple):
    url: str


def _shaped(pieces: Sequence[Any], image_token: str, in_parts: bool) -> Any:
    """Return the content of a message as the template takes it.

    One that is neither text nor parts goes there as it is.
    """
    if not all(isinstance(piece, str | _Image) for piece in pieces):
        return pieces[0]
    return content_of([piece if isinstance(piece, str) else None for piece in pieces], image_token, in_parts)


def _pieces_of(content: Any) -> list[Any]:
    """Return the texts and images of a message.

    Raises:
        OptionError: a part that is neither.
    """
    if content is None:
        return [""]
    if isinstance(content, str) or not isinstance(content, Sequence):
        return [content]
    return [_piece_of(part) for part in content]


def _piece_of(part: Any) -> str | _Image:
    kind = part.get("type") if isinstance(part, Mapping) else None
    inside = part.get(kind) if kind in ("text", "image_url") else None
    if kind == "text" and isinstance(inside, str):
        return inside
    url = inside.get("url") if isinstance(inside, Mapping) and set(inside) == {"url"} else None
    if kind == "image_url" and isinstance(url, str):
        return _Image(url)
    raise OptionError(
        f"{repr(part)[:80]} is no part of a message: write {{'type': 'text', 'text': 'text'}}, or {{'type': "
        "'image_url', 'image_url': {'url': 'data:image/png;base64,...'}}"
    )
