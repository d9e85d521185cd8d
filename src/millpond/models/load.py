"""Loading of a model and its tokenizer: from a folder, a GGUF file, the hub, or by the name of one that is at hand.

This module knows nothing of caches: what it returns is a stock transformers model.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import huggingface_hub
import torch
from huggingface_hub import snapshot_download
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from millpond.codec import DTYPES
from millpond.errors import OptionError, unknown
from millpond.models.downloads import downloadable_models, downloaded_gguf
from millpond.models.gguf.convert import converted_folder, find_gguf
from millpond.models.installed import installed_folder, installed_models

T = TypeVar("T")

#: Seconds in which the hub must answer; without it only what was downloaded earlier is loaded.
CONNECT_S = 5.0

#: Names of files that tokenizers are saved in.
_OF_TOKENIZERS = re.compile(r"token|vocab|merges|spiece|tekken|\.(model|bpe|spm)$", re.IGNORECASE)


def resolve(name: str | os.PathLike[str], dtype: str | None = "auto") -> str:
    """What transformers should load: a folder that exists, that of a model at hand, or the hub id as it is.

    A folder of the working directory comes before a model of the same name. A GGUF file, or a folder with one and
    without a config.json, is converted to a folder in the user's cache at its first use.

    Args:
        dtype: that a GGUF file is converted to, as for `load_model`; None: one that it was converted to before.

    Raises:
        OptionError: the name of a model whose package is not installed, or that was not downloaded; a GGUF file that
            cannot be converted.
        DataError: a damaged GGUF file.

    Example:
        >>> resolve("pond-recall").endswith("pond-recall")
        True
    """
    text = os.fspath(name)
    path = Path(text)
    if path.suffix.lower() == ".gguf" and not path.is_file():
        raise OptionError(f"{text}: there is no such GGUF file")
    gguf = find_gguf(path) if path.exists() else None
    if gguf is None and path.is_dir():
        return text
    folder = None if gguf else installed_folder(text)
    gguf = gguf or (None if folder else downloaded_gguf(text))
    return str(converted_folder(gguf, dtype) if gguf else folder or text)


def load_model(name: str | os.PathLike[str], dtype: str = "auto") -> PreTrainedModel:
    """A causal language model, ready to generate.

    Args:
        name: a local folder, a GGUF file, the name of a bundled or downloaded model, or a hub id.
        dtype: "auto" (as the weights were saved; quantized ones in bf16), "f32", "bf16" or "f16".

    Raises:
        OptionError: no such dtype, or nothing that can be loaded under that name.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise unknown("dtype", dtype, ["auto", *DTYPES])
    chosen: str | torch.dtype = "auto" if dtype == "auto" else DTYPES[dtype]
    model: PreTrainedModel = _load(name, lambda path: AutoModelForCausalLM.from_pretrained(path, dtype=chosen), dtype)
    model.train(False)
    return model


def load_tokenizer(name: str | os.PathLike[str]) -> PreTrainedTokenizerBase:
    """The tokenizer that belongs to a model of that name.

    Raises:
        OptionError: nothing that can be loaded under that name.
    """
    tokenizer: PreTrainedTokenizerBase = _load(name, AutoTokenizer.from_pretrained, None)
    return tokenizer


def find_tokenizer(name: str | os.PathLike[str]) -> PreTrainedTokenizerBase | None:
    """The tokenizer that belongs to a model of that name; None for a local folder that holds no file of one.

    For some types of model transformers makes one without a vocabulary there, which turns every text to nothing.

    Raises:
        OptionError: there is one that cannot be loaded.
    """
    folder = Path(resolve(name, None))
    if folder.is_dir() and not any(_OF_TOKENIZERS.search(file.name) for file in folder.iterdir()):
        return None
    return load_tokenizer(name)


def _load(name: str | os.PathLike[str], load: Callable[[str], T], dtype: str | None) -> T:
    path = resolve(name, dtype)
    is_local = Path(path).exists()
    if not is_local and difflib.get_close_matches(path, known_models(), cutoff=0.85):
        raise unknown("model", path, known_models())  # a typing mistake, not worth asking the hub
    try:
        with _without_bars():
            return load(path if is_local or _hub_answers() else _downloaded(path))
    except (OSError, ValueError) as error:
        raise OptionError(_not_found(os.fspath(name), error)) from error


def known_models() -> list[str]:
    """Names of models that are at hand or can be downloaded, sorted."""
    return sorted({*installed_models(), *downloadable_models()})


def _hub_answers() -> bool:
    """Whether the hub can be reached: one request, where each file of a model would take six."""
    try:
        huggingface_hub.get_session().head(huggingface_hub.constants.ENDPOINT, timeout=CONNECT_S)
    except Exception:  # of the HTTP client that this version of the hub's library is built on
        return False
    return True


def _downloaded(name: str) -> str:
    """The folder of an earlier download.

    Raises:
        OSError: there is none.
    """
    try:
        return snapshot_download(name, local_files_only=True)
    except FileNotFoundError:
        raise OSError("the hub does not answer, and there is no earlier download") from None


def _not_found(name: str, error: Exception) -> str:
    close = difflib.get_close_matches(name, known_models(), n=1)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    reason = str(error).strip().split("\n")[0]
    return (
        f"model {name!r} is neither a folder with a model, nor a GGUF file, nor bundled "
        f"({', '.join(installed_models()) or 'none'}), nor could it be loaded from the hub{hint} ({reason})"
    )


@contextmanager
def _without_bars() -> Iterator[None]:
    """No progress bar for a load that takes a moment; the user's own setting comes back."""
    tools: Any = logging
    shown = tools.is_progress_bar_enabled()
    tools.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            tools.enable_progress_bar()
