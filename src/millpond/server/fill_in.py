"""Prompts for the text between two others (fill in the middle), with the tokens that a tokenizer has for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from millpond.server.errors import ApiError

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Marks:
    """Names of the tokens of a family.

    Attributes:
        before: Token in front of the text before.
        behind: Token in front of the text after.
        missing: Token that the missing text follows; None: the text before comes last.
        ends: Tokens that end an answer.
        project: Token in front of the name of a project.
        file: Token in front of the name of another text.
    """

    before: str
    behind: str
    missing: str | None
    ends: tuple[str, ...] = ()
    project: str | None = None
    file: str | None = None


#: Qwen2.5-Coder and CodeGemma; StarCoder and Granite; SantaCoder; Code Llama; DeepSeek-Coder; Codestral.
_FAMILIES = (
    _Marks(
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        ("<|fim_pad|>", "<|endoftext|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>"),
        "<|repo_name|>",
        "<|file_sep|>",
    ),
    _Marks(
        "<fim_prefix>",
        "<fim_suffix>",
        "<fim_middle>",
        ("<fim_pad>", "<|endoftext|>", "<repo_name>", "<reponame>", "<file_sep>"),
        "<repo_name>",
        "<file_sep>",
    ),
    _Marks("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ("<fim-pad>", "<|endoftext|>")),
    _Marks("▁<PRE>", "▁<SUF>", "▁<MID>", ("▁<EOT>",)),
    _Marks("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", ("<|EOT|>",)),
    _Marks("[PREFIX]", "[SUFFIX]", None),
)
#: The name of a project that other files come from: models expect one. Then what stands between other texts where a
#: model has no names of files.
PROJECT, BETWEEN = "project", "\n\n"


@dataclass(frozen=True, slots=True)
class FillIn:
    """The tokens of one tokenizer.

    Attributes:
        first: Tokens that it begins every text with.
        before: See `_Marks`.
        behind: See `_Marks`.
        missing: See `_Marks`; None: there is no such token.
        stops: Texts that end an answer.
        stop_ids: Special tokens that end an answer.
        project: See `_Marks`; None: there is no such token.
        file: See `_Marks`; None: there is no such token.
    """

    first: Ids
    before: int
    behind: int
    missing: int | None
    project: int | None
    file: int | None
    stops: tuple[str, ...]
    stop_ids: Ids

    def prompt(self, before: Sequence[int], behind: Sequence[int], begun: Sequence[int] = ()) -> Ids:
        """Return a prompt that asks for the text between two others.

        Args:
            before: Ids of the text before.
            behind: Ids of the text after.
            begun: Known ids of the missing text.
        """
        if self.missing is None:
            return (*self.first, self.behind, *behind, self.before, *before, *begun)
        return (*self.first, self.before, *before, self.behind, *behind, self.missing, *begun)

    @property
    def names_files(self) -> bool:
        """Whether other files can stand in front under their names."""
        return self.project is not None and self.file is not None

    def among_files(self, prompt: Ids, project: Sequence[int], files: Iterable[Sequence[int]]) -> Ids:
        """Return a prompt after other files of its project.

        Args:
            prompt: The prompt.
            project: Ids of the project's name.
            files: Ids of each file: a name, a line break and a text; the last is the name of the prompt's own.
        """
        assert self.project is not None, "see `names_files`"
        assert self.file is not None, "see `names_files`"
        front = [self.project, *project]
        for file in files:
            front += [self.file, *file]
        return (*self.first, *front, *prompt[len(self.first) :])


def fill_in_of(tokenizer: Any) -> FillIn | None:
    """Return the tokens that a tokenizer has; None: it has none, or there is no tokenizer."""
    for marks in _FAMILIES if tokenizer is not None else ():
        before, behind = _id_of(tokenizer, marks.before), _id_of(tokenizer, marks.behind)
        missing = None if marks.missing is None else _id_of(tokenizer, marks.missing)
        if before is None or behind is None or (missing is None) != (marks.missing is None):
            continue
        special = {token for token, about in tokenizer.added_tokens_decoder.items() if about.special}
        ends = {name: token for name in marks.ends if (token := _id_of(tokenizer, name)) is not None}
        encoded = tokenizer.encode("a")
        first = encoded[:1] if encoded[:1] == [tokenizer.bos_token_id] else []
        return FillIn(
            tuple(first),
            before,
            behind,
            missing,
            _id_of(tokenizer, marks.project),
            _id_of(tokenizer, marks.file),
            tuple(name for name, token in ends.items() if token not in special),
            tuple(token for token in ends.values() if token in special),
        )
    return None


def needed(fill: FillIn | None, param: str) -> FillIn:
    """Return the tokens of a model, checked.

    Args:
        fill: The tokens; None: the model has none.
        param: Field that asks for them.

    Raises:
        ApiError: the model has no tokens for it.
    """
    if fill is None:
        message = (
            f"{param} needs a model with tokens for text in the middle, as Qwen2.5-Coder, StarCoder, Code Llama, "
            "DeepSeek-Coder and Codestral have them, and this one has none: leave it out, or ask in a chat"
        )
        raise ApiError(400, message, "unsupported_parameter", param)
    return fill


def _id_of(tokenizer: Any, name: str | None) -> int | None:
    token = None if name is None else tokenizer.convert_tokens_to_ids(name)
    return token if isinstance(token, int) and tokenizer.convert_ids_to_tokens(token) == name else None
