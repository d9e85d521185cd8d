"""Networks over hidden states that others released: KVzap's folders, and the gates of Fast KVzip.

Nothing of a file is executed: a folder holds safetensors, and a state dict is read with `weights_only`. The header of
a folder is checked against the model before numbers are read.
"""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from millpond.errors import CacheMismatchError, DataError
from millpond.policy.trained.gelu_score import GeluScore
from millpond.policy.trained.hidden_networks import HiddenNetwork
from millpond.policy.trained.linear_score import LinearScore
from millpond.policy.trained.sink_gate import SinkGate

#: Names of KVzap's sizes in its configuration.
_SIZES = ("input_dim", "output_dim", "n_modules")
#: Names of a gate's parts in its state dict, in the order of `SinkGate.PARTS`.
_GATE_PARTS = ("q_proj.weight", "q_proj.bias", "k_proj.weight", "q_norm.weight", "k_norm.weight", "k_base", "b")
#: What torch raises for files that are torn or made up.
_UNREADABLE = (OSError, RuntimeError, EOFError, ValueError, LookupError, TypeError, AttributeError, AssertionError)
#: Bytes of a configuration at most.
MAX_CONFIG_BYTES = 1 << 20


def imported(path: Path, shapes: Sequence[tuple[int, int]]) -> list[HiddenNetwork]:
    """Return the networks of a KVzap folder, or of a Fast KVzip file that ends in .pt.

    Args:
        path: The folder or file.
        shapes: Numbers of a hidden state and KV heads of each layer of the model.

    Raises:
        DataError: it cannot be read, is torn, or is something else.
        CacheMismatchError: it is of a model of another shape.
    """
    return list(_kvzap(path, shapes) if path.is_dir() else _fastkvzip(path, shapes))


def _kvzap(folder: Path, shapes: Sequence[tuple[int, int]]) -> list[HiddenNetwork]:
    """Return the networks of a folder with config.json and model.safetensors."""
    inputs, outputs, n, middle = _sizes_in(folder / "config.json")
    if len(shapes) != n or any(shape != (inputs, outputs) for shape in shapes):
        raise CacheMismatchError(
            f"{str(folder)!r} has {n} networks from {inputs} numbers to {outputs} KV heads, and this model has "
            f"{len(shapes)} layers of {shapes[0][0]} numbers and {shapes[0][1]} KV heads: take those of this model"
        )
    linear = {"weight": [outputs, inputs], "bias": [outputs]}
    if middle is not None:
        linear = {"0.weight": [middle, inputs], "0.bias": [middle], "2.weight": [outputs, middle], "2.bias": [outputs]}
    file = folder / "model.safetensors"
    try:
        with safe_open(str(file), "pt") as stored:
            names = list(stored.keys())
            starts = {name.partition(".")[0] for name in names}
            start = starts.pop() if len(starts) == 1 else ""
            expected = {f"{start}.{i}.{part}": shape for i in range(n) for part, shape in linear.items()}
            if set(names) != set(expected):
                raise DataError(f"{str(file)!r} holds {len(names)} tensors that do not make {n} networks")
            for name, shape in expected.items():
                if stored.get_slice(name).get_shape() != shape:
                    raise DataError(f"{str(file)!r}: {name} is {stored.get_slice(name).get_shape()}, not {shape}")
            parts = [[stored.get_tensor(f"{start}.{i}.{part}").float() for part in linear] for i in range(n)]
    except (OSError, SafetensorError) as error:
        raise DataError(f"{str(file)!r} cannot be read as safetensors: {error}; copy it again") from None
    _check_finite(str(file), parts)
    return [LinearScore(*layer) if middle is None else GeluScore(*layer) for layer in parts]


def _sizes_in(file: Path) -> tuple[int, int, int, int | None]:
    """Return input_dim, output_dim, n_modules and hidden_dim of a configuration."""
    try:
        if file.stat().st_size > MAX_CONFIG_BYTES:
            raise ValueError(f"it has more than {MAX_CONFIG_BYTES:,} bytes")
        config: Any = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(config, dict) or config.get("model_type") != "kvzap":
            raise ValueError("its model_type is not 'kvzap'")
        sizes = [config.get(name) for name in _SIZES]
        middle = config.get("hidden_dim")
        for size in (*sizes, *([] if middle is None else [middle])):
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"a size of it is {size!r}")
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{str(file)!r} is no configuration of KVzap networks: {error}") from None
    return sizes[0], sizes[1], sizes[2], middle  # type: ignore[return-value]


def _fastkvzip(file: Path, shapes: Sequence[tuple[int, int]]) -> list[HiddenNetwork]:
    """Return the gates of a file of torch: state dicts, under "module" or alone."""
    try:
        if not zipfile.is_zipfile(file):  # older files are pickles from end to end
            raise ValueError("it is no zip, as torch.save writes it")
        stored: Any = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (*_UNREADABLE, pickle.UnpicklingError) as error:
        told = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise DataError(f"{str(file)!r} cannot be read as weights alone, and nothing else of it is: {told}") from None
    layers = stored.get("module") if isinstance(stored, Mapping) else stored
    if not isinstance(layers, list) or not all(isinstance(layer, Mapping) for layer in layers):
        raise DataError(f"{str(file)!r} holds no list of state dicts, one per layer")
    if len(layers) != len(shapes):
        raise CacheMismatchError(f"{str(file)!r} has {len(layers)} gates, and this model has {len(shapes)} layers")
    return [_gate(str(file), i, layer, shape) for i, (layer, shape) in enumerate(zip(layers, shapes, strict=True))]


def _gate(file: str, layer: int, state: Mapping[str, Any], shape: tuple[int, int]) -> SinkGate:
    """Return the gate of one state dict."""
    if set(state) != set(_GATE_PARTS) or not all(isinstance(part, Tensor) for part in state.values()):
        raise DataError(
            f"{file!r}: gate {layer} has the parts {sorted(map(str, state))[:9]}, not {sorted(_GATE_PARTS)}"
        )
    if not all(part.ndim and part.numel() for part in state.values()):
        raise DataError(f"{file!r}: gate {layer} has a part without numbers, or of a single one; copy it again")
    (inputs, n_heads), group, d = shape, state["b"].shape[-1], state["q_norm.weight"].shape[-1]
    expected = {
        "q_proj.weight": (n_heads * group * d, inputs),
        "q_proj.bias": (n_heads * group * d,),
        "k_proj.weight": (n_heads * d, inputs),
        "q_norm.weight": (d,),
        "k_norm.weight": (d,),
        "k_base": (n_heads, 1, state["k_base"].numel() // (n_heads * d), d),
        "b": (n_heads, 1, group),
    }
    for name, right in expected.items():
        if tuple(state[name].shape) != right:
            raise CacheMismatchError(
                f"{file!r}: {name} of gate {layer} is {tuple(state[name].shape)}, and this model needs {right}: take "
                "the gates of this model"
            )
    wq, bq, wk, q_norm, k_norm, sinks, bias = parts = [state[name].float().contiguous() for name in _GATE_PARTS]
    _check_finite(file, [parts])
    return SinkGate(wq, bq, wk, q_norm, k_norm, sinks[:, 0], bias[:, 0])


def _check_finite(file: str, layers: Sequence[Sequence[Tensor]]) -> None:
    for layer in layers:
        if not all(bool(torch.isfinite(part).all()) for part in layer):
            raise DataError(f"{file!r} has numbers that are not finite; copy it again")
