"""Small models with layers of several kinds, and what `millpond.compress` makes of them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 8192,
    "sliding_window": 64,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}


def gemma3(folder: Path) -> str:
    """Write a small Gemma 3: three sliding layers in two groups, two of full attention in one."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    config = transformers.Gemma3TextConfig(**COMMON, num_hidden_layers=5, layer_types=kinds, query_pre_attn_scalar=32)
    return _written(transformers.Gemma3ForCausalLM, config, folder)


def gpt_oss(folder: Path) -> str:
    """Write a small model like gpt-oss: sinks of attention, and every other layer slides."""
    config = transformers.GptOssConfig(
        **COMMON,
        num_hidden_layers=4,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )
    return _written(transformers.GptOssForCausalLM, config, folder)


def _written(kind: Any, config: Any, folder: Path) -> str:
    torch.manual_seed(0)
    model = kind(config)
    for name, weight in model.named_parameters():
        if weight.ndim >= 2:  # spread, so that attention differs among entries
            torch.nn.init.normal_(weight, std=0.12)
        elif name.endswith("sinks"):
            torch.nn.init.normal_(weight, std=3.0)
    model.save_pretrained(folder)
    return str(folder)


def compressed(path: str, rules: Any, prompt: list[int], new: int) -> list[int]:
    """Return the tokens that the library gives for the events of a request: one, at the end of its prompt.

    Args:
        path: Path of the model.
        rules: Rules of an engine's scheduler.
        prompt: Ids of the prompt.
        new: Tokens to decode.
    """
    import millpond
    from millpond_vllm.settings import RequestSettings

    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    times = rules.times(len(prompt), RequestSettings())
    assert times.first() == len(prompt)
    tail = len(prompt) - times.left(len(prompt)) * rules.block
    policy = replace(rules.policy, protect=replace(rules.policy.protect, recent=tail))
    ids = torch.tensor([prompt])
    with millpond.compress(model, policy, times.packed * rules.block + tail), torch.no_grad():
        made = model.generate(ids, max_new_tokens=new, do_sample=False, attention_mask=torch.ones_like(ids))
    return made[0, len(prompt) :].tolist()
