"""Default generation settings of the bundled models."""

from __future__ import annotations

from transformers import GenerationConfig


def greedy(max_new_tokens: int, bos: int, eos: int, pad: int) -> GenerationConfig:
    """Greedy decoding that ends at `eos`; the last three are token ids."""
    return GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=max_new_tokens, do_sample=False, bos_token_id=bos, eos_token_id=eos, pad_token_id=pad
    )
