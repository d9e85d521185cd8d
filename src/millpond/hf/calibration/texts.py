"""Texts that a calibration reads: files of a user, and what every installation has, with samples of the model."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from millpond.errors import DataError

#: Modules of the standard library whose sources and docstrings are read, of many kinds of work.
MODULES = (
    "argparse",
    "bisect",
    "calendar",
    "codecs",
    "configparser",
    "dataclasses",
    "difflib",
    "fractions",
    "gettext",
    "heapq",
    "inspect",
    "locale",
    "mailbox",
    "optparse",
    "pickle",
    "random",
    "shutil",
    "statistics",
    "subprocess",
    "tarfile",
    "textwrap",
    "threading",
    "turtle",
    "zipfile",
)
#: Windows of sources, of docstrings and of Millpond's own words.
SOURCE_WINDOWS, DOCSTRING_WINDOWS, OWN_WINDOWS = 8, 6, 6
#: Texts that are sampled of the model, and the tokens of each.
SAMPLED, SAMPLED_TOKENS = 24, 512
#: Characters at most of which a window is cut: a token has seldom more than eight.
_PER_TOKEN = 8


def windows_of(ids: Tensor, windows: int, length: int) -> list[Tensor]:
    """Return windows of `length` tokens, evenly over the ids (n,); a short text as it is.

    Example:
        >>> [window.tolist() for window in windows_of(torch.arange(10), 2, 3)]
        [[0, 1, 2], [7, 8, 9]]
    """
    if len(ids) <= length:
        return [ids]
    count = min(windows, len(ids) // length)
    starts = [i * (len(ids) - length) // max(count - 1, 1) for i in range(count)]
    return [ids[start : start + length] for start in starts]


def tokens_of(tokenizer: PreTrainedTokenizerBase, text: str) -> Tensor:
    """Return the ids of a text, (n,), without special tokens."""
    inputs: Any = tokenizer(text, add_special_tokens=False, return_tensors="pt", verbose=False)
    ids: Tensor = inputs["input_ids"][0]
    return ids.long()


def read_text(path: Path) -> str:
    """Return the text of a file.

    Raises:
        DataError: it cannot be read, or is empty.
    """
    try:
        words = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"text {str(path)!r} cannot be read: {error}") from error
    if not words.strip():
        raise DataError(f"text {str(path)!r} is empty")
    return words


def default_texts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Tensor]:
    """Return windows of the standard library, of Millpond's words, and of sampled texts.

    Args:
        model: Model that texts are sampled of, at temperature 1.
        tokenizer: Its tokenizer.
        length: Tokens of a window.
        progress: Function that is called with sampled and all tokens of the longest text.
    """
    sources = [source for name in MODULES if (source := _source(name)) is not None]
    found = []
    for text, windows in (
        ("\n".join(sources), SOURCE_WINDOWS),
        ("\n\n".join(part for source in sources for part in _docstrings(source)), DOCSTRING_WINDOWS),
        (_own_words(), OWN_WINDOWS),
    ):
        found += windows_of(tokens_of(tokenizer, _thinned(text, windows, length)), windows, length)
    return found + sampled_texts(model, tokenizer, min(length, SAMPLED_TOKENS), progress)


def sampled_texts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Tensor]:
    """Return `SAMPLED` texts (length,) that the model writes behind its first token.

    They are the same at each call on one machine.
    """
    first = next((token for token in (tokenizer.bos_token_id, tokenizer.eos_token_id) if isinstance(token, int)), 0)
    begun = torch.full((SAMPLED, 1), first, device=model.device)
    runs: Any = model
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        written: Tensor = runs.generate(
            begun,
            attention_mask=torch.ones_like(begun),
            pad_token_id=first,
            min_new_tokens=length - 1,
            max_new_tokens=length - 1,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            repetition_penalty=1.0,
            streamer=_Steps(length - 1, progress),
        )
    return [text.cpu() for text in written]


class _Steps:
    """Streamer of `generate` that counts the steps."""

    def __init__(self, total: int, progress: Callable[[int, int], None]) -> None:
        self._done, self._total, self._progress = -1, total, progress  # the prompt comes first

    def put(self, value: Tensor) -> None:
        self._done += 1
        self._progress(self._done, self._total)

    def end(self) -> None:
        """Do nothing: all steps are counted."""


def _source(name: str) -> str | None:
    spec = importlib.util.find_spec(name)
    path = None if spec is None or spec.origin is None else Path(spec.origin)
    return path.read_text(encoding="utf-8") if path is not None and path.suffix == ".py" and path.exists() else None


def _docstrings(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            words = ast.get_docstring(node)
            if words:
                yield words


def _own_words() -> str:
    """Return Millpond's description and the docstrings of its modules."""
    try:
        about = metadata("millpond").json.get("description", "")
    except PackageNotFoundError:
        about = ""
    folder = Path(__file__).parents[2]
    parts = [words for path in sorted(folder.rglob("*.py")) for words in _docstrings(path.read_text(encoding="utf-8"))]
    return "\n\n".join([str(about), *parts])


def _thinned(text: str, windows: int, length: int) -> str:
    """Return parts of a long text, evenly over it, with about the tokens of all windows."""
    size = length * _PER_TOKEN
    if len(text) <= 2 * windows * size:
        return text
    step = len(text) // windows
    return "\n\n".join(_lines(text[i * step : i * step + size]) for i in range(windows))


def _lines(text: str) -> str:
    """Return a part of a text without its first line, which is cut."""
    return text.partition("\n")[2] or text


def given_texts(tokenizer: PreTrainedTokenizerBase, paths: Sequence[Path], windows: int, length: int) -> list[Tensor]:
    """Return windows of files, `windows` of each at most.

    Raises:
        DataError: a file cannot be read, or is empty.
    """
    texts = [tokens_of(tokenizer, read_text(path)) for path in paths]
    return [window for ids in texts for window in windows_of(ids, windows, length)]
