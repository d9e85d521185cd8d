"""Seconds to the first token of one prompt on the 8B shape: our engine, and transformers with flash attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from gpu_bench import Bench, read_prompt, timed
from gpu_bounds import prompt_flop
from gpu_rows import Cell, Row
from gpu_settings import H2O, SETTINGS
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import DynamicCache

#: Attention of transformers that is measured beside ours; the second one is a package of its own.
SDPA, FLASH = "sdpa", "flash_attention_2"


def prompt_cells(bench: Bench, with_goal: bool) -> list[Cell]:
    """One prompt, from its arrival to its first token: the cells that goals compare, or those of other settings."""
    lengths = (48,) if bench.machine.tiny else (8192, 32_768)
    compared = ("full", H2O)
    names = [name for name in SETTINGS if (name in compared) == with_goal]
    theirs = [SDPA, *([FLASH] if find_spec("flash_attn") else [])] if with_goal else []
    runs: dict[str, Callable[[int], Row]] = {
        **{name: partial(measured_prompt, bench, SETTINGS[name]) for name in names},
        **{f"transformers {name}": partial(measured_transformers, bench, name) for name in theirs},
    }
    return [
        Cell("prompt", f"{name}, {tokens}", partial(run, tokens), 1.0 + tokens / 6000)
        for tokens in lengths
        for name, run in runs.items()
    ]


def measured_prompt(bench: Bench, given: dict[str, Any], tokens: int) -> Row:
    """Seconds to the first token in our engine, the second of two times."""
    prompt = bench.prompt(tokens)
    with bench.engine(given, 1) as engine:
        seconds = [timed(bench.machine, partial(read_prompt, engine, f"{n}", prompt)) for n in range(2)][1]
    return prompt_row(bench, tokens, seconds)


def measured_transformers(bench: Bench, attention: str, tokens: int) -> Row:
    """The same of transformers' own model and cache, the prompt in one pass."""
    ids = torch.tensor([bench.prompt(tokens)], device=bench.machine.device)

    def first_token() -> None:
        cache: Any = DynamicCache(config=bench.model.config)
        out = bench.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        int(out.logits[0, -1].argmax())  # the host has the token, as our engine has it

    bench.machine.reset_memory()
    with torch.no_grad(), attending(bench, attention):
        seconds = [timed(bench.machine, first_token) for _ in range(2)][1]
    return prompt_row(bench, tokens, seconds) | {"attention": attention}


@contextmanager
def attending(bench: Bench, attention: str) -> Iterator[None]:
    """Let transformers attend in one way, with the flash kernel of torch alone where that is `sdpa`."""
    before = bench.model.config._attn_implementation
    bench.model.set_attn_implementation(attention)
    backend = SDPBackend.FLASH_ATTENTION if bench.machine.cuda else SDPBackend.MATH
    try:
        with sdpa_kernel(backend):
            yield
    finally:
        bench.model.set_attn_implementation(before)


def prompt_row(bench: Bench, tokens: int, seconds: float) -> Row:
    """What a prompt took, and what its operations take at the rate of a product."""
    bound = prompt_flop(bench.model, tokens) / bench.rates.flop_per_s
    return {
        "tokens": tokens,
        "first_token_s": seconds,
        "bound_s": bound,
        "ratio": seconds / bound,
        "peak_gb": bench.machine.peak_bytes() / 1e9,
    }
