"""Transform file: all numbers of the codec for a model as safetensors, checked before anything is allocated."""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import struct
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from millpond.codec.transform.fit import SideTransform
from millpond.codec.transform.levels import MOST_BITS
from millpond.codec.transform.prompt_header import Sides
from millpond.errors import CacheMismatchError, DataError, OptionError

#: First words of files without and with parts for single heads; the number grows when the content changes.
FORMATS = ("millpond transform 1", "millpond transform 2")
#: First words of the numbers whose digest codes name; it stayed as it was when files got parts for single heads.
_DIGESTED = FORMATS[0]
#: Most layers, and numbers of a token in a layer, that a file may have.
MOST_LAYERS, MOST_DIMS = 1024, 16384
#: Most bytes of the names, shapes and facts at the beginning of a file.
MOST_HEADER = 8 << 20
#: End of the name of a file that xz has packed, and the most bytes that it may hold.
PACKED, MOST_UNPACKED = ".xz", 64 << 20
_SIDES = ("key", "value")
#: Facts that are compared, in this order, and how a message calls them.
_COMPARED = {"name": "class", "shapes": "shape of layers", "rope": "rotary embedding", "weights": "set of weights"}
#: Numbers of the tables of levels, 2 + 4 + ... + 128.
_N_LEVELS = (2 << MOST_BITS) - 2


@dataclass(frozen=True, slots=True)
class FittedModel:
    """Facts about the model of a transform; all must be equal where it is used.

    Attributes:
        name: Class of the model.
        shapes: For each layer with entries: KV heads, channels of a key, channels of a value.
        rope: Settings of its rotary embedding, as JSON.
        weights: Digest of names, shapes and some numbers of its parameters.
    """

    name: str
    shapes: tuple[tuple[int, int, int], ...]
    rope: str
    weights: str

    def check_equal(self, other: FittedModel) -> None:
        """Check that `other` is the model of this file.

        Raises:
            CacheMismatchError: it is not; the message says what differs.
        """
        for field, words in _COMPARED.items():
            ours, theirs = getattr(self, field), getattr(other, field)
            if ours != theirs:
                detail = "" if field == "weights" else f" ({_brief(ours)} in the file, {_brief(theirs)} here)"
                raise CacheMismatchError(
                    f"this transform file was made for another model, with another {words}{detail}; make one for this "
                    "model with 'millpond calibrate --codec transform'"
                )


@dataclass(frozen=True, slots=True)
class Calibrated:
    """Texts and settings that a transform was fitted with.

    Attributes:
        tokens: Tokens that were read.
        digest: SHA-256 of their ids.
        eps_keys: Share of the metric's mean that was added to that of keys.
        eps_values: The same of values.
        most_bits: Mean bits a number up to which the file has rows.
        most_head_bits: The same of its parts for single heads; 0 without any.
    """

    tokens: int
    digest: str
    eps_keys: float
    eps_values: float
    most_bits: float
    most_head_bits: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class ModelTransform:
    """Transforms of all layers of a model with entries.

    Attributes:
        model: The model.
        calibrated: What it was fitted on.
        layers: Keys and values of each layer.
        thresholds: (layers,) float32: attention per query that one token in 100 exceeds. The format has them; exact
            tokens are now chosen by rank, and benchmarks alone compare the two.
        heads: Keys and values of each KV head of each layer alone, for caches whose heads hold other tokens each; empty
            in files of format 1.
    """

    model: FittedModel
    calibrated: Calibrated
    layers: tuple[Sides, ...]
    thresholds: Tensor
    heads: tuple[tuple[Sides, ...], ...] = ()

    @property
    def n_numbers(self) -> int:
        """Numbers of a token in all layers."""
        return sum(len(side.mean) for layer in self.layers for side in layer)

    def check_bits(self, bits: float) -> None:
        """Check that the file has the rows that codes of `bits` a number need.

        Raises:
            OptionError: it was made for fewer bits.
        """
        _check_most(bits, self.calibrated.most_bits, "--most-bits")

    def check_head_bits(self, bits: float) -> None:
        """Check that the file has the rows of single heads that codes of `bits` a number need.

        Raises:
            OptionError: it was made for fewer bits, or has no parts for single heads.
        """
        self.digest_of_heads()
        _check_most(bits, self.calibrated.most_head_bits, "--most-head-bits")

    def digest(self) -> str:
        """Return the SHA-256 of the numbers of layers, by which their codes name the transform."""
        return _digest(self._layer_tensors())

    def digest_of_heads(self) -> str:
        """Return the SHA-256 of the numbers of heads, by which their codes name the transform.

        Raises:
            OptionError: the file has none.
        """
        if not self.heads:
            raise OptionError(
                "this transform file has no parts for single heads, which a cache whose heads hold other tokens each "
                "needs: make it again with 'millpond calibrate --codec transform'"
            )
        return _digest(self._head_tensors())

    def save(self, path: str | os.PathLike[str]) -> int:
        """Write the file; returns its bytes.

        Raises:
            DataError: it cannot be written.
        """
        about = {
            "format": FORMATS[bool(self.heads)],
            "model": json.dumps(asdict(self.model)),
            "calibrated": json.dumps(self._calibrated()),
            "digest": _digest(tensors := self._layer_tensors() | self._head_tensors()),
        }
        try:
            save_file(tensors, path, about)
            return Path(path).stat().st_size
        except (OSError, SafetensorError) as error:
            raise DataError(f"{os.fspath(path)!r} cannot be written: {error}") from error

    def _calibrated(self) -> dict[str, Any]:
        facts = asdict(self.calibrated)
        if not self.heads:
            del facts["most_head_bits"]  # unknown to files of format 1
        return facts

    def _layer_tensors(self) -> dict[str, Tensor]:
        tensors = {"thresholds": self.thresholds.cpu().float().contiguous()}
        for index, layer in enumerate(self.layers):
            tensors |= _tensors_of(layer, f"{index}.")
        return tensors

    def _head_tensors(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for index, layer in enumerate(self.heads):
            for head, sides in enumerate(layer):
                tensors |= _tensors_of(sides, f"{index}.{head}.")
        return tensors


def _tensors_of(sides: Sides, own: str) -> dict[str, Tensor]:
    tensors = {}
    for name, side in zip(_SIDES, sides, strict=True):
        tensors[f"{own}{name}.mean"] = side.mean.cpu().contiguous()
        tensors[f"{own}{name}.rows"] = side.rows.cpu().bfloat16().contiguous()
        tensors[f"{own}{name}.columns"] = side.columns.cpu().bfloat16().contiguous()
        tensors[f"{own}{name}.distortions"] = side.distortions.cpu().contiguous()
        tensors[f"{own}{name}.levels"] = torch.cat(side.levels).cpu()
    return tensors


def _check_most(bits: float, most: float, option: str) -> None:
    if bits > most:
        raise OptionError(
            f"transform:{bits:g}: this transform file has rows for up to {most:g} bits a number; use fewer bits, or "
            f"make a file with 'millpond calibrate --codec transform {option} {bits:g}'"
        )


def _digest(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(_DIGESTED.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def fitted_model_of(path: str | os.PathLike[str]) -> FittedModel:
    """Return the model that a transform file was made for, from its header alone.

    Raises:
        DataError: no such file, of another format, or damaged.
    """
    name = os.fspath(path)
    try:
        with _stream(name) as begin:
            length = struct.unpack("<Q", begin.read(8).ljust(8, b"\xff"))[0]
            header = begin.read(length) if length <= MOST_HEADER else b""
        about = json.loads(header)["__metadata__"]
        if about["format"] in FORMATS:
            return _model_of(about)
    except (OSError, EOFError, lzma.LZMAError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"transform file {name!r} cannot be read: {error!r}") from error
    raise _other_format(name, about["format"])


def load_transform(path: str | os.PathLike[str]) -> ModelTransform:
    """Read a transform file, or one that xz has packed (.xz).

    Names, types and shapes are checked before a tensor is read.

    Raises:
        DataError: no such file, of another format, damaged, or its parts do not fit together.
    """
    name = os.fspath(path)

    def need(right: bool, rule: str) -> None:
        if not right:
            raise _damaged(name, rule)

    with _opened(name) as (file, about):
        model, calibrated = _model_of(about), _calibrated_of(about)
        need(0 < len(model.shapes) <= MOST_LAYERS, f"1 to {MOST_LAYERS} layers")
        given = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 (no dictionary)
        shapes = {key: (tuple(part.get_shape()), part.get_dtype()) for key, part in given.items()}
        by_head = about["format"] != FORMATS[0]
        _check_shapes(shapes, model.shapes, by_head, need)
        tensors = {key: file.get_tensor(key) for key in given}
    need(all(bool(tensor.isfinite().all()) for tensor in tensors.values()), "its numbers are finite")
    need(about.get("digest") == _digest(tensors), "its digest differs")
    layers = tuple(_sides(tensors, f"{index}.") for index in range(len(model.shapes)))
    heads = tuple(
        tuple(_sides(tensors, f"{index}.{head}.") for head in range(shape[0]))
        for index, shape in enumerate(model.shapes if by_head else ())
    )
    for sides in (*layers, *(sides for layer in heads for sides in layer)):
        for side in sides:
            need(bool((side.distortions >= 0).all()), "a distortion is 0 or more")
            need(all(bool((table[1:] >= table[:-1]).all()) for table in side.levels), "levels ascend")
    return ModelTransform(model, calibrated, layers, tensors["thresholds"], heads)


@contextmanager
def _opened(name: str) -> Iterator[tuple[Any, Mapping[str, str]]]:
    """Open a transform file; gives it and its facts.

    What is not as written while it is open becomes an error that names the file.

    Raises:
        DataError: no such file, of another format, or damaged.
    """
    try:
        with _stream(name) as begin:
            length = struct.unpack("<Q", begin.read(8).ljust(8, b"\xff"))[0]
        if length > MOST_HEADER:
            raise _damaged(name, "its header is too long")
        with _plain(name) as path, safe_open(path, "pt") as file:
            about = file.metadata() or {}
            if about.get("format") not in FORMATS:
                raise _other_format(name, about.get("format"))
            yield file, about
    except (OSError, EOFError, lzma.LZMAError, SafetensorError) as error:
        raise DataError(f"transform file {name!r} cannot be read: {error}") from error
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"transform file {name!r} is damaged ({error!r}); make it again") from None


def _stream(name: str) -> IO[bytes]:
    return lzma.open(name) if name.endswith(PACKED) else open(name, "rb")


@contextmanager
def _plain(name: str) -> Iterator[str]:
    """Give the path of a file, or of a copy of it that is not packed.

    Raises:
        DataError: it is larger than a packed one may be; no more than that is unpacked.
        OSError, EOFError, lzma.LZMAError: it cannot be unpacked.
    """
    if not name.endswith(PACKED):
        yield name
        return
    with lzma.open(name) as packed:
        content = packed.read(MOST_UNPACKED + 1)
    if len(content) > MOST_UNPACKED:
        raise _damaged(name, f"it holds at most {MOST_UNPACKED:,} bytes, unpacked")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "transform.safetensors"
        path.write_bytes(content)
        yield os.fspath(path)


def _other_format(name: str, found: object) -> DataError:
    return DataError(
        f"{name!r} is no transform file of this Millpond: its format is {found!r}; make one with 'millpond calibrate "
        "--codec transform'"
    )


def _damaged(name: str, rule: str) -> DataError:
    return DataError(f"transform file {name!r} is damaged ({rule}); make it again with 'millpond calibrate'")


def _check_shapes(
    given: Mapping[str, tuple[tuple[int, ...], str]], shapes: tuple[tuple[int, int, int], ...], by_head: bool, need: Any
) -> None:
    expected: dict[str, tuple[tuple[int, ...], str]] = {"thresholds": ((len(shapes),), "F32")}
    for index, (heads, *dims) in enumerate(shapes):
        for side, dim in zip(_SIDES, dims, strict=True):
            need(0 < heads * dim <= MOST_DIMS, f"a layer has 1 to {MOST_DIMS} numbers")
            parts = [(f"{index}.{side}.", heads * dim)]
            if by_head:
                parts += [(f"{index}.{head}.{side}.", dim) for head in range(heads)]
            for own, d in parts:
                rows = given[f"{own}rows"][0]
                need(len(rows) == 2 and 0 < rows[0] <= d, f"layer {index} has 1 to {d} rows")
                for name, shape, dtype in (
                    ("mean", (d,), "F32"),
                    ("rows", (rows[0], d), "BF16"),
                    ("columns", (rows[0], d), "BF16"),
                    ("distortions", (rows[0], 1 + MOST_BITS), "F32"),
                    ("levels", (_N_LEVELS,), "F32"),
                ):
                    expected[f"{own}{name}"] = (shape, dtype)
    need(set(given) == set(expected), "its names are those of its layers")
    for name, form in expected.items():
        need(given[name] == form, f"{name} is {form[1]} {form[0]}")


def _sides(tensors: Mapping[str, Tensor], own: str) -> Sides:
    return _side(tensors, f"{own}key."), _side(tensors, f"{own}value.")


def _side(tensors: Mapping[str, Tensor], own: str) -> SideTransform:
    levels = torch.split(tensors[f"{own}levels"], [1 << bits for bits in range(1, MOST_BITS + 1)])
    mean, rows, columns, errors = (
        tensors[f"{own}{name}"].float() for name in ("mean", "rows", "columns", "distortions")
    )
    return SideTransform(mean, rows, columns, errors, tuple(levels))


def _model_of(about: Mapping[str, str]) -> FittedModel:
    """Read the facts about the model.

    Raises:
        KeyError, TypeError, ValueError: they are not what `save` wrote.
    """
    facts = json.loads(about["model"])
    shapes = tuple((int(heads), int(key), int(value)) for heads, key, value in facts["shapes"])
    return FittedModel(str(facts["name"]), shapes, str(facts["rope"]), str(facts["weights"]))


def _calibrated_of(about: Mapping[str, str]) -> Calibrated:
    facts = json.loads(about["calibrated"])
    kinds = {"tokens": int, "digest": str}
    heads = facts["most_bits"] if about["format"] == FORMATS[1] else 0.0  # files that name no bits of heads
    facts = {"most_head_bits": heads, **facts}
    return Calibrated(**{field.name: kinds.get(field.name, float)(facts[field.name]) for field in fields(Calibrated)})


def _brief(value: Any, most: int = 120) -> str:
    text = str(value)
    return text if len(text) <= most else f"{text[:most]}..."
