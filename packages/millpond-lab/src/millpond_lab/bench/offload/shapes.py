"""Models of the offloading benchmark: random weights in shapes of Llama and OPT, and distinct prompts for them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "1.04B": {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "vocab_size": 32000,
    },
    "0.16B": {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "vocab_size": 8000,
    },
    "opt-1.0B": {
        "family": "opt",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 20,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 8000,
    },
    "opt-0.26B": {
        "family": "opt",
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 20,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "vocab_size": 8000,
    },
}
#: Of a shape that names none.
FAMILY = "llama"
COMMON = {"max_position_embeddings": 2048, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": None}


def make_model(folder: Path, shape: str) -> None:
    """Write a model with random weights, unless the folder holds one."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

    if (folder / "config.json").exists():
        return
    torch.manual_seed(0)
    config: dict[str, Any] = {**SHAPES[shape], **COMMON}
    family: Any = LlamaForCausalLM
    made: Any
    if is_opt(shape):
        inner = config.pop("intermediate_size")
        config = {name: value for name, value in config.items() if name not in ("family", "num_key_value_heads")}
        width = config["hidden_size"]
        family, made = OPTForCausalLM, OPTConfig(ffn_dim=inner, word_embed_proj_dim=width, pad_token_id=1, **config)
    else:
        made = LlamaConfig(**config)
    model = family._from_config(made, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="700MB")


def is_opt(shape: str) -> bool:
    """Whether a shape is OPT's: as many KV heads as query heads, an MLP without gates, learned positions."""
    return bool(SHAPES[shape].get("family", FAMILY) == "opt")


def kv_bytes(shape: str, tokens: int) -> int:
    """Bytes of the keys and values of some tokens in bf16."""
    its = SHAPES[shape]
    heads = its["num_key_value_heads"] * (its["hidden_size"] // its["num_attention_heads"])
    return int(2 * 2 * tokens * its["num_hidden_layers"] * heads)


def weight_bytes(folder: Path) -> int:
    """Bytes of the weights as they were saved."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def prompts_of(n: int, length: int, shape: str) -> list[tuple[int, ...]]:
    """Distinct prompts of random tokens."""
    draw = random.Random(0)
    return [tuple(draw.choices(range(3, SHAPES[shape]["vocab_size"]), k=length)) for _ in range(n)]
