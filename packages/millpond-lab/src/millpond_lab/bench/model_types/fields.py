"""Exceptions to the general rules of `tiny_config`, by model type: sizes that must fit each other, and odd names."""

from __future__ import annotations

from typing import Any

from millpond_lab.bench.model_types.tiny_config import LEFT_OUT

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
