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
        shape: what it stores of a token. n_heads: query heads.
        n_bytes: of its weights as they are read. parameters: numbers of its matrices.
        row_bytes: that a row takes besides weights and KV while it passes the layer.
    """

    shape: LayerShape
    n_heads: int
    n_bytes: int
    parameters: int
    row_bytes: int


@dataclass(frozen=True, kw_only=True)
class FarEnds:
    """Embeddings and head that are read while the model runs.

    Attributes:
        held_bytes: of what is in no layer and stays in memory. row_room_bytes: of a buffer for a row. saved_bytes: of
            both matrices in their file. head_bytes, n_tiles: that a sweep reads of the head, and in how
            many parts.
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
        folder: where its files are. name: of its class. dtype: of its weights as they were saved. weights: format of
            matrices in codes; None: as they were saved. fingerprint: of shapes and places of all
            tensors.
        layers: in their order. end_bytes: of embeddings, head and all that is in no layer, in memory.
        far_ends: what that is where embeddings and head stay on the disk.
        slot_bytes: of a slot that any layer fits in. widening_bytes: scratch of products in 16 bits.
        vocabulary, head_parameters: of the logits, and numbers of the last matrix. width: of hidden states.
        context: most tokens of a text; None: no limit.
    """

    folder: Path
    name: str
    dtype: torch.dtype
    weights: str | None
    fingerprint: str
    layers: tuple[LayerSize, ...]
    end_bytes: int
    far_ends: FarEnds
    slot_bytes: int
    widening_bytes: int
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


def model_size(model: str | os.PathLike[str], weights: str | None = None) -> ModelSize:
    """Read the sizes of a model.

    Args:
        model: a folder with config.json and safetensors, a GGUF file, or a name of `millpond models`.
        weights: "int8" or "int4" for matrices in codes; None: as they were saved.

    Raises:
        OptionError: there is no such folder, or it holds no safetensors. DataError: a file is damaged, or does not fit
            the configuration. UnsupportedModelError: the layers are not built as Llama's, OPT's or GPT-NeoX's.
    """
    folder = Path(resolve(model))
    if not folder.is_dir():
        raise OptionError(
            f"{os.fspath(model)}: there is no such folder; a plan needs a model's folder with its config.json and "
            "safetensors, a GGUF file, or a name of 'millpond models'"
        )
    return size_of(folder, Skeleton.of(folder), weights)


def size_of(folder: Path, skeleton: Skeleton, weights: str | None = None) -> ModelSize:
    """The sizes of a model whose headers were read.

    Raises:
        UnsupportedModelError: see `model_size`.
    """
    profile = supported(skeleton.model)
    sizes = WeightSizes(skeleton, weights)
    far = sizes.ends_on_disk
    built: Any = skeleton.model
    head = built.get_output_embeddings()
    item = skeleton.dtype.itemsize
    return ModelSize(
        folder=folder,
        name=profile.name,
        dtype=skeleton.dtype,
        weights=weights,
        fingerprint=fingerprint(skeleton, weights),
        layers=tuple(
            _layer_size(layer, index, window, aligned_up(layout.nbytes), item)
            for index, (layer, window, layout) in enumerate(
                zip(skeleton.layers, profile.windows, sizes.layers, strict=True)
            )
        ),
        end_bytes=sizes.kept_bytes(()),
        far_ends=FarEnds(
            held_bytes=far.held_bytes,
            row_room_bytes=far.row_room_bytes,
            saved_bytes=far.saved_bytes,
            head_bytes=sum(tile.nbytes for tile in sizes.tiles),
            n_tiles=len(sizes.tiles),
        ),
        slot_bytes=sizes.slot_bytes,
        widening_bytes=2 * 4 * BLOCK if item < 4 or weights else 0,
        width=int(profile.config.hidden_size),
        vocabulary=profile.vocabulary,
        head_parameters=head.weight.numel(),
        context=profile.position_limit,
    )


def _layer_size(layer: nn.Module, index: int, window: int, n_bytes: int, item: int) -> LayerSize:
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
        row_bytes=item * (3 * width + max(sum(out), 2 * up + inner)) + 4 * max(width, inner),
    )


def fingerprint(skeleton: Skeleton, weights: str | None = None) -> str:
    """A hash of the class, of name, shape, dtype and place of each tensor, and of the format of its codes, by which a
    plan knows its model.
    """
    places: Sequence[Any] = [skeleton.ends, *skeleton.by_layer]
    marks = [
        (place.name, str(place.dtype), place.shape, place.path.name, place.offset)
        for part in places
        for place in part.values()
    ]
    found = [type(skeleton.model).__name__, *([weights] if weights else []), *sorted(marks)]
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()[:16]
