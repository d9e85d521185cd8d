"""Calibration of KVQuant (arXiv:2401.18079): tables and ranges per layer, known before the first key is stored.

Made once per model by `millpond.hf.calibration.measure` from a text, and stored in a safetensors file. It contains no
reference to the model, only the mark that identifies it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from millpond.codec.spec import Codec, Tables
from millpond.errors import DataError, OptionError

FORMAT = "millpond calibration 1"
#: Begins the names of tables of values over all heads.
TOKEN = "token_value"


@dataclass(frozen=True, slots=True)
class Numbers:
    """Numbers that codes stand for, ascending, and the cuts between codes; no cuts: halfway."""

    table: tuple[float, ...]
    cuts: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class LayerCalibration:
    """Ranges and tables of one layer.

    Attributes:
        key_scale: (Hkv, D) float32, half the range of each channel before RoPE.
        key_zero: (Hkv, D) float32, the middle of the range of each channel before RoPE.
        keys: Tables of keys, by bits.
        values: Tables of values, by bits.
        token_values: Tables of values whose range is that of a token over all KV heads, by bits; {} in files from
            before there were such.
    """

    key_scale: Tensor
    key_zero: Tensor
    keys: Mapping[int, Numbers]
    values: Mapping[int, Numbers]
    token_values: Mapping[int, Numbers] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Calibration:
    """Ranges and tables of all layers of a model.

    Attributes:
        model: Mark that identifies the model.
        name: Class of the model, for people.
        outliers: Share of the numbers that are outside the ranges, and stored as outliers.
        sinks: First entries of the text that were left out, and are stored as plain numbers.
    """

    layers: tuple[LayerCalibration, ...]
    model: str
    name: str
    outliers: float = 0.01
    sinks: int = 1

    @property
    def bits(self) -> list[int]:
        """Numbers of bits that have tables."""
        return sorted(self.layers[0].keys)

    def applied(self, codec: Codec) -> Codec:
        """Return a codec that needs a calibration, with this one.

        Raises:
            OptionError: there is no table of as many bits.
        """
        for side in (codec.key, codec.value):
            if side.format.bits not in self.bits:
                raise OptionError(
                    f"codec {codec.name!r} needs tables of {side.format.bits} bits, and this calibration has those of "
                    f"{', '.join(map(str, self.bits))}: calibrate with --bits {side.format.bits} too"
                )
        if codec.value.across_heads and not self.layers[0].token_values:
            raise OptionError(
                f"codec {codec.name!r} needs tables of values over all heads, and this calibration is older and has "
                "none; make it again with 'millpond calibrate'"
            )
        return replace(
            codec, calibration=self, key_outliers=self.outliers, value_outliers=self.outliers, sinks=self.sinks
        )

    def tables(self, layer: int, codec: Codec) -> Tables:
        """Return the tables of one layer for a layout of pages."""
        layer_calibration = self.layers[layer]
        values = layer_calibration.token_values if codec.value.across_heads else layer_calibration.values
        key, value = layer_calibration.keys[codec.key.format.bits], values[codec.value.format.bits]
        return Tables(key.table, value.table, key.cuts, value.cuts, len(layer_calibration.key_scale))

    def key_range(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return scales and zeros (Hkv, D) float32 of the keys of one layer."""
        return self.layers[layer].key_scale, self.layers[layer].key_zero

    def digest(self) -> str:
        """Return a short text that differs if key ranges or tables differ."""
        digest = hashlib.sha256(repr([(layer.keys, layer.values) for layer in self.layers]).encode())
        if self.layers[0].token_values:
            digest.update(repr([layer.token_values for layer in self.layers]).encode())
        for layer in self.layers:
            for part in (layer.key_scale, layer.key_zero):
                digest.update(part.detach().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file.

        Raises:
            DataError: it cannot be written.
        """
        tensors: dict[str, Tensor] = {}
        for index, layer in enumerate(self.layers):
            tensors |= {f"{index}.key_scale": layer.key_scale, f"{index}.key_zero": layer.key_zero}
            for side, by_bits in (("key", layer.keys), ("value", layer.values), (TOKEN, layer.token_values)):
                for bits, numbers in by_bits.items():
                    tensors[f"{index}.{side}_table.{bits}"] = torch.tensor(numbers.table)
                    if numbers.cuts:
                        tensors[f"{index}.{side}_cuts.{bits}"] = torch.tensor(numbers.cuts)
        about = {
            "format": FORMAT,
            "model": self.model,
            "name": self.name,
            "layers": str(len(self.layers)),
            "bits": json.dumps(self.bits),
            "outliers": str(self.outliers),
            "sinks": str(self.sinks),
        }
        try:
            save_file({name: t.contiguous() for name, t in tensors.items()}, path, about)
        except (OSError, SafetensorError) as error:
            raise DataError(f"{os.fspath(path)!r} cannot be written: {error}") from error


def load_calibration(path: str | os.PathLike[str]) -> Calibration:
    """Read a calibration from a file.

    Raises:
        DataError: no such file, it is broken, or no calibration.
    """
    name = os.fspath(path)
    try:
        with safe_open(name, "pt") as file:
            about = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no dictionary)
    except (OSError, SafetensorError) as error:
        raise DataError(f"calibration {name!r} cannot be read: {error}") from error
    if about.get("format") != FORMAT:
        raise DataError(
            f"{name!r} is no calibration of this Millpond: its format is {about.get('format')!r}; make one with "
            "'millpond calibrate'"
        )
    try:
        bits: list[int] = json.loads(about["bits"])
        layers = tuple(_layer(tensors, index, bits) for index in range(int(about["layers"])))
        return Calibration(layers, about["model"], about["name"], float(about["outliers"]), int(about["sinks"]))
    except (KeyError, ValueError) as error:
        raise DataError(f"calibration {name!r} is broken: {error!r}; make it again with 'millpond calibrate'") from None


def _layer(tensors: Mapping[str, Tensor], index: int, bits: list[int]) -> LayerCalibration:
    def numbers(side: str, b: int) -> Numbers:
        table, cuts = tensors[f"{index}.{side}_table.{b}"], tensors.get(f"{index}.{side}_cuts.{b}", torch.zeros(0))
        if table.shape != (1 << b,) or cuts.shape not in [(0,), ((1 << b) - 1,)]:
            raise ValueError(f"layer {index}: a table of {b} bits has shape {tuple(table.shape)}")
        return Numbers(tuple(table.tolist()), tuple(cuts.tolist()))

    scale, zero = (tensors[f"{index}.{name}"].float().contiguous() for name in ("key_scale", "key_zero"))
    if scale.ndim != 2 or scale.shape != zero.shape or not bool(torch.isfinite(torch.stack([scale, zero])).all()):
        raise ValueError(f"layer {index}: ranges of shape {tuple(scale.shape)} and {tuple(zero.shape)}, or not finite")
    keys, values = ({b: numbers(side, b) for b in bits} for side in ("key", "value"))
    has_token_values = any(name.startswith(f"{index}.{TOKEN}") for name in tensors)
    return LayerCalibration(scale, zero, keys, values, {b: numbers(TOKEN, b) for b in bits if has_token_values})
