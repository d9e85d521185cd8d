"""A model of any type in tiny form, with random weights that make its attention matter."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

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


_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_MROPE = {"rope_parameters": _ROPE | {"mrope_section": [2, 1, 1]}}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
_SLIDING_AND_FULL: dict[str, Any] = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
_SHARING: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": _SLIDING_AND_FULL["layer_types"] * 2,
    "num_kv_shared_layers": 2,
}

#: Model type, of a whole or of a part -> fields; of one part of one type, under the part's name.
FIELDS: dict[str, dict[str, Any]] = {
    "bamba": _MAMBA | {"attn_layer_indices": [1]},
    "chameleon": {"vocabulary_map": {"<image>": 90} | {f"IMGIMG{c}Z": 60 + i for i, c in enumerate("ABCD")}},
    "codegen": {"rotary_dim": 4},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE}},
    "cosmos3_edge_text": _MROPE,
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"moe_num_experts": 4},
    },
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [16, 16],
        "rope_parameters": _ROPE | {"mrope_section": [1, 1, 2]},
    },
    "florence_vision": dict.fromkeys(("patch_size", "num_heads", "embed_dim", "projection_dim"), LEFT_OUT),
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 8}},
    "gemma3n_text": {**_SHARING, "intermediate_size": [48] * 4, "activation_sparsity_pattern": [0.0] * 4},
    "gemma4_text": {"global_head_dim": 8, **_SHARING},
    "gemma4_unified_text": {"global_head_dim": 8, **_SHARING},
    "diffusion_gemma_text": {"global_head_dim": 8, **_SLIDING_AND_FULL},
    "glm46v_text": _MROPE,
    "glm4v_moe_text": _MROPE | {"head_dim": 16},
    "glm4v_text": _MROPE,
    "glm5_next_text": {"qk_rope_head_dim": 0},
    "glm_ocr_text": _MROPE,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 12},
    "gptj": {"rotary_dim": 4},
    "granite4_vision": {
        "deepstack_layer_map": [[0, 0]],
        "downsample_rate": "1/2",
        "vision_config": {"hidden_size": 64},
    },
    "granitemoehybrid": _MAMBA | {"layer_types": ["linear_attention", "full_attention"]},
    "hunyuan_vl_text": {"rope_parameters": _ROPE | {"xdrope_section": [1, 1, 1, 1]}},
    "inkling2": {"vision_config": {"text_hidden_size": 32}, "audio_config": {"text_hidden_size": 32}},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "kimi_linear": {"linear_head_dim": 8, "linear_num_heads": 4},
    "kosmos-2": {"latent_query_num": 4},
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"head_dim": 4, "zero_expert_num": 2},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "molmo2_adapter": {"vision_feature_layer": [1, 0]},
    "molmo2_vision": {"image_size": LEFT_OUT},
    "nemo_speechlm": {"word_timestamp_config": {"blank_token_id": 95}},
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}},
    "paddleocr_vl_text": _MROPE,
    "qwen2_5_omni": {"enable_audio_output": False},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 93, "vision_end_token_id": 94},
    "qwen2_5_omni_text": _MROPE,
    "qwen2_5_vl_text": _MROPE,
    "qwen2_vl_text": _MROPE,
    "qwen3_asr": {"eos_token_id": 2},
    "qwen3_omni_moe": {"enable_audio_output": False},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 93, "vision_end_token_id": 94},
    "qwen3_omni_moe_text": {"sliding_window": None},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "recurrent_gemma": {"num_hidden_layers": 3, "attention_window_size": 12},
    "reformer": {"axial_pos_embds_dim": [8, 24], "axial_pos_shape": [16, 16]},
    "roc_bert": {"pronunciation_vocab_size": 96, "shape_vocab_size": 96},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}
#: Types that write no text, or none without more than text, and what they want.
UNFIT: dict[str, str] = {
    "gemma4_assistant": "drafts for another model, whose keys and values it reads",
    "gemma4_unified_assistant": "drafts for another model, whose keys and values it reads",
    "instructblipvideo": "writes about a film only",
    "kyutai_speech_to_text": "writes what it hears, a token for each piece of sound",
    "musicgen": "writes the codes of sound, several at each step",
    "musicgen_melody": "writes the codes of sound, several at each step",
    "qwen2_5_omni": "speaks; its language model is qwen2_5_omni_thinker",
    "qwen3_omni_moe": "speaks; its language model is qwen3_omni_moe_thinker",
    "pi0": "writes the movements of a robot",
    "voxtral_realtime": "writes what it hears, a token for each piece of sound",
}


#: Standard deviation of the weights. transformers' own 0.02 leaves attention even, and then nothing that is evicted
#: is missed.
SPREAD = 0.2


def causal_types() -> dict[str, str]:
    """Type -> the model class, of every language model that the installed transformers has."""
    return dict(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def composite_types() -> dict[str, str]:
    """The same for models that take pictures or sound as well as text."""
    found: Mapping[str, str] = modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
    return {kind: name for kind, name in found.items() if kind not in causal_types()}


def tiny_model(kind: str, seed: int = 0) -> PreTrainedModel:
    """A model of this type; the same weights for the same seed.

    Raises: whatever transformers raises where the type cannot be made.
    """
    name = (causal_types() | composite_types())[kind]
    model_class: Any = getattr(transformers, name)
    config = tiny_config(_config_class(kind, model_class), FIELDS)
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: PreTrainedModel = model_class(config).eval()
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1 and weight.is_floating_point():
                weight.normal_(0.0, SPREAD, generator=draw)
    settings = model.generation_config
    settings.eos_token_id = settings.forced_eos_token_id = None
    settings.pad_token_id = 0
    return model


def _config_class(kind: str, model_class: Any) -> type[PreTrainedConfig]:
    """That of the type, or of the part of it that the model class takes."""
    whole: type[PreTrainedConfig] = CONFIG_MAPPING[kind]
    own: type[PreTrainedConfig] = model_class.config_class
    parts = [getattr(whole(), name, None) for name in whole.sub_configs]
    return own if own in map(type, parts) else whole
