"""Models of the offloading benchmark: random weights of Llama shapes, and distinct prompts for them."""

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
}
COMMON = {"max_position_embeddings": 2048, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": None}


def make_model(folder: Path, shape: str) -> None:
    """Write a model with random weights, unless the folder holds one."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    if (folder / "config.json").exists():
        return
    torch.manual_seed(0)
    config: dict[str, Any] = {**SHAPES[shape], **COMMON}
    family: Any = LlamaForCausalLM
    model = family._from_config(LlamaConfig(**config), dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="700MB")


def weight_bytes(folder: Path) -> int:
    """Bytes of the weights as they were saved."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def prompts_of(n: int, length: int, shape: str) -> list[tuple[int, ...]]:
    """Distinct prompts of random tokens."""
    draw = random.Random(0)
    return [tuple(draw.choices(range(3, SHAPES[shape]["vocab_size"]), k=length)) for _ in range(n)]
