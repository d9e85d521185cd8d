"""Sizes of a model's parts, from its configuration and the headers of its weight files; no weight is read."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from millpond.errors import OptionError
from millpond.hf.model_support import supported
from millpond.kernels.linear import BLOCK
from millpond.models.lean.fuse import fusable
from millpond.models.lean.layers import block_of
from millpond.models.load import resolve
from millpond.models.weights.sizes import WeightSizes
from millpond.models.weights.skeleton import Skeleton
from millpond.runner.packed_model import LayerShape
from millpond.tiers.buffers import aligned_up


@dataclass(frozen=True, kw_only=True)
class LayerSize:
    """One decoder layer.

    Attributes:
        shape: Shape of what it stores of a token.
        n_heads: Query heads.
        n_bytes: Bytes of its weights as they are read.
        parameters: Numbers of its matrices.
        row_bytes: Bytes that a row takes besides weights and KV while it passes the layer.
    """

    shape: LayerShape
    n_heads: int
    n_bytes: int
    parameters: int
    row_bytes: int


@dataclass(frozen=True, kw_only=True)
class EndsOnDisk:
    """Embeddings and head that are read while the model runs.

    Attributes:
        held_bytes: Bytes of the weights outside the layers that stay in memory.
        row_room_bytes: Bytes of a buffer for a row.
        saved_bytes: Bytes of both matrices in their file.
        head_bytes: Bytes of the head that a sweep reads.
        n_tiles: Number of parts in which it reads them.
    """

    held_bytes: int
    row_room_bytes: int
    saved_bytes: int
    head_bytes: int
    n_tiles: int


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """A model on disk.

    Attributes:
        folder: Folder of its files.
        name: Name of its class.
        dtype: Number format of its weights as they were saved.
        weights: Format of matrices in codes; None: as they were saved.
        fingerprint: Hash of shapes and places of all tensors.
        layers: Sizes of the layers, in their order.
        end_bytes: Bytes of embeddings, head and all other weights outside the layers, in memory.
        ends_on_disk: Sizes of these where embeddings and head stay on the disk.
        slot_bytes: Bytes of a slot that any layer fits in.
        widening_bytes: Bytes of scratch of products in 16 bits.
        width: Width of hidden states.
        vocabulary: Width of the logits.
        head_parameters: Numbers of the last matrix.
        context: Most tokens of a text; None: no limit.
    """

    folder: Path
    name: str
    dtype: torch.dtype
    weights: str | None
    fingerprint: str
    layers: tuple[LayerSize, ...]
    end_bytes: int
    ends_on_disk: EndsOnDisk
    slot_bytes: int
    widening_bytes: int
    width: int
    vocabulary: int
    head_parameters: int
    context: int | None

    @cached_property
    def shapes(self) -> list[LayerShape]:
        """Shapes of what each layer stores."""
        return [layer.shape for layer in self.layers]

    @cached_property
    def layer_bytes(self) -> int:
        """Bytes of the weights of all layers."""
        return sum(layer.n_bytes for layer in self.layers)

    @property
    def n_bytes(self) -> int:
        """Bytes of all weights."""
        return self.layer_bytes + self.end_bytes


def model_size(model: str | os.PathLike[str], weights: str | None = None) -> ModelSize:
    """Read the sizes of a model.

    Args:
        model: A folder with config.json and safetensors, a GGUF file, or a name of `millpond models`.
        weights: "int8" or "int4" for matrices in codes; None: as they were saved.

    Raises:
        OptionError: there is no such folder, or it holds no safetensors.
        DataError: a file is damaged, or does not fit the configuration.
        UnsupportedModelError: the layers are not built as Llama's, OPT's or GPT-NeoX's.
    """
    folder = Path(resolve(model))
    if not folder.is_dir():
        raise OptionError(
            f"{os.fspath(model)}: there is no such folder; a plan needs a model's folder with its config.json and "
            "safetensors, a GGUF file, or a name of 'millpond models'"
        )
    return size_of(folder, Skeleton.of(folder), weights)


def size_of(folder: Path, skeleton: Skeleton, weights: str | None = None) -> ModelSize:
    """Return the sizes of a model whose headers were read.

    Raises:
        UnsupportedModelError: see `model_size`.
    """
    profile = supported(skeleton.model)
    sizes = WeightSizes(skeleton, weights)
    ends_on_disk = sizes.ends_on_disk
    built_model: Any = skeleton.model
    head = built_model.get_output_embeddings()
    element_bytes = skeleton.dtype.itemsize
    return ModelSize(
        folder=folder,
        name=profile.name,
        dtype=skeleton.dtype,
        weights=weights,
        fingerprint=fingerprint(skeleton, weights),
        layers=tuple(
            _layer_size(layer, index, window, aligned_up(layout.nbytes), element_bytes)
            for index, (layer, window, layout) in enumerate(
                zip(skeleton.layers, profile.windows, sizes.layers, strict=True)
            )
        ),
        end_bytes=sizes.kept_bytes(()),
        ends_on_disk=EndsOnDisk(
            held_bytes=ends_on_disk.held_bytes,
            row_room_bytes=ends_on_disk.row_room_bytes,
            saved_bytes=ends_on_disk.saved_bytes,
            head_bytes=sum(tile.nbytes for tile in sizes.tiles),
            n_tiles=len(sizes.tiles),
        ),
        slot_bytes=sizes.slot_bytes,
        widening_bytes=2 * 4 * BLOCK if element_bytes < 4 or weights else 0,
        width=int(profile.config.hidden_size),
        vocabulary=profile.vocabulary,
        head_parameters=head.weight.numel(),
        context=profile.position_limit,
    )


def _layer_size(layer: nn.Module, index: int, window: int, n_bytes: int, element_bytes: int) -> LayerSize:
    block = block_of(layer, fusable)
    dim = block.head_dim
    out = [len(weight) for weight, _ in block.qkv.parts]
    q, k = (out[0], out[1]) if len(out) == 3 else (out[0] // 3, out[0] // 3)
    up = sum(len(weight) for weight, _ in block.up.parts)
    ((down, _),) = block.down.parts
    width, inner = down.shape
    return LayerSize(
        shape=LayerShape(k // dim, dim, dim, window, index, q // dim),
        n_heads=q // dim,
        n_bytes=n_bytes,
        parameters=sum(weight.numel() for weight in layer.parameters() if weight.ndim == 2),
        row_bytes=element_bytes * (3 * width + max(sum(out), 2 * up + inner)) + 4 * max(width, inner),
    )


def fingerprint(skeleton: Skeleton, weights: str | None = None) -> str:
    """Return a hash of a model's class, tensors and code format, by which a plan knows it.

    Of each tensor the name, shape, dtype and place count.
    """
    parts: Sequence[Any] = [skeleton.ends, *skeleton.by_layer]
    tensor_marks = [
        (tensor.name, str(tensor.dtype), tensor.shape, tensor.path.name, tensor.offset)
        for part in parts
        for tensor in part.values()
    ]
    hashed = [type(skeleton.model).__name__, *([weights] if weights else []), *sorted(tensor_marks)]
    return hashlib.sha256(json.dumps(hashed).encode()).hexdigest()[:16]
