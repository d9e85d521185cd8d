"""Checks of a model's configuration and of its chat template, before anything is made of them."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from millpond.errors import DataError, OptionError

#: What is made one by one, with the most of it: the largest models have some 130 layers and 512 experts.
_COUNTED = (
    (re.compile(r"layer|block|depth|stage"), 1_024),
    (re.compile(r"expert|label|group|head|branch|loop|repeat|codebook|adapter|stream|track"), 1 << 16),
)
#: Names of numbers of layers, of which there are none fewer than none.
_LAYERS = re.compile(r"^(n|num)_.*layers?$")
#: Names of factors and the like: nothing is made of that length.
_FREE = re.compile(r"theta|base|seed|pixels")
#: The most of any other number, such as a width or a vocabulary.
_MOST = 2**31 - 1
#: Parameters for which there must be a byte of weights: 8 of one bit each, and tied ones counted twice.
_PER_BYTE = 16
#: Parameters that no file needs to hold, such as those of a task's head; and numbers in buffers, such as masks.
_UNSAVED, _MAX_BUFFERS = 1 << 26, 1 << 28


def check_config(config: Any, where: str, *, trust_remote_code: bool = False) -> None:
    """Refuse a configuration of a model beyond any machine, or with code of strangers.

    Args:
        config: Configuration as JSON.
        where: Its file, for errors.
        trust_remote_code: Allow such code.

    Raises:
        DataError: a number beyond what any model has.
        OptionError: it names a kernel of the hub.
    """
    if not isinstance(config, Mapping):
        raise DataError(f"{where} is a {type(config).__name__}, and must be a table")
    for name, value in _leaves(config):
        if not trust_remote_code and name.endswith("_implementation") and isinstance(value, str) and "/" in value:
            raise OptionError(
                f"{where}: {name}={value[:80]!r} is code of the hub, which is not run; trust_remote_code=True "
                "(--trust-remote-code) runs it"
            )
        if isinstance(value, bool) or not isinstance(value, int) or _FREE.search(name):
            continue
        maximum = next((limit for pattern, limit in _COUNTED if pattern.search(name)), _MOST)
        if re.search("size|dim|channel|width|vocab", name):
            maximum = _MOST  # of one layer, head or expert
        minimum = 0 if _LAYERS.search(name) else -maximum
        if not minimum <= value <= maximum:
            raise DataError(f"{where}: {name}={value}: no model has that; it must be {minimum:,} to {maximum:,}")


def check_parameters(config: PreTrainedConfig, n_bytes: int, where: str) -> None:
    """Refuse a configuration of far more parameters than the files of weights can hold.

    Args:
        config: Configuration of a class of transformers.
        n_bytes: Bytes of all files of weights.
        where: File of the configuration, for errors.

    Raises:
        DataError: more parameters, or larger buffers. Also errors of transformers, of a configuration without a class.
    """
    families = family_of(config)
    with torch.device("meta"):
        model = families.from_config(config, trust_remote_code=False)
    described = sum(parameter.numel() for parameter in model.parameters())
    if described > n_bytes * _PER_BYTE + _UNSAVED:
        raise DataError(
            f"{where} describes {described:,} parameters, and its files of weights have {n_bytes:,} bytes; "
            "they are not of one model"
        )
    buffered = sum(buffer.numel() for buffer in model.buffers())
    if buffered > n_bytes + _MAX_BUFFERS:
        raise DataError(f"{where} describes buffers of {buffered:,} numbers; no model needs more than its weights have")


def family_of(config: PreTrainedConfig) -> Any:
    """Return the class of transformers that makes a model of a configuration.

    It is for models of text, or of images and text.
    """
    with_images = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    text_only = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForImageTextToText if with_images and not text_only else AutoModelForCausalLM


def _leaves(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield every value that is no table with its name; those of a list have the list's."""
    waiting: list[tuple[str, Any]] = [(str(name).lower(), value) for name, value in config.items()]
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, Mapping):
            waiting += [(str(inner).lower(), part) for inner, part in value.items()]
        elif isinstance(value, list):
            waiting += [(name, part) for part in value]
        else:
            yield name, value


#: Seconds of the clock after which the process is ended, should it wait for something.
_MAX_WAIT = 60.0
_SCRIPT = Path(__file__).with_name("template_child.py")


def check_templates(tokenizer: Any, folder: str) -> None:
    """Refuse a tokenizer with a chat template that does not end, or fills the memory.

    Args:
        tokenizer: Tokenizer to check.
        folder: Folder that it came from, for errors.

    Raises:
        DataError: a template does, or is not a template.
    """
    templates = getattr(tokenizer, "chat_template", None) or {}
    for name, template in templates.items() if isinstance(templates, dict) else [("default", templates)]:
        where = _file_of(Path(folder), str(name))
        if not isinstance(template, str):
            raise DataError(f"{where}: the chat template is a {type(template).__name__}, and must be a text")
        if (wrong := _wrong_with(template)) is not None:
            raise DataError(f"{where}: the chat template {wrong}; leave it out, or take one that ends")


def _file_of(folder: Path, name: str) -> Path:
    """Return the file of a folder that holds the template of that name."""
    paths = [folder / "additional_chat_templates" / f"{name}.jinja", folder / "chat_template.jinja"]
    return next((file for file in paths if file.is_file()), folder / "tokenizer_config.json")


@lru_cache(maxsize=64)
def _wrong_with(template: str) -> str | None:
    """Return why a template is refused; None if it renders chats, or says which it refuses."""
    command = [sys.executable, "-I", str(_SCRIPT)]
    try:
        tried = subprocess.run(
            command, input=template.encode("utf-8", "replace"), capture_output=True, timeout=_MAX_WAIT, check=False
        )
    except subprocess.TimeoutExpired:
        return f"wrote no chat in {_MAX_WAIT:g} s"
    if tried.returncode == 0:
        return None
    stdout_text = tried.stdout.decode("utf-8", "replace").strip()
    return stdout_text or "takes more time or memory than any chat needs"
