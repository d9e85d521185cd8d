"""Small models that vLLM and transformers load."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def tiny_llama(folder: Path, **changes: object) -> str:
    """Write a small Llama with random weights, and return its path."""
    config = LlamaConfig(
        **{
            "vocab_size": 512,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 8192,
            "eos_token_id": None,
            "bos_token_id": None,
            **changes,
        }
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    for weight in model.parameters():
        if weight.ndim == 2:  # spread, so that attention differs among entries
            torch.nn.init.normal_(weight, std=0.12)
    model.save_pretrained(folder)
    return str(folder)


def prompts(count: int, shortest: int, longest: int, seed: int = 1) -> list[list[int]]:
    """Return random token ids of random lengths."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=draw).tolist()
    return [torch.randint(5, 500, (length,), generator=draw).tolist() for length in lengths]
