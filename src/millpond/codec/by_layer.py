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
    """Format of the layers `first` to `last`, both included."""

    first: int
    last: int
    stored: Format


@dataclass(frozen=True, slots=True)
class LayerCodecs:
    """Format of each layer.

    Layers are counted among those that hold entries: layers of a hybrid that hold a state are not counted.

    Attributes:
        name: Text of one word as a user may write it.
        ranges: Ranges by first layer, without overlap.
        rest: (format,) of all other layers; () if the ranges must name every layer.
    """

    name: str
    ranges: tuple[LayerRange, ...]
    rest: tuple[Format, ...]

    def of(self, layer: int) -> Format:
        """Return the format of a layer that `check_layers` has counted."""
        for layer_range in self.ranges:
            if layer_range.first <= layer <= layer_range.last:
                return layer_range.stored
        return self.rest[0]

    @property
    def formats(self) -> list[Format]:
        """Every format, in the order of the name."""
        return [*(layer_range.stored for layer_range in self.ranges), *self.rest]

    def map(self, change: Callable[[Format], Format]) -> LayerCodecs:
        """Return the same layers with each format changed."""
        ranges = tuple(replace(one, stored=change(one.stored)) for one in self.ranges)
        return LayerCodecs(self.name, ranges, tuple(change(one) for one in self.rest))

    def check_layers(self, n_layers: int) -> None:
        """Check that every layer of the model has a format, and no range ends beyond them.

        Raises:
            OptionError: a range beyond the model's layers, or a layer without a format.
        """
        for layer_range in self.ranges:
            if layer_range.last >= n_layers:
                raise OptionError(
                    f"codec {self.name!r} names layer {layer_range.last}: the model has layers 0 to {n_layers - 1}"
                )
        if self.rest:
            return
        named = {layer for layer_range in self.ranges for layer in range(layer_range.first, layer_range.last + 1)}
        missing = [layer for layer in range(n_layers) if layer not in named]
        if missing:
            raise OptionError(
                f"codec {self.name!r} gives layer {missing[0]} of {n_layers} no format; add '{REST}=...' for all others"
            )


def codec_text(codec: CodecSpec) -> str | tuple[str, str]:
    """Return a codec as one word; a pair, which is one format, stays a pair.

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
    """Return the formats of a text with "=" in it; a single format if all layers have it.

    Args:
        text: Rules such as "0-1=bf16,*=int4".
        one_format: Returns the format of a single name.

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
    ranges.sort(key=lambda layer_range: layer_range.first)
    for before, then in itertools.pairwise(ranges):
        if then.first <= before.last:
            raise OptionError(f"codec={text!r} gives layer {then.first} two formats; its ranges must not overlap")
    return LayerCodecs(text, tuple(ranges), tuple(rest)) if ranges else rest[0]


def _parts(text: str) -> list[str]:
    """Split a text into rules: a comma that no "=" follows belongs to the name of a format.

    A semicolon separates as a comma does, for lists of codecs that commas separate.
    """
    texts: list[str] = []
    for part in text.replace(";", ",").split(","):
        if "=" in part:
            texts.append(part)
        elif texts:
            texts[-1] += f",{part}"
        else:
            raise OptionError(f"codec={text!r}: {part!r} names no layers; {WAY_OUT}")
    return texts


def _layers(word: str, text: str) -> tuple[int, int]:
    first, dash, last = word.partition("-")
    numbers = [first, last] if dash else [first]
    if not all(number.isdecimal() and len(number) <= DIGITS for number in numbers):
        raise OptionError(
            f"codec={text[:80]!r}: {word[:20]!r} is no layer, as '3', or range of layers, as '0-1', or '{REST}'"
        )
    layer_range = int(first), int(last or first)
    if layer_range[0] > layer_range[1]:
        raise OptionError(f"codec={text!r}: range {word!r} ends before it begins")
    return layer_range


def formats_of(stored: LayerCodecs | Format) -> list[Format]:
    """Return the formats of all layers."""
    return stored.formats if isinstance(stored, LayerCodecs) else [stored]


def codecs_of(stored: LayerCodecs | Format) -> list[Codec]:
    """Return those of `formats_of` that are codecs, not plain dtypes."""
    return [number_format for number_format in formats_of(stored) if isinstance(number_format, Codec)]
