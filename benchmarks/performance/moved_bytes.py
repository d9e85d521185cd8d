"""Bytes of a request that moves from one engine to another, as shares of a full cache of its tokens.

    python benchmarks/performance/moved_bytes.py [--prompt 2048] [--new 9] [--json FILE] [--tiny]

An engine reads a prompt of random ids, writes some tokens and gives the request away; another engine, with pages of
another size, takes it over and writes the rest, which must be what a third engine writes without a move. The bytes
depend on shapes and lengths only, not on the weights, the machine or what else runs on it.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass

import torch
from script import begin, keep
from transformers import LlamaConfig, LlamaForCausalLM

from millpond.engine.engine import Engine
from millpond.engine.outputs import RequestOutput
from millpond.engine.request import CacheOptions, Request
from millpond.engine.sampling.params import SamplingParams

#: Method, budget and number format by name.
SETTINGS = {
    "full": CacheOptions(method="full"),
    "full int4": CacheOptions(method="full", codec="int4"),
    "h2o 20%": CacheOptions(method="h2o", budget="20%"),
    "h2o 20% int4": CacheOptions(method="h2o", budget="20%", codec="int4"),
}


@dataclass(frozen=True)
class Move:
    """One request. same_tokens: it went on with the tokens of a request that did not move."""

    name: str
    moved_bytes: int
    full_bytes: int
    share: float
    same_tokens: bool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--new", type=int, default=9, help="Tokens of the answer before the move, and behind it.")
    args, _ = begin(parser)
    if args.tiny:
        args.prompt = 256
    moves = [move(name, args.prompt, args.new) for name in SETTINGS]
    for one in moves:
        print(
            f"{one.name:14} {one.moved_bytes:>12,} of {one.full_bytes:>12,} bytes {one.share:7.1%}  {one.same_tokens}"
        )
    keep(args, [asdict(one) for one in moves], shape="6 layers, 8 query heads, 4 KV heads, head_dim 32, bf16")


def move(name: str, prompt: int, new: int) -> Move:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=prompt + 2 * new + 1,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    ids = tuple(torch.randint(2, 512, (prompt,), generator=torch.Generator().manual_seed(1)).tolist())
    params = SamplingParams(max_tokens=2 * new, temperature=0, ignore_eos=True)
    request = Request(request_id="moved", prompt=ids, params=params, cache=SETTINGS[name])
    first, second = Engine(model, page_slots=32), Engine(model, page_slots=64)
    second.add(request)
    (expected,) = second.drain()
    first.add(request)
    found: list[RequestOutput] = []
    while not found or len(found[0].completions[0].token_ids) < new:
        found = first.step()
    kv = found[0].completions[0].kv
    assert kv is not None
    data = first.export_request("moved")
    second.import_request(data)
    (moved,) = second.drain()
    same = moved.completions[0].token_ids == expected.completions[0].token_ids
    first.close()
    second.close()
    return Move(name, len(data), kv.full_kv_bytes, len(data) / kv.full_kv_bytes, same)


if __name__ == "__main__":
    main()
