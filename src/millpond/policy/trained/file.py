"""Files of trained networks: safetensors, checked from the header before anything is allocated."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Collection, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from millpond.errors import DataError
from millpond.policy.trained.adapter import Adapter, LowRank
from millpond.policy.trained.hidden_networks import HiddenNetworks
from millpond.policy.trained.kinds import GATE, OVER_HIDDEN, RETAIN, NetworkKind, kind_of_network
from millpond.policy.trained.networks import ATTENTION, Gates, LayerGate, LayerHeads, RetainingHeads

#: Format of files, and of those of gates with an adapter.
FORMAT, FORMAT_ADAPTED = "millpond heads 1", "millpond heads 2"
#: Name of a projection in a file of an adapter.
_PROJECTION = re.compile(r"[a-z][a-z0-9_]{0,63}")
#: Bytes of a header at most.
MAX_HEADER_BYTES = 1 << 24
#: Numbers of a file are of these types; weights in half the bytes.
_BYTES = {"F32": 4, "BF16": 2}


def save_heads(heads: RetainingHeads | Gates | HiddenNetworks, path: str | os.PathLike[str]) -> None:
    """Write the file of trained networks; a crash while writing leaves an older file whole.

    Weights are in bfloat16, parts that are `NetworkKind.exact` in float32.

    Raises:
        DataError: it cannot be written.
    """
    kind = _kind_of(heads)
    tensors: dict[str, Tensor] = {}
    for index, layer in enumerate(heads.layers):
        for part in kind.parts:
            stored: Tensor = getattr(layer, part).detach().cpu()
            dtype = torch.float32 if part in kind.exact else torch.bfloat16
            tensors[f"{index}.{part}"] = stored.to(dtype).contiguous()
    adapter = heads.adapter if isinstance(heads, Gates) else None
    if adapter is not None:
        tensors |= {name: part.detach().cpu().bfloat16().contiguous() for name, part in adapter.parts()}
    about = {
        "format": FORMAT if adapter is None else FORMAT_ADAPTED,
        "kind": kind.name,
        "model": heads.model,
        "name": heads.name,
        "layers": str(len(heads.layers)),
        "facts": json.dumps(dict(heads.facts)),
    }
    file = Path(path)
    fresh = file.with_name(file.name + ".new")
    try:
        fresh.write_bytes(_in_order(save(tensors, about)))
        fresh.replace(file)
    except OSError as error:
        raise DataError(f"{os.fspath(path)!r} cannot be written: {error}") from error


def _kind_of(networks: RetainingHeads | Gates | HiddenNetworks) -> NetworkKind:
    if isinstance(networks, HiddenNetworks):
        return kind_of_network(networks.layers[0])
    return GATE if isinstance(networks, Gates) else RETAIN


def _in_order(content: bytes) -> bytes:
    """Return a safetensors file with its header sorted, so that equal heads make equal files."""
    length = int.from_bytes(content[:8], "little")
    header = json.dumps(json.loads(content[8 : 8 + length]), sort_keys=True, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + content[8 + length :]


def heads_of(content: bytes, name: str) -> RetainingHeads:
    """Return the retaining heads in the bytes of a file called `name`.

    Raises:
        DataError: torn, foreign, of another kind, or with shapes that do not fit one another.
    """
    layers, _, about = _read(content, name, RETAIN)
    return RetainingHeads([LayerHeads(*parts) for parts in layers], **about)


def gates_of(content: bytes, name: str) -> Gates:
    """Return the gates in the bytes of a file called `name`.

    Raises:
        DataError: torn, foreign, of another kind, or with shapes that do not fit one another.
    """
    layers, adapter, about = _read(content, name, GATE)
    attention = about["facts"].get(ATTENTION, "causal")
    if attention not in ("causal", "global"):
        raise DataError(
            f"{name!r} is broken: the attention of its gates is {attention!r:.60}, neither causal nor global; train "
            f"the gates again with {GATE.command}"
        )
    named = [dict(zip(LayerGate.PARTS, parts, strict=True)) for parts in layers]
    return Gates([LayerGate(**parts, causal=attention == "causal") for parts in named], adapter=adapter, **about)


def hidden_networks_of(
    content: bytes, name: str, kinds: Collection[NetworkKind] = tuple(OVER_HIDDEN)
) -> HiddenNetworks:
    """Return the networks over hidden states in a file, of one of some kinds.

    Raises:
        DataError: torn, foreign, of another kind, or with shapes that do not fit one another.
    """
    given = _about(_header(content, name), name)["kind"]
    kind = next((kind for kind in kinds if kind.name == given), None)
    if kind is None:
        raise DataError(
            f"{name!r} holds networks of the kind {given!r:.60}, and this method takes "
            f"{' or '.join(repr(one.name) for one in kinds)}: name a file of {next(iter(kinds)).command}"
        )
    layers, _, about = _read(content, name, kind)
    return HiddenNetworks([OVER_HIDDEN[kind](*parts) for parts in layers], **about)


def about_file(path: str | os.PathLike[str]) -> Mapping[str, str]:
    """Return the facts in the header of a file of any kind.

    They are format, kind, model, name, layers and facts.

    Raises:
        DataError: it cannot be read, or has no header of such a file.
    """
    name = os.fspath(path)
    try:
        with open(name, "rb") as file:
            start = file.read(8)
            length = min(int.from_bytes(start, "little"), MAX_HEADER_BYTES)
            header = file.read(length)
    except OSError as error:
        raise DataError(f"{name!r} cannot be read: {error}") from None
    return _about(_header(start + header, name), name)


def _read(content: bytes, name: str, kind: NetworkKind) -> tuple[list[list[Tensor]], Adapter | None, dict[str, Any]]:
    """Return the parts of each layer in the kind's order, the adapter, and the metadata."""
    about = _checked_header(content, name, kind)
    try:
        tensors = load(content)
        layers = [[tensors[f"{i}.{part}"] for part in kind.parts] for i in range(int(about["layers"]))]
        adapter = _adapter_in(tensors, len(layers))
        facts = json.loads(about["facts"])
        if not isinstance(facts, dict):
            raise ValueError(f"facts are a {type(facts).__name__}")
    except (SafetensorError, KeyError, ValueError) as error:
        raise _broken(name, kind, error) from None
    added = [[]] * len(layers) if adapter is None else [list(chain(*layer.values())) for layer in adapter.layers]
    for index, parts in enumerate(layers):
        if not all(bool(torch.isfinite(part.float()).all()) for part in (*parts, *added[index])):
            raise DataError(f"{name!r}: layer {index} has numbers that are not finite; train the {kind.things} again")
    return layers, adapter, {"model": about["model"], "name": about["name"], "facts": facts}


def _adapter_in(tensors: Mapping[str, Tensor], n_layers: int) -> Adapter | None:
    """Return the adapter among tensors whose header was checked; None if there is none."""
    layers: list[dict[str, LowRank]] = [{} for _ in range(n_layers)]
    for key in tensors:
        number, _, rest = key.partition(".lora.")
        projection, _, part = rest.partition(".")
        if part == "a":
            layers[int(number)][projection] = LowRank(tensors[key], tensors[f"{number}.lora.{projection}.b"])
    return Adapter(layers) if any(layers) else None


def _broken(name: str, kind: NetworkKind, error: Exception) -> DataError:
    return DataError(f"{name!r} is broken: {error!r}; train the {kind.things} again with {kind.command}")


def _header(content: bytes, name: str) -> dict[str, Any]:
    """Return the header of a safetensors file, whose tensors may be missing."""
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 or length > min(MAX_HEADER_BYTES, len(content) - 8):
        raise DataError(f"{name!r} is torn or no safetensors file: it ends inside its header; copy it again")
    try:
        header = json.loads(content[8 : 8 + length])
    except (ValueError, RecursionError):
        raise DataError(f"{name!r} is no safetensors file: its header is no JSON") from None
    if not isinstance(header, dict):
        raise DataError(f"{name!r} is no safetensors file: its header is no JSON object")
    return header


def _about(header: dict[str, Any], name: str, kind: NetworkKind | None = None) -> dict[str, str]:
    """Return the metadata of a header, of this format and kind; None: of any kind."""
    about = header.get("__metadata__")
    about = about if isinstance(about, dict) else {}
    expected_kind = kind or RETAIN
    formats = (FORMAT, FORMAT_ADAPTED) if kind is None or kind is GATE else (FORMAT,)
    if about.get("format") not in formats:
        raise DataError(
            f"{name!r} holds no heads of this Millpond: its format is {about.get('format')!r}, not {FORMAT!r}; train "
            f"them with {expected_kind.command}"
        )
    if kind is not None and about.get("kind") != kind.name:
        raise DataError(
            f"{name!r} holds heads of the kind {about.get('kind')!r}, and this method takes {kind.name!r}: name a file "
            f"of {kind.command}"
        )
    if not all(isinstance(about.get(key), str) for key in ("kind", "model", "name", "layers", "facts")):
        raise DataError(f"{name!r} is broken: its header lacks model, name, layers or facts; train the heads again")
    return about


def _checked_header(content: bytes, name: str, kind: NetworkKind) -> dict[str, str]:
    """Return the metadata of a complete file, whose shapes fit one another."""
    header = _header(content, name)
    about = _about(header, name, kind)
    try:
        n_layers = int(about["layers"])
        entries = {key: value for key, value in header.items() if key != "__metadata__"}
        adapted = about["format"] == FORMAT_ADAPTED
        own = {f"{i}.{part}" for i in range(min(n_layers, len(entries))) for part in kind.parts}
        if not 1 <= n_layers <= len(entries) or not own <= set(entries) or (set(entries) != own) != adapted:
            raise ValueError(f"{len(entries)} tensors do not make {n_layers} layers")
        if adapted:
            _check_adapter({key: entry for key, entry in entries.items() if key not in own}, n_layers)
        size = 0
        for i in range(n_layers):
            shapes = {part: list(entries[f"{i}.{part}"]["shape"]) for part in kind.parts}
            if shapes != kind.fitting(shapes) or min(min(shape) for shape in shapes.values()) < 1:
                raise ValueError(f"layer {i} has shapes {shapes}")
        for entry in entries.values():
            begin, end = entry["data_offsets"]
            if end - begin != math.prod(entry["shape"]) * _BYTES[entry["dtype"]]:
                raise ValueError("a tensor of another size than its shape says")
            size = max(size, end)
    except (KeyError, TypeError, ValueError) as error:
        raise _broken(name, kind, error) from None
    num_bytes = len(content) - 8 - int.from_bytes(content[:8], "little")
    if num_bytes != size:
        raise DataError(f"{name!r} is torn: it holds {num_bytes:,} of {size:,} bytes of numbers; copy it again")
    return about


def _check_adapter(entries: Mapping[str, Any], n_layers: int) -> None:
    """Check that every layer of an adapter has the same projections, all of one rank.

    Raises:
        ValueError: they are others.
        KeyError: a projection has half of its matrices.
        TypeError: a shape is no list of numbers.
    """
    names = sorted({key.split(".")[2] for key in entries if key.count(".") == 3})
    if not all(map(_PROJECTION.fullmatch, names)):
        raise ValueError("an adapter of projections that no model has")
    if set(entries) != {f"{i}.lora.{name}.{part}" for i in range(n_layers) for name in names for part in "ab"}:
        raise ValueError(f"{len(entries)} matrices do not make an adapter of {n_layers} layers")
    ranks = set()
    for i in range(n_layers):
        for name in names:
            (rank, inputs), (outputs, other) = (entries[f"{i}.lora.{name}.{part}"]["shape"] for part in "ab")
            if rank != other or min(rank, inputs, outputs) < 1:
                raise ValueError(f"{name} of layer {i} has matrices of the ranks {rank} and {other}")
            ranks.add(rank)
    if len(ranks) != 1:
        raise ValueError("an adapter of several ranks")
