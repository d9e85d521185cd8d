"""Turns of one conversation in engines that store sessions, and what `generate` says to the same turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import millpond as mp
from millpond.engine.engine import Engine
from millpond.engine.outputs import KVStats, RequestOutput
from millpond.engine.request import CacheOptions, Request

NEW = 6
#: Tokens that the user adds in each turn.
TURNS = (80, 17, 5)
VOCABULARY = 96


@cache
def model(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        attn_implementation="sdpa",
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def words(n: int, seed: int) -> list[int]:
    """Tokens of a user."""
    return [int(i) for i in torch.randint(2, VOCABULARY, (n,), generator=torch.Generator().manual_seed(seed))]


def budget_of(method: str) -> str | None:
    return None if method == "full" else "50%"


def open_engine(folder: Path | None, method: str = "h2o", codec: str | None = None, **options: Any) -> Engine:
    chosen = {"max_step_tokens": 32, "page_slots": 8, "budget": budget_of(method)} | options
    return Engine(
        options.pop("of", None) or model(),
        method=method,
        codec=codec,
        cache_dir=folder,
        **{name: value for name, value in chosen.items() if name != "of"},
    )


def ask(
    engine: Engine,
    ids: Sequence[int],
    *,
    salt: str | None = None,
    cache_options: CacheOptions | None = None,
    new: int = NEW,
    fields: Mapping[str, Any] | None = None,
    **params: Any,
) -> RequestOutput:
    """The answer to a prompt; every page is checked, and what ended is on the disk when this returns.

    fields: more of the request. params: of its sampling.
    """
    chosen = mp.SamplingParams(**{"max_tokens": new, "temperature": 0, "ignore_eos": True} | params)
    engine.add(
        Request(
            request_id="turn",
            prompt=tuple(ids),
            params=chosen,
            cache_salt=salt,
            cache=cache_options or CacheOptions(),
            **(fields or {}),
        )
    )
    found: list[RequestOutput] = []
    while engine.busy:
        found += [output for output in engine.step() if output.finished]
        engine.check_integrity()
    (output,) = found
    if output.error is not None:
        raise output.error
    assert engine.stats().kv_bytes == 0 or engine.stats().prefix is not None
    if engine.sessions is not None:
        assert engine.sessions.wait(60)
    return output


def said(output: RequestOutput) -> list[int]:
    return list(output.completions[0].token_ids)


def kv(output: RequestOutput) -> KVStats:
    found = output.completions[0].kv
    assert found is not None
    return found


def stored(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*/*.safetensors"))
