"""Loading of a model and its tokenizer from a folder, a GGUF file, the hub, or by the name of an installed one.

The module knows nothing of caches: it returns a stock transformers model.
"""

from __future__ import annotations

import difflib
import gc
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import huggingface_hub
import torch
from huggingface_hub import snapshot_download
from transformers import (
    AutoConfig,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

from millpond.codec import DTYPES
from millpond.errors import MillpondError, OptionError, unknown
from millpond.models.downloads import downloadable_models, downloaded_gguf
from millpond.models.dtype_name import dtype_name
from millpond.models.gguf.convert import converted_folder, find_gguf
from millpond.models.gguf.converted import NOTE
from millpond.models.installed import installed_folder, installed_models
from millpond.models.untrusted.config import check_config, check_parameters, check_templates, family_of
from millpond.models.untrusted.folder import check_model_folder
from millpond.optional import require

T = TypeVar("T")

#: Seconds in which the hub must answer; without it only what was downloaded earlier is loaded.
CONNECT_S = 5.0

#: Names of files that hold weights.
_OF_WEIGHTS = re.compile(r"\.(safetensors|bin|pt|pth|h5|msgpack)$")
#: Names of files that image processors are saved in.
_OF_IMAGE_PROCESSORS = ("preprocessor_config.json", "processor_config.json")
#: Names of files that tokenizers are saved in.
_OF_TOKENIZERS = re.compile(r"token|vocab|merges|spiece|tekken|\.(model|bpe|spm)$", re.IGNORECASE)


def resolve(name: str | os.PathLike[str], dtype: str | None = "auto") -> str:
    """Return what transformers loads: an existing folder, or the hub id as it is.

    The folder may be that of an installed or downloaded model. A folder of the working directory comes before a model
    of the same name. A GGUF file, or a folder with one and without a config.json, is converted to a folder in the
    user's cache at its first use.

    Args:
        name: Local folder, GGUF file, name of a model, or hub id.
        dtype: Dtype that a GGUF file is converted to, as for `load_model`; None for one that it was converted to
            before.

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


def model_folder(name: str) -> str | None:
    """Return the folder of an installed or downloaded model, to give it to another program.

    None for other names, such as hub ids, and where the working directory has a file or folder of that name.

    Args:
        name: Name of the model, as `millpond models list` shows it.

    Raises:
        OptionError: the model was not downloaded, or its package is not installed.

    Example:
        >>> model_folder("pond-recall").endswith("pond-recall"), model_folder("Qwen/Qwen3-8B")
        (True, None)
    """
    return resolve(name) if name in known_models() and not Path(name).exists() else None


def load_model(
    name: str | os.PathLike[str], dtype: str | torch.dtype = "auto", *, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Return a causal language model, ready to generate.

    Args:
        name: A local folder, a GGUF file, the name of a bundled or downloaded model, or a hub id.
        dtype: "auto" (as the weights were saved; quantized ones in bf16), "f32", "bf16" or "f16", or one of torch's
            dtypes or its name.
        trust_remote_code: Run the code in the model's folder, where it brings some; else it is refused.

    Raises:
        OptionError: no such dtype, or nothing that can be loaded under that name.
        DataError: a damaged or hostile file.
    """
    dtype = dtype_name(dtype) or "auto"
    torch_dtype: str | torch.dtype = "auto" if dtype == "auto" else DTYPES[dtype]

    def load(path: str) -> PreTrainedModel:
        if not trust_remote_code and _is_strangers(path):
            config = AutoConfig.from_pretrained(path, trust_remote_code=False)
            check_parameters(config, _bytes_of_weights(Path(path)), f"{path}/config.json")
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        loaded: PreTrainedModel = family_of(config).from_pretrained(
            path, dtype=torch_dtype, trust_remote_code=trust_remote_code
        )
        return loaded

    model = _load(name, load, dtype, trust_remote_code, "the model (config.json, generation_config.json, weights)")
    model.train(False)
    return model


def load_tokenizer(name: str | os.PathLike[str], *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model.

    Args:
        name: Name of the model as for `load_model`.
        trust_remote_code: Run the code in the model's folder, where it brings some; else it is refused.

    Raises:
        OptionError: nothing that can be loaded under that name.
        DataError: a damaged or hostile file.
    """

    def load(path: str) -> PreTrainedTokenizerBase:
        # the class that transformers chooses for some types of model replaces the rules of the file by its own
        kind: Any = PreTrainedTokenizerFast if (Path(path) / NOTE).exists() else AutoTokenizer
        tokenizer = kind.from_pretrained(path, trust_remote_code=trust_remote_code)
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            raise OptionError(f"{path}: what is saved there as a tokenizer is a {type(tokenizer).__name__}")
        if not _is_installed(path):
            check_templates(tokenizer, path)
        return tokenizer

    return _load(name, load, None, trust_remote_code, "the tokenizer (tokenizer_config.json, tokenizer.json)")


def find_tokenizer(name: str | os.PathLike[str], *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer of a model, or None for a local folder without files of one.

    For some types of model transformers makes one without a vocabulary there, which turns every text to nothing.

    Raises:
        OptionError, DataError: there is one that cannot be loaded, see `load_tokenizer`.
    """
    folder = Path(resolve(name, None))
    if folder.is_dir() and not any(_OF_TOKENIZERS.search(file.name) for file in folder.iterdir()):
        return None
    return load_tokenizer(name, trust_remote_code=trust_remote_code)


def find_image_processor(name: str | os.PathLike[str]) -> Any:
    """Return the image processor of a model, or None for a local folder without files of one.

    It is the one of Pillow and NumPy; a folder's own code is not run.

    Raises:
        OptionError, DataError: there is one that cannot be loaded, see `load_tokenizer`.
    """
    folder = Path(resolve(name, None))
    if folder.is_dir() and not any((folder / file).is_file() for file in _OF_IMAGE_PROCESSORS):
        return None

    def load(path: str) -> Any:
        require("PIL.Image", "vision", "the image processor of a model")
        from transformers import AutoImageProcessor  # here: it imports Pillow

        loader: Any = AutoImageProcessor
        return loader.from_pretrained(path, backend="pil", trust_remote_code=False)

    return _load(name, load, None, False, "the image processor (preprocessor_config.json)")


def _load(
    name: str | os.PathLike[str], load: Callable[[str], T], dtype: str | None, trust_remote_code: bool, noun: str
) -> T:
    """Load a model or a tokenizer by name, and tell users what failed.

    Args:
        name: Name of the model.
        load: Loads it from a folder or hub id.
        dtype: Dtype that a GGUF file is converted to.
        trust_remote_code: Allow code of the model's folder.
        noun: Name of what is loaded, and of its files, for errors.
    """
    path = resolve(name, dtype)
    is_local = Path(path).exists()
    if not is_local and path.startswith((os.sep, f".{os.sep}", f"..{os.sep}", "~")):
        raise OptionError(f"model {path!r}: there is no such folder or file")
    if not is_local and difflib.get_close_matches(path, known_models(), cutoff=0.85):
        raise unknown("model", path, known_models())  # a typing mistake, not worth asking the hub
    try:
        with _without_bars(), _without_collecting():
            source = path if is_local or _hub_answers() else _downloaded(path)
            if not _is_installed(source):
                _check(source, trust_remote_code)
            return load(source)
    except MillpondError:
        raise
    except Exception as error:  # whatever the classes of transformers raise of what a stranger wrote
        raise OptionError(_why(os.fspath(name), path if is_local else None, noun, error)) from error


def _check(path: str, trust_remote_code: bool) -> None:
    """Refuse a folder or a hub id whose files or configuration are no model's.

    Raises:
        DataError, OptionError: of a folder or a hub id, its files or its configuration are no model's.
    """
    if Path(path).is_dir():
        check_model_folder(Path(path))
    config, _ = PreTrainedConfig.get_config_dict(path)
    check_config(config, f"{path}/config.json", trust_remote_code=trust_remote_code)


def _is_strangers(path: str) -> bool:
    """Whether it is a folder that did not come with a package of ours."""
    return Path(path).is_dir() and not _is_installed(path)


def _is_installed(path: str) -> bool:
    """Whether it is the folder of a model that came with a package of ours."""
    return Path(path).name in installed_models() and installed_folder(Path(path).name) == Path(path)


def _bytes_of_weights(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir() if _OF_WEIGHTS.search(file.name))


def known_models() -> list[str]:
    """Return names of models that are installed, downloaded or can be, sorted."""
    return sorted({*installed_models(), *downloadable_models()})


def _hub_answers() -> bool:
    """Whether the hub can be reached, by one request; each file of a model would take six."""
    try:
        huggingface_hub.get_session().head(huggingface_hub.constants.ENDPOINT, timeout=CONNECT_S)
    except Exception:  # of the HTTP client that this version of the hub's library is built on
        return False
    return True


def _downloaded(name: str) -> str:
    """Return the folder of an earlier download.

    Raises:
        OSError: there is none.
    """
    try:
        return snapshot_download(name, local_files_only=True)
    except FileNotFoundError:
        raise OSError("the hub does not answer, and there is no earlier download") from None


def _why(name: str, folder: str | None, noun: str, error: Exception) -> str:
    """Return why nothing was loaded under a name, or from a folder."""
    if "trust_remote_code" in str(error):
        return (
            f"model {name!r} brings code of its own, which is not run; if you have read it and trust it, "
            "trust_remote_code=True (--trust-remote-code) runs it"
        )
    if folder is not None and not isinstance(error, OSError) and Path(folder, "config.json").is_file():
        reason = " ".join((str(error).strip() or "no reason given").splitlines()[:2])[:500]
        return f"{folder}: {noun} cannot be loaded ({type(error).__name__}: {reason}); the files are damaged"
    close = difflib.get_close_matches(name, known_models(), n=1)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    reason = str(error).strip().split("\n")[0]
    return (
        f"model {name!r} is neither a folder with a model, nor a GGUF file, nor bundled "
        f"({', '.join(installed_models()) or 'none'}), nor could it be loaded from the hub{hint} ({reason})"
    )


@contextmanager
def _without_bars() -> Iterator[None]:
    """Hide progress bars of a load that takes a moment; the user's own setting comes back."""
    tools: Any = logging
    bars_enabled = tools.is_progress_bar_enabled()
    tools.disable_progress_bar()
    try:
        yield
    finally:
        if bars_enabled:
            tools.enable_progress_bar()


@contextmanager
def _without_collecting() -> Iterator[None]:
    """Stop the search for cycles while a vocabulary is read: a million objects, no cycle."""
    collected = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collected:
            gc.enable()
