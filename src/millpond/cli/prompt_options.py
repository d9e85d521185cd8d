"""Options of a prompt: a text or a file, and the chat template around it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from millpond.cli.option_groups import OptionGroup
from millpond.cli.options import optional
from millpond.errors import OptionError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class PromptSource(OptionGroup):
    """A prompt on the command line, in a file, or on standard input."""

    prompt: Annotated[str | None, optional(help="The prompt.")] = None
    prompt_file: Annotated[str | None, optional(help="Read the prompt from this file; - is standard input.")] = None

    def read(self) -> str:
        """The prompt from one of its two sources.

        Raises:
            OptionError: neither or both are given, the file cannot be read, or the prompt is empty.
        """
        if (self.prompt is None) == (self.prompt_file is None):
            raise OptionError("give the prompt either as --prompt TEXT or as --prompt-file FILE (- for standard input)")
        text = self.prompt if self.prompt_file is None else _text_of(self.prompt_file)
        if text is None or not text.strip():
            raise OptionError("the prompt is empty")
        return text


def _text_of(file: str) -> str:
    if file == "-":
        return sys.stdin.read()
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"prompt file {file!r} cannot be read: {error}") from error


def wants_template(tokenizer: PreTrainedTokenizerBase, chat: bool | None) -> bool:
    """Whether to apply the chat template: as `chat` says; None: if there is one.

    Raises:
        OptionError: `chat` is True and there is no template.
    """
    from millpond.models.chat_template import has_template

    found = has_template(tokenizer)
    if chat and not found:
        raise OptionError("--chat: this tokenizer has no chat template; leave --chat out")
    return found and chat is not False


def encode(tokenizer: PreTrainedTokenizerBase, text: str, chat: bool | None) -> Tensor:
    """(1, n) token ids, through the chat template if wanted, or if there is one.

    Raises:
        OptionError: a chat template is wanted and there is none.
    """
    from millpond.models.untrusted.render import write_chat

    if wants_template(tokenizer, chat):
        messages = [{"role": "user", "content": text}]
        said = write_chat(tokenizer, messages, add_generation_prompt=True)
        inputs = tokenizer(said, add_special_tokens=False, return_tensors="pt")
    else:
        inputs = tokenizer(text, return_tensors="pt")
    ids: Tensor = inputs["input_ids"]
    return ids
