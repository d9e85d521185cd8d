"""Shrink the configuration of any model type: few layers, one of each kind that the type has, and small matrices."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

#: Fields by the names that configurations give them. What a field means is the same wherever it has the name.
SIZES: dict[str, Any] = {
    name: size
    for size, names in (
        (96, "vocab_size"),
        (256, "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions max_source_positions"),
        (32, "hidden_size d_model n_embd embedding_size word_embed_proj_dim emb_dim hidden_dim embed_dim"),
        (32, "out_hidden_size projection_dim audio_hidden_size backbone_hidden_size projector_hidden_size"),
        (32, "vision_embed_dim hidden_size_per_layer_input vq_embed_dim num_position_embeddings"),
        (48, "intermediate_size ffn_dim n_inner decoder_ffn_dim encoder_ffn_dim ffn_hidden_size dff dim_ff"),
        (48, "shared_intermediate_size shared_expert_intermediate_size intermediate_size_mlp"),
        (16, "moe_intermediate_size expert_ffn_hidden_size prefix_dense_intermediate_size"),
        (4, "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads"),
        (4, "attention_heads encoder_heads"),
        (2, "num_key_value_heads num_kv_heads"),
        (8, "head_dim kv_channels dim_head"),
        (2, "decoder_layers encoder_layers n_layer n_layers num_layers depth encoder_num_layers"),
        (4, "num_experts num_local_experts n_routed_experts moe_num_experts num_routed_experts"),
        (2, "num_experts_per_tok moe_topk moe_k top_k_experts num_experts_per_token"),
        (1, "n_group topk_group n_shared_experts moe_num_shared_experts num_shared_experts first_k_dense_replace"),
        (12, "sliding_window kv_lora_rank"),
        (10, "q_lora_rank"),
        (4, "qk_rope_head_dim patch_size num_mel_bins"),
        (8, "qk_nope_head_dim image_size"),
        (6, "v_head_dim"),
        (96, "vocab_size_per_layer_input"),
    )
    for name in names.split()
}
#: Settings that let any text be continued: no text ends early, and the special tokens lie inside the vocabulary.
TOKENS: dict[str, Any] = {
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "forced_eos_token_id": None,
    "image_token_id": 90,
    "image_token_index": 90,
    "video_token_id": 91,
    "video_token_index": 91,
    "audio_token_id": 92,
    "audio_token_index": 92,
    "vision_start_token_id": 93,
    "vision_end_token_id": 94,
    "decoder_start_token_id": 1,
    "is_decoder": True,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "layerdrop": 0.0,
}
LAYERS = "num_hidden_layers"
#: In the table of settings: the default of the class, not the general rule.
LEFT_OUT = object()


def tiny_config(
    kind: type[PreTrainedConfig], table: Mapping[str, Mapping[str, Any]], settings: Mapping[str, Any] | None = None
) -> PreTrainedConfig:
    """A configuration of this class in small numbers.

    Args:
        table: model type -> fields that the general rules get wrong for it, as they are to be; for parts as well.
        settings: the same for this configuration alone.
    """
    whole = kind()
    names = {field.name for field in dataclasses.fields(kind)}
    given = {name: size for name, size in (SIZES | TOKENS).items() if name in names}
    if "kv_lora_rank" in names:
        given["num_key_value_heads"] = SIZES["num_attention_heads"]  # latents are expanded to all heads
    given |= _layers(whole, names) | dict(table.get(kind.model_type, {})) | dict(settings or {})
    for name in kind.sub_configs:
        part = getattr(whole, name, None)
        if isinstance(part, PreTrainedConfig):
            given[name] = tiny_config(type(part), table, given.get(name))
    return kind(**{name: value for name, value in given.items() if value is not LEFT_OUT})


def _layers(whole: PreTrainedConfig, names: set[str]) -> dict[str, Any]:
    """How many layers, and the lists that say something of each: one layer of each kind, and two at least."""
    if LAYERS not in names:
        return {}
    n = int(getattr(whole, LAYERS) or 0)
    lists = {name: values for name in names if (values := _list(whole, name)) and len(values) == n}
    kinds = [tuple(str(values[i]) for values in lists.values()) for i in range(n)]
    chosen = [i for i in range(n) if lists and kinds[i] not in kinds[:i]][:6]
    if len(chosen) < 2:
        chosen = list(range(min(n, 2)))
    return {LAYERS: max(2, len(chosen))} | {name: [values[i] for i in chosen] for name, values in lists.items()}


def _list(whole: PreTrainedConfig, name: str) -> list[Any]:
    try:
        value = getattr(whole, name)
    except (AttributeError, RuntimeError):  # not of the whole, but of each layer
        return []
    return list(value) if isinstance(value, (list, tuple)) else []
