"""Transforms that were read last, by the content of their files: unpacking one takes up to seconds."""

from __future__ import annotations

import hashlib
import os
import stat
import threading
from collections import OrderedDict

import torch

from millpond.codec.transform.transform_file import MOST_UNPACKED, ModelTransform, load_transform

#: Transforms that are held.
_HELD = 2
_lock = threading.Lock()
_transforms: OrderedDict[tuple[str, bytes], ModelTransform] = OrderedDict()


def cached_transform(path: str | os.PathLike[str]) -> ModelTransform:
    """Return the transform of a file; one with the same name and content is read once.

    The last two are held. Nobody changes a transform.

    Raises:
        DataError: no such file, of another format, damaged, or its parts do not fit together.
    """
    name = os.fspath(path)
    content = _content(name)
    if content is None:
        return load_transform(name)
    key = (name, content)
    with _lock:
        found = _transforms.pop(key, None)
    with torch.inference_mode(False):  # what is held serves other modes too
        transform = load_transform(name) if found is None else found
    with _lock:
        _transforms[key] = transform
        while len(_transforms) > _HELD:
            _transforms.popitem(last=False)
    return transform


def _content(name: str) -> bytes | None:
    """Return the digest of a file; None for what is too large to be held, or is no file."""
    try:
        about = os.stat(name)
        if not stat.S_ISREG(about.st_mode) or about.st_size > MOST_UNPACKED:
            return None
        with open(name, "rb") as file:
            return hashlib.file_digest(file, "blake2b").digest()
    except OSError:
        return None
