"""Number formats by layer, as "0-1=bf16,*=int4"."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from millpond.codec.spec import Codec
from millpond.errors import OptionError

#: How one layer stores entries: a dtype, a codec, or None for what the model computes.
Format = torch.dtype | Codec | None
#: A format by name: "int4", ("bf16", "int4") for keys and values, "bf16:20%,int8:20%,int4" by age, "0-1=bf16,*=int4" or
#: a mapping by layer.
CodecSpec = str | tuple[str, str] | Mapping[str, str | tuple[str, str]]
#: Key of all layers that no other key names.
REST = "*"
#: Most digits of a layer's number.
DIGITS = 5
#: How keys and values of a pair are joined in one word.
JOINT = "+"
WAY_OUT = 'write {"0-1": "bf16", "*": "int4"} or "0-1=bf16,*=int4"'


@dataclass(frozen=True, slots=True)
class LayerRange:
    """The format of the layers `first` to `last`, both included."""

    first: int
    last: int
    stored: Format


@dataclass(frozen=True, slots=True)
class LayerCodecs:
    """A format for each layer.

    Layers are counted among those that hold entries: in a hybrid, states are in none of them.

    Attributes:
        name: as a user may write it in one word.
        ranges: by first layer, without overlap.
        rest: (format,) of all other layers; () where the ranges must name every layer.
    """

    name: str
    ranges: tuple[LayerRange, ...]
    rest: tuple[Format, ...]

    def of(self, layer: int) -> Format:
        """How a layer that `check_layers` has counted stores entries."""
        for one in self.ranges:
            if one.first <= layer <= one.last:
                return one.stored
        return self.rest[0]

    @property
    def formats(self) -> list[Format]:
        """Every format, in the order of the name."""
        return [*(one.stored for one in self.ranges), *self.rest]

    def map(self, change: Callable[[Format], Format]) -> LayerCodecs:
        """The same layers with each format changed."""
        ranges = tuple(replace(one, stored=change(one.stored)) for one in self.ranges)
        return LayerCodecs(self.name, ranges, tuple(change(one) for one in self.rest))

    def check_layers(self, n_layers: int) -> None:
        """
        Raises:
            OptionError: a range beyond the model's layers, or a layer without a format.
        """
        for one in self.ranges:
            if one.last >= n_layers:
                raise OptionError(
                    f"codec {self.name!r} names layer {one.last}: the model has layers 0 to {n_layers - 1}"
                )
        if self.rest:
            return
        named = {layer for one in self.ranges for layer in range(one.first, one.last + 1)}
        missing = [layer for layer in range(n_layers) if layer not in named]
        if missing:
            raise OptionError(
                f"codec {self.name!r} gives layer {missing[0]} of {n_layers} no format; add '{REST}=...' for all others"
            )


def codec_text(codec: CodecSpec) -> str | tuple[str, str]:
    """A codec as one word; a pair, which is one format, stays a pair.

    Raises:
        OptionError: a mapping that holds anything but names, or nothing.

    Example:
        >>> codec_text({"0-1": "bf16", "*": "int4"})
        '0-1=bf16,*=int4'
    """
    if not isinstance(codec, Mapping):
        return codec
    if not codec:
        raise OptionError(f"codec={{}} names no format; {WAY_OUT}")
    parts = []
    for layers, stored in codec.items():
        names = stored if isinstance(stored, list | tuple) else [stored]
        if not isinstance(layers, str) or not all(isinstance(name, str) for name in names):
            raise OptionError(f"codec: {layers!r}: {stored!r} is no layer range with the name of a format; {WAY_OUT}")
        parts.append(f"{layers.strip()}={JOINT.join(names)}")
    return ",".join(parts)


def parse_layers(text: str, one_format: Callable[[str], Format]) -> LayerCodecs | Format:
    """The formats of a text with "=" in it; a single one where all layers have the same.

    Args:
        one_format: what the name of a single format stands for.

    Raises:
        OptionError: no range, ranges that overlap, or an unknown format.
    """
    ranges: list[LayerRange] = []
    rest: list[Format] = []
    for part in _parts(text):
        layers, _, name = (word.strip() for word in part.partition("="))
        stored = one_format(name)
        if layers == REST:
            if rest:
                raise OptionError(f"codec={text!r} names '{REST}' twice; leave one out")
            rest.append(stored)
        else:
            ranges.append(LayerRange(*_layers(layers, text), stored))
    ranges.sort(key=lambda one: one.first)
    for before, then in itertools.pairwise(ranges):
        if then.first <= before.last:
            raise OptionError(f"codec={text!r} gives layer {then.first} two formats; its ranges must not overlap")
    return LayerCodecs(text, tuple(ranges), tuple(rest)) if ranges else rest[0]


def _parts(text: str) -> list[str]:
    """The rules of a text: a comma that no "=" follows belongs to the name of a format.

    A semicolon separates as a comma does, for lists of codecs that commas separate.
    """
    found: list[str] = []
    for part in text.replace(";", ",").split(","):
        if "=" in part:
            found.append(part)
        elif found:
            found[-1] += f",{part}"
        else:
            raise OptionError(f"codec={text!r}: {part!r} names no layers; {WAY_OUT}")
    return found


def _layers(word: str, text: str) -> tuple[int, int]:
    first, dash, last = word.partition("-")
    numbers = [first, last] if dash else [first]
    if not all(number.isdecimal() and len(number) <= DIGITS for number in numbers):
        raise OptionError(
            f"codec={text[:80]!r}: {word[:20]!r} is no layer, as '3', or range of layers, as '0-1', or '{REST}'"
        )
    found = int(first), int(last or first)
    if found[0] > found[1]:
        raise OptionError(f"codec={text!r}: range {word!r} ends before it begins")
    return found


def formats_of(stored: LayerCodecs | Format) -> list[Format]:
    """Every format that some layer has."""
    return stored.formats if isinstance(stored, LayerCodecs) else [stored]


def codecs_of(stored: LayerCodecs | Format) -> list[Codec]:
    """Those of `formats_of` that are codecs, which numbers as they are are not."""
    return [one for one in formats_of(stored) if isinstance(one, Codec)]
