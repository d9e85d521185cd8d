"""Tiny GGUF files of every architecture that transformers reads, named and shaped as llama.cpp's package maps them."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFWriter
from transformers import AutoConfig, AutoModelForCausalLM

from tests.helpers.gguf.files import add_tokenizer

_SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 512,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
#: llama.cpp's name -> model type and configuration in transformers.
TYPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _SMALL),
    "qwen2": ("qwen2", _SMALL),
    "qwen3": ("qwen3", _SMALL | {"head_dim": 128}),
    "phi3": ("phi3", _SMALL | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}),
    "gemma2": ("gemma2", _SMALL | {"head_dim": 32, "sliding_window": 16}),
    "gemma3": ("gemma3_text", _SMALL | {"head_dim": 32, "sliding_window": 16}),
    "starcoder2": ("starcoder2", _SMALL),
    "stablelm": ("stablelm", _SMALL),
    "nemotron": ("nemotron", _SMALL),
    "falcon": (
        "falcon",
        {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 300, "multi_query": True},
    ),
    "gpt2": ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 300, "n_positions": 1024}),
    "bloom": ("bloom", {"hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 300}),
    "qwen2moe": ("qwen2_moe", _SMALL | _EXPERTS),
    "qwen3moe": ("qwen3_moe", _SMALL | _EXPERTS | {"head_dim": 32, "norm_topk_prob": True}),
}


def write_architecture(
    path: Path,
    name: str,
    *,
    seed: int = 0,
    called: str = "tiny",
    also: dict[str, Any] | None = None,
    more: dict[str, tuple[int, ...] | np.ndarray] | None = None,
    options: dict[str, Any] | None = None,
    tokenizer: str = "gpt2",
) -> Any:
    """Write a model of random float32 weights; returns the configuration that it was written of.

    Args:
        called: the name of the model in the file. also: metadata added to that of the architecture.
        more: tensors that the model does not have, or their shapes. options: of the configuration, in place of those
            of `TYPES`. tokenizer: its kind, as for `add_tokenizer`.
    """
    legacy = import_module("transformers.modeling_gguf_pytorch_utils")
    kind, usual = TYPES[name]
    config = AutoConfig.for_model(kind, **usual | (options or {}))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    rng = np.random.default_rng(seed)
    writer = GGUFWriter(str(path), name)
    writer.add_name(called)
    _metadata(writer, name, legacy, kind, config, also or {})
    add_tokenizer(writer, tokenizer)
    processor = legacy.TENSOR_PROCESSORS.get(name, legacy.TensorProcessor)(config=config.to_dict())
    names, state = legacy.get_gguf_hf_weights_map(model, processor), model.state_dict()
    for full, theirs in names.items():
        if full != "output.weight" or not config.tie_word_embeddings:
            writer.add_tensor(full if "." in full[-8:] else f"{full}.weight", _values(full, theirs, state, name, rng))
    for full, given in (more or {}).items():
        writer.add_tensor(full, given if isinstance(given, np.ndarray) else np.full(given, 2, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return config


def _values(full: str, theirs: str, state: dict[str, Any], name: str, rng: np.random.Generator) -> np.ndarray:
    found = state[theirs] if theirs in state else state[theirs + ".weight"]
    shape = tuple(found.shape)
    if "ffn_gate_exps" in full or "ffn_up_exps" in full:
        shape = (shape[0], shape[1] // 2, shape[2])
    if "ffn_gate_inp_shexp" in full:
        shape = shape[1:]
    if name == "gpt2" and any(part in full for part in ("attn_qkv.w", "ffn_down.w", "ffn_up.w", "attn_output.w")):
        shape = shape[::-1]
    values = 0.05 * rng.standard_normal(shape)
    return (values + ("norm" in full and full.endswith("weight"))).astype(np.float32)


def _metadata(writer: GGUFWriter, name: str, legacy: Any, kind: str, config: Any, also: dict[str, Any]) -> None:
    mapping = legacy.GGUF_TO_TRANSFORMERS_MAPPING["config"]
    known = mapping.get(name) or mapping.get(kind) or mapping[kind.removesuffix("_text")]
    values = {key: getattr(config, ours, None) for key, ours in known.items() if ours}
    values["rope.freq_base"] = _theta(config)
    for key, value in (values | also).items():
        if isinstance(value, str):
            writer.add_string(f"{name}.{key}", value)
        elif isinstance(value, float):
            writer.add_float32(f"{name}.{key}", value)
        elif value is not None:
            writer.add_uint32(f"{name}.{key}", value)


def _theta(config: Any) -> float | None:
    rope = getattr(config, "rope_parameters", None) or {}
    return rope.get("rope_theta") or (rope.get("full_attention") or {}).get("rope_theta")
