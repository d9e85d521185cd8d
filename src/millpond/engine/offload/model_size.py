"""Sizes of a model's parts, from its configuration and the headers of its weight files; no weight is read."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from millpond.errors import DataError, OptionError, UnsupportedModelError
from millpond.hf.model_support import supported
from millpond.models.lean.fuse import fusable
from millpond.models.lean.layers import block_of
from millpond.models.load import resolve
from millpond.runner.packed_model import LayerShape

#: Bounds of a direct read: both ends of what is read lie on multiples of it.
ALIGNED = 4096
#: Most bytes of the header of a safetensors file, as that format has it.
_MOST_HEADER = 100_000_000
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class LayerSize:
    """One decoder layer.

    Attributes:
        shape: what it stores of a token. n_heads: query heads.
        n_bytes: of its weights as saved. slot_bytes: that a slot needs, each tensor widened to `ALIGNED`.
        parameters: numbers of its matrices. row_numbers: numbers of scratch that a row takes while it passes.
    """

    shape: LayerShape
    n_heads: int
    n_bytes: int
    slot_bytes: int
    parameters: int
    row_numbers: int


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """A model on disk.

    Attributes:
        folder: where its files are. name: of its class. dtype: of its weights. fingerprint: of shapes and places of all
            tensors.
        layers: in their order. end_bytes: of embeddings, head and all that is in no layer; always in memory.
        width, vocabulary: of hidden states and logits. head_parameters: numbers of the last matrix.
        context: most tokens of a text; None: no limit.
    """

    folder: Path
    name: str
    dtype: torch.dtype
    fingerprint: str
    layers: tuple[LayerSize, ...]
    end_bytes: int
    width: int
    vocabulary: int
    head_parameters: int
    context: int | None

    @cached_property
    def shapes(self) -> list[LayerShape]:
        """What each layer stores."""
        return [layer.shape for layer in self.layers]

    @cached_property
    def layer_bytes(self) -> int:
        """Bytes of the weights of all layers."""
        return sum(layer.n_bytes for layer in self.layers)

    @property
    def n_bytes(self) -> int:
        """Bytes of all weights."""
        return self.layer_bytes + self.end_bytes

    @cached_property
    def slot_bytes(self) -> int:
        """Bytes of a slot that any layer fits in."""
        return max(layer.slot_bytes for layer in self.layers)


def model_size(model: str | os.PathLike[str]) -> ModelSize:
    """Read the sizes of a model.

    Args:
        model: a folder with config.json and safetensors, a GGUF file, or a name of `millpond models`.

    Raises:
        OptionError: there is no such folder, or it holds no safetensors. DataError: a file is damaged, or lacks
            weights of the model. UnsupportedModelError: the layers are not built as Llama's, OPT's or GPT-NeoX's.
    """
    folder = Path(resolve(model))
    if not (folder / "config.json").is_file():
        raise OptionError(
            f"{os.fspath(model)}: no folder with a config.json; a plan needs the model's folder, its config.json and "
            "its safetensors"
        )
    saved = _saved(folder)
    skeleton = _skeleton(folder)
    profile = supported(skeleton)
    layers = _layers_module(skeleton)
    dtype = _dtype(saved)
    sizes = tuple(
        _layer_size(name, layer, index, profile.windows[index], saved) for index, (name, layer) in enumerate(layers)
    )
    inside = {f"{name}.{tensor}" for name, layer in layers for tensor in layer.state_dict()}
    head: Any = skeleton.get_output_embeddings()
    marks = sorted((name, spec["dtype"], spec["shape"], spec["data_offsets"]) for name, spec in saved.items())
    return ModelSize(
        folder=folder, name=profile.name, dtype=dtype,
        fingerprint=hashlib.sha256(json.dumps([profile.name, marks]).encode()).hexdigest()[:16],
        layers=sizes, end_bytes=sum(_bytes(spec) for name, spec in saved.items() if name not in inside),
        width=int(profile.config.hidden_size), vocabulary=profile.vocabulary, head_parameters=head.weight.numel(),
        context=profile.position_limit,
    )  # fmt: skip


def _saved(folder: Path) -> dict[str, Mapping[str, Any]]:
    """The tensors in all safetensors files of a folder, by name: dtype, shape and offsets."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise OptionError(
            f"{folder}: holds no safetensors files, which are what weights are streamed from; save the model with "
            "save_pretrained"
        )
    return {name: spec for file in files for name, spec in _header(file)}


def _header(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Names and descriptions of the tensors of one file.

    Raises:
        DataError: it is no safetensors file, or is shorter than its header says.
    """
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > _MOST_HEADER:
                raise ValueError(f"its header has {length} bytes")
            header = json.loads(stream.read(length))
        size, most = file.stat().st_size, 8 + length
        for name, spec in header.items():
            if name == "__metadata__":
                continue
            begin, end = spec["data_offsets"]
            if not (isinstance(begin, int) and isinstance(end, int) and 0 <= begin <= end <= size - most):
                raise ValueError(f"{name} lies at {begin} to {end}, and {size - most} bytes follow the header")
            if not isinstance(spec["dtype"], str) or not all(isinstance(n, int) for n in spec["shape"]):
                raise ValueError(f"{name} has no dtype and shape")
            yield name, spec
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise DataError(f"{file} is no complete safetensors file: {error}; download it again") from error


def _skeleton(folder: Path) -> PreTrainedModel:
    """The model without memory for its weights."""
    try:
        config = AutoConfig.from_pretrained(str(folder))
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError) as error:
        raise OptionError(f"{folder}: no model that transformers can build: {error}") from error
    return model


def _layers_module(model: PreTrainedModel) -> list[tuple[str, nn.Module]]:
    """The decoder layers with their names."""
    found = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and name.endswith("layers")]
    if len(found) != 1:
        raise UnsupportedModelError(f"{type(model).__name__} is not one list of layers, so no plan can be made for it")
    name, modules = found[0]
    return [(f"{name}.{index}", module) for index, module in enumerate(modules)]


def _layer_size(
    name: str, layer: nn.Module, index: int, window: int, saved: Mapping[str, Mapping[str, Any]]
) -> LayerSize:
    block = block_of(layer, fusable)
    dim = block.head_dim
    out = [len(weight) for weight, _ in block.qkv.parts]
    q, k = (out[0], out[1]) if len(out) == 3 else (out[0] // 3, out[0] // 3)
    missing = [tensor for tensor in layer.state_dict() if f"{name}.{tensor}" not in saved]
    if missing:
        raise DataError(f"the safetensors files lack {name}.{missing[0]}; download the model again")
    each = [_bytes(saved[f"{name}.{tensor}"]) for tensor in layer.state_dict()]
    wide = sum(len(weight) for weight, _ in block.up.parts)
    return LayerSize(
        shape=LayerShape(k // dim, dim, dim, window, index), n_heads=q // dim, n_bytes=sum(each),
        slot_bytes=sum(-(-n // ALIGNED) * ALIGNED + ALIGNED for n in each),
        parameters=sum(weight.numel() for weight in layer.parameters() if weight.ndim == 2),
        row_numbers=sum(out) + q + 2 * wide,
    )  # fmt: skip


def _dtype(saved: Mapping[str, Mapping[str, Any]]) -> torch.dtype:
    kinds = sorted({spec["dtype"] for spec in saved.values()})
    if len(kinds) != 1 or kinds[0] not in _DTYPES:
        raise UnsupportedModelError(
            f"weights are saved as {', '.join(kinds)}: a sweep takes one of {', '.join(_DTYPES)} for all of them"
        )
    return _DTYPES[kinds[0]]


def _bytes(spec: Mapping[str, Any]) -> int:
    begin, end = spec["data_offsets"]
    return int(end - begin)
