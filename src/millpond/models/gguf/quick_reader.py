"""Quick reading of GGUF files by the package gguf, without their vocabularies, on which it spends most of its time."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from millpond.optional import require

_STRING, _ARRAY = 8, 9
#: Length from which on lists are stepped over: no list of a configuration has it.
_MANY = 1000


@contextmanager
def quick_reading() -> Iterator[None]:
    """Make readers of the package gguf share the first value of a long list for all.

    transformers makes two readers of a file for its configuration and tensors, and of a vocabulary needs the length; it
    also asks for the same table of names for each module of a model.
    """
    gguf: Any = require("gguf", "gguf", "a GGUF file")
    reader, names = gguf.GGUFReader, gguf.get_tensor_name_map
    gguf.GGUFReader, gguf.get_tensor_name_map = _quick(reader), lru_cache(maxsize=2)(names)
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map = reader, names


def _quick(reader: Any) -> Any:
    class QuickReader(reader):  # type: ignore[misc]
        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if int(raw_type) == _ARRAY:
                kind, count = struct.unpack_from("<IQ", self.data, orig_offs)
                if count >= _MANY:
                    return self._stepped_over(orig_offs, kind, count)
            return super()._get_field_parts(orig_offs, raw_type)

        def _stepped_over(self, orig_offs: int, kind: int, count: int) -> Any:
            begin = orig_offs + struct.calcsize("<IQ")
            n_bytes, parts, places, types = super()._get_field_parts(begin, kind)
            end = begin + count * n_bytes
            if kind == _STRING:
                end = begin
                for _ in range(count):
                    end += 8 + struct.unpack_from("<Q", self.data, end)[0]
            return end - orig_offs, parts, places * count, [type(types[0])(_ARRAY), *types]

    return QuickReader
