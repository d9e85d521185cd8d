"""What a cache under a budget in bytes holds after its prompt, at each step, and after a later turn."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaForCausalLM

import millpond as mp
from millpond.methods import METHODS

#: Methods that keep everything, and so take no bytes.
UNBOUND = {"full", "minference", "infllm"}
#: All others, with options that let them work on a few dozen tokens.
OPTIONS: dict[str, dict[str, Any]] = {name: {} for name in METHODS.names() if name not in UNBOUND}
OPTIONS |= {
    "duo_attention": {"recent": 8},
    "fastgen": {"special": "1", "punctuation": "5;6;7", "threshold": 0.8},
    "kvzip": {"ask": "none"},
    "attention_matching": {"ask": "none"},
    "random_attention": {"every": 8, "recent": 8},
    "rkv": {"buffer": 8},
    "triattention": {"every": 8},
    "vase": {"every": 8, "window": 8},
    "simlayerkv": {"recent": 8},
    **{name: {"window": 8} for name in ("cake", "dms", "finch", "lava", "snapkv")},
}


def held(
    model: LlamaForCausalLM,
    method: str,
    amount: int,
    codec: str,
    batch: int,
    length: int,
    steps: int,
    turn: int = 0,
    **options: Any,
) -> list[int]:
    """`kv_bytes` after a prompt, after each of `steps` tokens, and after a later `turn` and as many steps again.

    Sequences of `length` columns are padded on the left, each by five tokens more than the one before.
    """
    generator, found = torch.Generator().manual_seed(3), []
    mask = torch.ones(batch, length, dtype=torch.long)
    for b in range(batch):
        mask[b, : 5 * b] = 0
    with torch.no_grad(), mp.compress(model, method, f"{amount}B", codec, page_slots=8, **options) as cache:
        for n in [length, *[1] * steps, *([turn, *[1] * steps] if turn else [])]:
            ids = torch.randint(2, model.config.vocab_size, (batch, n), generator=generator)
            if found:
                mask = torch.cat([mask, torch.ones(batch, n, dtype=torch.long)], 1)
            places = (mask.cumsum(1) - 1).clamp(min=0)[:, -n:]
            model(ids, attention_mask=mask, position_ids=places, cache=cache)
            found.append(cache.stats().kv_bytes)
        cache.check_integrity()
    return found
