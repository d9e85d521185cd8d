"""Known models written to GGUF by the rules of llama.cpp's converter, for architectures with rules of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.helpers.gguf.files import VOCAB, add_tokenizer

_SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "bos_token_id": VOCAB - 1,
    "eos_token_id": VOCAB - 1,
    "pad_token_id": VOCAB - 1,
    "tie_word_embeddings": False,
}
_LINEAR = {
    "head_dim": 32,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
#: llama.cpp's name -> model type and configuration in transformers.
KNOWN: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": ("lfm2", _SMALL | {"layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False}),
    "mamba": (
        "mamba",
        {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "vocab_size": VOCAB,
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": False,
        },
    ),
    "qwen35": ("qwen3_5_text", _SMALL | _LINEAR),
    "qwen35moe": ("qwen3_5_moe_text", _SMALL | _LINEAR | _EXPERTS),
    "minimax-m2": (
        "minimax_m2",
        _SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "rotary_dim": 8},
    ),
    "gpt-oss": ("gpt_oss", _SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}),
    "gemma4": (
        "gemma4_text",
        _SMALL
        | {
            "num_hidden_layers": 6,
            "head_dim": 256,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 0,
            "sliding_window": 16,
            "tie_word_embeddings": True,
        },
    ),
}


def known_model(name: str, **options: Any) -> PreTrainedModel:
    """A model of random float32 weights, norms and scalars among them."""
    kind, usual = KNOWN[name]
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **usual | options)).eval()
    with torch.no_grad():
        for full, value in model.state_dict().items():
            if value.dim() < 2 and "A_log" not in full:
                value.add_(0.1 * torch.randn(value.shape))
    return model


def write_known(path: Path, name: str, model: PreTrainedModel, more: dict[str, torch.Tensor] | None = None) -> None:
    """Write a model as llama.cpp's converter does.

    Args:
        more: tensors that the model does not have.
    """
    config: Any = model.config
    writer = gguf.GGUFWriter(str(path), name)
    writer.add_name("tiny")
    for key, value in _metadata(name, config).items():
        _add(writer, f"{name}.{key}", value)
    add_tokenizer(writer)
    arch = next(kind for kind, label in gguf.MODEL_ARCH_NAMES.items() if label == name)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    tied = config.tie_word_embeddings
    for full, value in model.state_dict().items():
        for ours, changed in _changed(name, full, value, config).items():
            base, _, suffix = ours.rpartition(".")
            known = ours if ours.startswith("blk.") else names.get_name(ours)
            known = known or f"{names.get_name(base)}.{suffix}"
            if known != "output.weight" or not tied:
                writer.add_tensor(known, changed.detach().float().contiguous().numpy())
    for full, value in (more or {}).items():
        writer.add_tensor(full, value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_uint32(key, value)


def _metadata(name: str, config: Any) -> dict[str, Any]:
    if name == "mamba":
        return {
            "context_length": 2**20,
            "embedding_length": config.hidden_size,
            "feed_forward_length": 0,
            "attention.head_count": 0,
            "block_count": config.num_hidden_layers,
            "ssm.conv_kernel": config.conv_kernel,
            "ssm.inner_size": config.intermediate_size,
            "ssm.state_size": config.state_size,
            "ssm.time_step_rank": config.time_step_rank,
            "attention.layer_norm_rms_epsilon": config.layer_norm_epsilon,
        }
    found = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": getattr(config, "rms_norm_eps", None) or config.norm_eps,
    }
    rope = config.rope_parameters
    if name == "lfm2":
        heads = [config.num_key_value_heads if kind == "full_attention" else 0 for kind in config.layer_types]
        found |= {"attention.head_count_kv": heads, "shortconv.l_cache": config.conv_L_cache, "vocab_size": VOCAB}
    if name == "gemma4":
        full, narrow = config.layer_types.index("full_attention"), config.to_dict()["head_dim"]
        found |= {
            "attention.key_length": config.per_layer_config[full].head_dim,
            "attention.value_length": config.per_layer_config[full].head_dim,
            "attention.key_length_swa": narrow,
            "attention.value_length_swa": narrow,
            "attention.sliding_window": config.sliding_window,
            "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in config.layer_types],
            "attention.shared_kv_layers": config.num_kv_shared_layers,
            "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
            "rope.freq_base_swa": rope["sliding_attention"]["rope_theta"],
            "rope.dimension_count": config.per_layer_config[full].head_dim,
            "rope.dimension_count_swa": narrow,
        }
        if config.final_logit_softcapping:
            found["final_logit_softcapping"] = config.final_logit_softcapping
        return found | {"rope.freq_base": rope["full_attention"]["rope_theta"]}
    found["rope.freq_base"] = float(rope["rope_theta"])
    if name in ("qwen35", "qwen35moe", "minimax-m2", "gpt-oss"):
        found |= {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
        found["rope.dimension_count"] = int(config.head_dim * rope.get("partial_rotary_factor", 1))
    if name in ("qwen35", "qwen35moe"):
        found |= {
            "full_attention_interval": 4,
            "ssm.conv_kernel": config.linear_conv_kernel_dim,
            "ssm.state_size": config.linear_key_head_dim,
            "ssm.group_count": config.linear_num_key_heads,
            "ssm.time_step_rank": config.linear_num_value_heads,
            "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
            "rope.dimension_sections": [*rope["mrope_section"], 0],
        }
    if name == "qwen35moe":
        found |= {
            "expert_count": config.num_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size,
            "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
        }
        del found["feed_forward_length"]
    if name in ("minimax-m2", "gpt-oss"):
        found |= {
            "expert_count": config.num_local_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.intermediate_size,
            "vocab_size": VOCAB,
        }
    if name == "minimax-m2":
        found["expert_gating_func"] = 2  # sigmoid
    if name == "gpt-oss":
        found |= {
            "attention.sliding_window": config.sliding_window,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": float(rope["factor"]),
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        }
    return found


def _changed(name: str, full: str, value: torch.Tensor, config: Any) -> dict[str, torch.Tensor]:
    """A tensor as it is written: by llama.cpp's name where its table has none, else by that of transformers."""
    block = f"blk.{full.split('.')[2]}" if ".layers." in full else ""
    if full.endswith("A_log"):
        value = -value.exp()
    if full.endswith(("conv1d.weight", "conv.conv.weight")):
        value = value.squeeze(1)
    if full.endswith("e_score_correction_bias"):
        return {f"{block}.exp_probs_b.bias": value}
    if name == "gpt-oss" and ".experts." in full:
        return _gpt_oss_experts(block, full, value)
    if full.endswith("experts.gate_up_proj"):
        gate, up = value.chunk(2, dim=1)
        return {f"{block}.ffn_gate_exps.weight": gate, f"{block}.ffn_up_exps.weight": up}
    if full.endswith("experts.down_proj"):
        return {f"{block}.ffn_down_exps.weight": value}
    if full.endswith(("layer_scalar", "sinks")):
        return {f"{block}.{'attn_sinks' if 'sinks' in full else 'layer_output_scale'}.weight": value}
    if name in ("qwen35", "qwen35moe"):
        if full.endswith("norm.weight") and "linear_attn.norm" not in full:
            value = value + 1
        value = _tiled(full, value, config)
        if full.endswith("shared_expert_gate.weight"):
            value = value.squeeze(0)
        if full.endswith("dt_bias"):
            return {f"{block}.ssm_dt.bias": value}
    return {full: value}


def _gpt_oss_experts(block: str, full: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    bias = full.endswith("_bias")
    value = value if bias else value.transpose(1, 2)
    suffix = "bias" if bias else "weight"
    if ".gate_up_proj" in full:  # the two alternate
        return {f"{block}.ffn_gate_exps.{suffix}": value[:, ::2], f"{block}.ffn_up_exps.{suffix}": value[:, 1::2]}
    return {f"{block}.ffn_down_exps.{suffix}": value}


def _tiled(full: str, value: torch.Tensor, config: Any) -> torch.Tensor:
    """Value heads in llama.cpp's order: first those of each key head, then the second ones."""
    n_keys, n_values, width = config.linear_num_key_heads, config.linear_num_value_heads, config.linear_value_head_dim
    if "linear_attn" not in full or n_keys == n_values:
        return value

    def reorder(part: torch.Tensor, width: int) -> torch.Tensor:
        return part.reshape(n_keys, n_values // n_keys, width, *part.shape[1:]).transpose(0, 1).reshape(part.shape)

    if "in_proj_qkv" in full or "conv1d" in full:
        keys = 2 * n_keys * config.linear_key_head_dim
        return torch.cat([value[:keys], reorder(value[keys:], width)])
    if "in_proj_z" in full:
        return reorder(value, width)
    if "out_proj" in full:
        return reorder(value.T, width).T
    return value if full.endswith("norm.weight") else reorder(value, 1)
