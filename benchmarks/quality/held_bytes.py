"""Bytes that a cache holds when a prompt ends and while it decodes, as shares of the full cache's: a table on stdout.

Bytes depend on shapes alone, so the model is a random one of two layers with SmolLM2's heads (3 of 64 numbers).
"""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import millpond as mp

STEPS = 40
SETTINGS = [
    ("rotated4", 0.6),
    ("rotated4", 0.6875),
    ("rotated4", 0.7),
    ("rotated4+rotated3", 0.78125),
    ("rotated3", 0.90625),
    ("rotated4", 0.34375),
    ("int4", 0.5),
]


def model() -> LlamaForCausalLM:
    """The random model, bfloat16."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=36,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval().bfloat16()


@torch.no_grad()
def held(llama: LlamaForCausalLM, n: int, codec: str, entries: int, slots: int) -> tuple[float, float]:
    """The share after a prompt of n tokens, and the largest one in the steps after it, h2o."""
    ids = torch.randint(2, 96, (1, n), generator=torch.Generator().manual_seed(1))
    shares = []
    with mp.compress(llama, "h2o", entries, codec, page_slots=slots) as cache:
        for part in (ids, *(ids[:, i : i + 1] for i in range(STEPS))):
            llama(part, cache=cache)
            stats = cache.stats()
            shares.append(stats.kv_bytes / stats.full_kv_bytes)
    return shares[0], max(shares[1:])


def main() -> None:
    """Write the table."""
    torch.set_num_threads(1)
    llama = model()
    print(f"| prompt | stored in | entries | plain page | at its end | most in {STEPS} steps |")
    print("| ---: | --- | ---: | ---: | ---: | ---: |")
    for n in (1024, 4096):
        for codec, share in SETTINGS:
            for slots in (32, 8):
                entries = round(share * n)
                end, most = held(llama, n, codec, entries, slots)
                print(f"| {n} | {codec} | {entries} | {slots} | {end:.1%} | {most:.1%} |")


if __name__ == "__main__":
    main()
