"""Description of a transformers model as a `Decoder`, and early release of mapped file pages."""

from __future__ import annotations

import ctypes
import mmap
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from millpond.errors import UnsupportedModelError
from millpond.kernels.decoder_ops import Projection
from millpond.kernels.quantized_weight import Weight
from millpond.models.lean.block import Block
from millpond.models.lean.decoder import BlockSource, Decoder, HeadSource, StreamedBlocks
from millpond.models.lean.fuse import Room, fusable, own, together
from millpond.models.lean.layers import block_of, norm_of
from millpond.models.lean.watch import Watch

_MAPS, _SMAPS = Path("/proc/self/maps"), Path("/proc/self/smaps")
_HEADER = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ (\d+) ")
_STRIDE = 2**22  #: Bytes that are copied at a time.
_DONT_NEED = 4  #: MADV_DONTNEED of Linux: pages of a file that were not written to are read again on demand


class Mapped:
    """Memory of this process that shows files it has not written to, as it is now (Linux).

    Args:
        weights: Weights that may move. If none is in a file, no pages are counted: the kernel walks over all memory.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        self._ranges = _joined(_untouched()) if in_file(weights) else []

    def copy(self, old: Tensor, new: Tensor) -> Tensor:
        """Copy a weight, and return `new`.

        Copied pages of a file leave memory before the rest is read.
        """
        for part, place in zip(torch.split(old, _rows(old)), torch.split(new, _rows(old)), strict=True):
            place.copy_(part)
            self._release(part)
        return new

    @contextmanager
    def moving(self, weights: Iterable[Tensor]) -> Iterator[None]:
        """Release file pages of weights that move in the block; other readers still see them."""
        weights = list(weights)
        before = [weight.detach() for weight in weights]  # holds the memory, so that its addresses are not reused
        yield
        for weight, old in zip(weights, before, strict=True):
            if weight.data_ptr() != old.data_ptr():
                self._release(old)

    def _release(self, old: Tensor) -> None:
        if old.is_cpu and old.is_contiguous():
            self._let_go(old.data_ptr(), old.data_ptr() + old.nbytes)

    def _let_go(self, begin: int, end: int) -> None:
        page = mmap.PAGESIZE
        first, last = -(-begin // page) * page, end // page * page
        if first < last and any(low <= first and last <= high for low, high in self._ranges):
            ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _DONT_NEED)


def _rows(matrix: Tensor) -> int:
    """Return rows that are copied at a time."""
    return max(1, _STRIDE // max(1, matrix[:1].nbytes))


def in_file(weights: Iterable[Tensor]) -> bool:
    """Whether one of the weights is in a mapped file; never but on Linux."""
    try:
        headers = [_HEADER.match(line) for line in _MAPS.read_text().splitlines()]
    except OSError:
        return False
    files = [(int(header[1], 16), int(header[2], 16)) for header in headers if header is not None and header[3] != "0"]
    begins = [begin for begin, _ in files]  # they ascend
    for weight in weights:
        place = bisect_right(begins, weight.data_ptr()) - 1
        if weight.is_cpu and place >= 0 and weight.data_ptr() < files[place][1]:
            return True
    return False


def _joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ascending ranges with neighbours joined: advice splits the mapping of a file."""
    joined: list[tuple[int, int]] = []
    for begin, end in ranges:
        if joined and joined[-1][1] == begin:
            begin, _ = joined.pop()
        joined.append((begin, end))
    return joined


def _untouched() -> Iterator[tuple[int, int]]:
    """Return addresses (begin, end) of mapped files of which no page was written to."""
    try:
        lines = _SMAPS.read_text().splitlines()
    except OSError:
        return
    place: tuple[int, int] | None = None
    for line in lines:
        header = _HEADER.match(line)
        if header is not None:
            place = (int(header[1], 16), int(header[2], 16)) if header[3] != "0" else None
        elif place is not None and line.startswith("Anonymous:") and line.split()[1] == "0":
            yield place


_LLAMA = {"embed_tokens", "layers", "norm", "rotary_emb"}
_NEOX = {"embed_in", "layers", "final_layer_norm", "rotary_emb"}
_OPT = {"embed_tokens", "embed_positions", "layers"}
_OPT_MAY_HAVE = {"project_in", "project_out", "final_layer_norm"}
#: Modules that do nothing to a model that does not train.
_SILENT = {"emb_dropout"}


@dataclass(frozen=True, slots=True)
class Described:
    """Model without its modules.

    Attributes:
        decoder: Decoder that runs it.
        watch: Tells whether the modules are still what they were.
        layers: Modules of the layers.
    """

    decoder: Decoder
    watch: Watch
    layers: tuple[nn.Module, ...]


def describe(model: PreTrainedModel, streamed: StreamedBlocks | None = None, *, move: bool = True) -> Described:
    """Read the parts of a model, and move its weights, see `moving`.

    The caller must try out that the decoder computes what the model does.

    Args:
        model: Model of transformers.
        streamed: Its layers if their weights are streamed; no weight is moved then.
        move: False to move no weight.

    Raises:
        UnsupportedModelError: the model, or its language side, is not built as Llama, Mistral, Qwen2, Qwen3, OPT or
            GPT-NeoX; it is unchanged.
    """
    untyped: Any = model
    base = _language_side(model)
    base = getattr(base, "decoder", base)
    head = untyped.get_output_embeddings()
    parts = {model.base_model_prefix, "lm_head"}
    if type(head) is not nn.Linear or {name for name, _ in model.named_children()} != parts:
        raise UnsupportedModelError(f"{type(model).__name__} has more than a decoder and one linear layer behind it")
    ends = _ends(base)
    blocks: BlockSource = tuple(block_of(layer, fusable) for layer in base.layers)
    matrix: Weight | HeadSource = head.weight
    if streamed is None:
        _check_weights(model)
    else:
        blocks = tuple(streamed) if streamed.resident else streamed
        matrix = matrix if streamed.head is None else streamed.head
        ends["tokens"] = ends["tokens"] if streamed.tokens is None else streamed.tokens
    decoder = Decoder(blocks=blocks, head=(matrix, head.bias), **ends)
    layers = tuple(base.layers)
    if streamed is None and move:
        *_, decoder = moving(model, decoder, layers)
    return Described(decoder, watch(model, layers), layers)


def _language_side(model: nn.Module) -> Any:
    """Return the part of a model in front of its head that reads text."""
    base = getattr(model, "base_model", model)
    return getattr(base, "language_model", base)


def _bypassed(model: nn.Module) -> list[nn.Module]:
    """Return the modules that no pass calls.

    These are all but those of an image side, which runs by itself.
    """
    side, base = _language_side(model), getattr(model, "base_model", model)
    if side is base:
        return list(model.modules())
    return [*side.modules(), *(module for module in model.children() if module is not base)]


def watch(model: nn.Module, layers: Sequence[nn.Module]) -> Watch:
    """Return a watch of the modules of a model with these layers.

    The model's own settings and those of its rotary embedding change as it runs.
    """
    return Watch(_bypassed(model), settings=[module for layer in layers for module in layer.modules()])


def moving(model: nn.Module, decoder: Decoder, layers: Sequence[nn.Module]) -> Iterator[Decoder]:
    """Move the weights of a model into memory of their own, fused if they read the same rows.

    First those outside of the layers, which are largest, and then a layer each time. Embeddings of which no pass reads
    more than a few rows stay where they are: those which no text names need not be in memory.

    Args:
        model: Model of transformers.
        decoder: Its description.
        layers: Modules of its layers.

    Yields:
        The decoder with what has moved so far.
    """
    blocks = tuple(decoder.blocks)
    rows_only = decoder.tokens if decoder.tokens is not decoder.head[0] else None
    inside = {id(module) for layer in layers for module in layer.modules()}
    outside = [module for module in _bypassed(model) if id(module) not in inside]
    mapped = Mapped(weight for weight in model.parameters() if weight is not rows_only)
    own(outside, but=[rows_only] if isinstance(rows_only, Tensor) else [], copy=mapped.copy)
    yield decoder
    for n, layer in enumerate(layers):
        blocks = (*blocks[:n], _moved_layer(layer, blocks[n], mapped), *blocks[n + 1 :])
        decoder = replace(decoder, blocks=blocks)
        yield decoder


def _moved_layer(layer: nn.Module, block: Block, mapped: Mapped) -> Block:
    weights = list(layer.parameters())
    room = Room(weight for weight in weights if weight.ndim > 1)
    with mapped.moving(weights):
        own(layer.modules(), but=[*_several(block.qkv), *_several(block.up)], room=room)
        return block_of(layer, partial(together, room=room))


def _several(taken: Projection) -> list[Tensor]:
    """Return the weights of a projection of several parts, biases too."""
    return [weight for part in taken.parts for weight in part if isinstance(weight, Tensor) and len(taken.parts) > 1]


def _ends(base: Any) -> dict[str, Any]:
    """Return the modules before and after the layers."""
    names = {name for name, _ in base.named_children()} - _SILENT
    if names == _LLAMA:
        return {"tokens": base.embed_tokens.weight, "rotary": base.rotary_emb, "norm": norm_of(base.norm)}
    if names == _NEOX:
        return {"tokens": base.embed_in.weight, "rotary": base.rotary_emb, "norm": norm_of(base.final_layer_norm)}
    if names - _OPT_MAY_HAVE == _OPT:
        return {
            "tokens": base.embed_tokens.weight,
            "positions": base.embed_positions.weight,
            "offset": int(base.embed_positions.offset),
            "project_in": _weight(base.project_in),
            "project_out": _weight(base.project_out),
            "norm": None if base.final_layer_norm is None else norm_of(base.final_layer_norm),
        }
    raise UnsupportedModelError(f"{type(base).__name__} has parts of its own: {', '.join(sorted(names))}")


def _weight(module: nn.Linear | None) -> Tensor | None:
    return None if module is None else module.weight


def _check_weights(model: nn.Module) -> None:
    """Check that the weights are loaded, of one dtype and device, and not shared by layers.

    Raises:
        UnsupportedModelError: the weights are of several dtypes or devices, are not loaded, or layers share them.
    """
    weights = [w for layer in model.modules() if isinstance(layer, nn.Linear) for w in layer._parameters.values()]
    kinds = {(w.dtype, w.device) for w in model.parameters()}
    if len(kinds) != 1 or next(iter(kinds))[1].type == "meta":
        raise UnsupportedModelError("the weights are of several dtypes or devices, or not loaded")
    if max(Counter(id(w) for w in weights if w is not None).values()) > 1:
        raise UnsupportedModelError("layers share their weights")
