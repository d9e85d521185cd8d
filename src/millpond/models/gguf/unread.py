"""Parts of a GGUF file that transformers does not read: a model without them would answer, and answer wrongly."""

from __future__ import annotations

import math
from contextlib import suppress
from importlib import import_module
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from millpond.models.gguf.header import GGUFHeader
from millpond.models.gguf.rope import RopeTensors, rotated

#: Keys of a file, and the names that configurations have for the same number.
_SAME = {
    "attention.sliding_window": ("sliding_window",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps", "layer_norm_epsilon"),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "norm_epsilon", "norm_eps", "layer_norm_epsilon"),
}
#: Those of them that say how large a model is; 0 counts.
_SIZES = {
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
    "attention.shared_kv_layers": "num_kv_shared_layers",
}
#: Tensors that models of transformers compute themselves.
_COMPUTED = ("rope.freqs", "attn_rot_embd")


def unread_metadata(header: GGUFHeader, config: PreTrainedConfig) -> list[str]:
    """Numbers that the configuration lacks or has otherwise, each as a phrase; empty where it has all of them.

    Args:
        config: what transformers made of the metadata, with what `take_rope` added.
    """
    return [*_numbers(header, config), *_rope(header, config)]


def _numbers(header: GGUFHeader, config: PreTrainedConfig) -> list[str]:
    found = []
    for key, names in _SAME.items():
        value = header.metadata.get(f"{header.architecture}.{key}")
        known = [getattr(config, name) for name in names if hasattr(config, name)]
        if isinstance(value, (int, float)) and value and known and not any(_close(value, ours) for ours in known):
            found.append(f"{key} = {value:.6g} (it takes {known[0]})")
    for key, name in _SIZES.items():
        value = header.metadata.get(f"{header.architecture}.{key}")
        if isinstance(value, int) and hasattr(config, name) and getattr(config, name) != value:
            found.append(f"{key} = {value} (it takes {getattr(config, name)})")
    return found


def _rope(header: GGUFHeader, config: PreTrainedConfig) -> list[str]:
    """Base and scaling of the rotary positions."""
    own = getattr(config, "rope_parameters", None) or {}
    kinds = [value for value in own.values() if isinstance(value, dict)] or [own]
    base = header.metadata.get(f"{header.architecture}.rope.freq_base")
    scaling = header.metadata.get(f"{header.architecture}.rope.scaling.type", "none")
    count = header.metadata.get(f"{header.architecture}.rope.dimension_count")
    bases = [kind["rope_theta"] for kind in kinds if "rope_theta" in kind]
    found = []
    if isinstance(base, (int, float)) and bases and not any(_close(base, ours) for ours in bases):
        found.append(f"rope.freq_base = {base:.6g} (it takes {bases[0]:.6g})")
    if isinstance(count, int) and count and "rope_theta" in own and count != rotated(config):
        found.append(f"rope.dimension_count = {count} (it rotates {rotated(config)} numbers of each head)")
    if scaling != "none" and all(kind.get("rope_type", "default") == "default" for kind in kinds):
        factor = header.metadata.get(f"{header.architecture}.rope.scaling.factor", 0)
        if factor != 1:
            found.append(f"rope.scaling.type = {scaling} (it takes positions that are not scaled)")
    return found


def unread_tensors(header: GGUFHeader, config: PreTrainedConfig, model: nn.Module, rope: RopeTensors) -> list[str]:
    """Tensors without a place in a model, as one phrase; empty where each has one.

    Of architectures that transformers maps by rules of their own, only loading tells (`unplaced`).

    Args:
        model: of that configuration; its tensors may be on meta. rope: tensors that `take_rope` read or refused.
    """
    legacy: Any = import_module("transformers.modeling_gguf_pytorch_utils")
    with suppress(ImportError, AttributeError):  # older versions have one list only
        if header.architecture in import_module("transformers.integrations.gguf").GGUF_CONFIG_ARCHS:
            return []
    try:
        kind = legacy.TENSOR_PROCESSORS.get(header.architecture, legacy.TensorProcessor)
        places = {*legacy.get_gguf_hf_weights_map(model, kind(config=config.to_dict())), "output.weight"}
    except (AttributeError, NotImplementedError):  # another version, or one that says so when it loads
        return []
    places |= {*rope.names}
    names = [
        tensor.name
        for tensor in header.tensors
        if tensor.name not in places
        and tensor.name.removesuffix(".weight") not in places
        and not any(part in tensor.name for part in _COMPUTED)
    ]
    return unplaced(names)


def unplaced(names: list[str]) -> list[str]:
    """A phrase about tensors that have no place in a model; none of no names."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return [f"the tensors {', '.join(names[:3])}{more}"] if names else []


def _close(value: float, ours: object) -> bool:
    return isinstance(ours, (int, float)) and math.isclose(value, ours, rel_tol=1e-5)
