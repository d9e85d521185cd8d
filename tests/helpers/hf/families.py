"""Tiny random models of many families, seeded, and text for them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

VOCABULARY = 96
#: Smaller than every prompt of these tests.
WINDOW = 12


@dataclass(frozen=True)
class Family:
    """How to make a tiny model, and what its positions allow."""

    name: str
    config: str
    model: str
    options: dict[str, Any] = field(default_factory=dict)
    rotary: bool = True
    latents: bool = False
    windows: bool = False

    def make(self, **options: Any) -> PreTrainedModel:
        return build(self.config, self.model, **(COMMON | self.options | options))


COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "attn_implementation": "sdpa",
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}

_HYBRID = {
    "sliding_window": WINDOW,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
_MLA = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 12,
    "q_lora_rank": 10,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
}

FAMILIES = [
    Family("llama", "LlamaConfig", "LlamaForCausalLM"),
    Family("mistral", "MistralConfig", "MistralForCausalLM", {"sliding_window": WINDOW}, windows=True),
    Family("qwen2", "Qwen2Config", "Qwen2ForCausalLM"),
    Family("qwen3", "Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 8}),
    Family(
        "opt",
        "OPTConfig",
        "OPTForCausalLM",
        {"ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.2, "dropout": 0.0},
        rotary=False,
    ),
    Family("gpt_neox", "GPTNeoXConfig", "GPTNeoXForCausalLM"),
    Family("phi3", "Phi3Config", "Phi3ForCausalLM"),
    Family(
        "gemma2",
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {
            "head_dim": 8,
            "attn_logit_softcapping": 2.0,
            "query_pre_attn_scalar": 8,
            "attn_implementation": "eager",
            **_HYBRID,
        },
        windows=True,
    ),
    Family("gemma3", "Gemma3TextConfig", "Gemma3ForCausalLM", {"head_dim": 8, **_HYBRID}, windows=True),
    Family("gpt2", "GPT2Config", "GPT2LMHeadModel", {"n_inner": 48}, rotary=False),
    Family(
        "mixtral",
        "MixtralConfig",
        "MixtralForCausalLM",
        {"num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    Family(
        "gpt_oss",
        "GptOssConfig",
        "GptOssForCausalLM",
        {
            "head_dim": 8,
            "num_local_experts": 3,
            "num_experts_per_tok": 2,
            "attn_implementation": "eager",
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            **_HYBRID,
        },
        windows=True,
    ),
    Family(
        "deepseek_v3",
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {
            **_MLA,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
        },
        latents=True,
    ),
    Family("minicpm3", "MiniCPM3Config", "MiniCPM3ForCausalLM", {**_MLA, "dim_model_base": 32}, latents=True),
    Family("cohere", "CohereConfig", "CohereForCausalLM", {"logit_scale": 1.0}),
    Family("starcoder2", "Starcoder2Config", "Starcoder2ForCausalLM", {"sliding_window": None}),
    Family("stablelm", "StableLmConfig", "StableLmForCausalLM"),
    Family("phi", "PhiConfig", "PhiForCausalLM"),
    Family("gemma", "GemmaConfig", "GemmaForCausalLM", {"head_dim": 8}),
]
NAMES = [family.name for family in FAMILIES]


def build(config: str, model: str, **options: Any) -> PreTrainedModel:
    """A model of the named classes with random weights, the same at each call."""
    torch.manual_seed(7)
    attention = options.pop("attn_implementation", "sdpa")
    made = getattr(transformers, model)._from_config(
        getattr(transformers, config)(**options), attn_implementation=attention
    )
    return made.eval()


@cache
def family(name: str) -> Family:
    return next(f for f in FAMILIES if f.name == name)


@cache
def shared_model(name: str) -> PreTrainedModel:
    """One model of a family for many tests; they must leave it as it was."""
    return family(name).make()


def text(batch: int, length: int, seed: int = 0) -> Tensor:
    """Token ids (batch, length) without special ones."""
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def left_padded(lengths: list[int], seed: int = 0) -> dict[str, Tensor]:
    """A batch of unequal prompts as a tokenizer pads it for generation."""
    width = max(lengths)
    ids, mask = text(len(lengths), width, seed), torch.ones(len(lengths), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, : width - length] = 0
        mask[row, : width - length] = 0
    return {"input_ids": ids, "attention_mask": mask}


def one(length: int, seed: int = 0) -> dict[str, Tensor]:
    """A single prompt."""
    return left_padded([length], seed)


@dataclass(frozen=True)
class Run:
    """What greedy generation gave: ids (batch, length + n), and logits (batch, n, vocabulary) behind the new ones."""

    ids: Tensor
    logits: Tensor


def run(model: PreTrainedModel, prompt: dict[str, Tensor], n: int, **options: Any) -> Run:
    """Greedy generation with its logits: a prefill and n - 1 decoding steps."""
    settings = {"do_sample": False, "pad_token_id": 0, "output_logits": True, "return_dict_in_generate": True}
    out = model.generate(**prompt, max_new_tokens=n, **settings, **options)
    return Run(out.sequences, torch.stack(out.logits, 1))


def generate(model: PreTrainedModel, prompt: dict[str, Tensor], n: int, **options: Any) -> Tensor:
    """The ids (batch, length + n) of greedy generation, unless `options` say otherwise."""
    settings = {"do_sample": False, "pad_token_id": 0} | options
    return model.generate(**prompt, max_new_tokens=n, **settings)


@torch.no_grad()
def teacher_forced(model: PreTrainedModel, prompt: dict[str, Tensor], tokens: Tensor, cache: Any) -> Tensor:
    """Logits (batch, 1 + n, vocabulary) after the prompt and after each of `tokens` (batch, n), one step each."""
    mask = prompt["attention_mask"]
    ids, positions = prompt["input_ids"], (mask.cumsum(1) - 1).clamp(min=0)
    logits = []
    for column in range(tokens.shape[1] + 1):
        out = model(input_ids=ids, attention_mask=mask, position_ids=positions, cache=cache)
        logits.append(out.logits[:, -1])
        if column < tokens.shape[1]:
            ids = tokens[:, column : column + 1]
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
            positions = positions[:, -1:] + 1
    return torch.stack(logits, 1)


def most_stored(cache: Any) -> int:
    """The longest KV head of all layers and sequences."""
    return max(n for layer in cache.stats().stored for sequence in layer for n in sequence)


def tiny_llava() -> PreTrainedModel:
    """A vision-language model: a CLIP tower of one layer in front of a Llama."""
    torch.manual_seed(7)
    vision = transformers.CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
        projection_dim=16,
    )
    language = transformers.LlamaConfig(**{k: v for k, v in COMMON.items() if k != "attn_implementation"})
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=language, image_token_index=2, vision_feature_layer=-1, image_seq_length=4
    )
    return transformers.LlavaForConditionalGeneration._from_config(config, attn_implementation="sdpa").eval()


def with_image(prompt: dict[str, Tensor], at: int, seed: int = 3) -> dict[str, Tensor]:
    """The prompt with the four tokens of one image per row at column `at`, and the pixels."""
    ids = prompt["input_ids"].clone()
    ids[:, at : at + 4] = 2
    pixels = torch.randn(len(ids), 3, 8, 8, generator=torch.Generator().manual_seed(seed))
    return prompt | {"input_ids": ids, "pixel_values": pixels}
