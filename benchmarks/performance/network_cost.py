"""What the trained networks of locret and attention_gate add to a prompt and to a decoding step.

    python benchmarks/performance/network_cost.py [--prompt 2048] [--budget 20%] [--rounds 16] [--large] [--json FILE]

The model is the random Llama of `millpond bench generate` in bf16, or with --large two layers as those of Llama 3.1 8B.
Its networks have random numbers and the width that `millpond train` gives them: what they compute decides nothing here.
Each method has a partner with the same policy, budget and number of entries, whose scores are drawn and not computed,
so that the ratio to it is what the network adds. The ratio to h2o at the same budget, whose eviction needs no network,
has the rest of the method too. All of them evict while they decode. In every round each reads the prompt and decodes
`--tokens` tokens, in shuffled order in one process; a ratio is of one round, and what is printed is the median of the
rounds with the quartiles.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from script import begin, keep
from torch import Tensor

from millpond.cache.layer import layer_cache
from millpond.hf.compress import compress
from millpond.hf.stopwatch import Stopwatch
from millpond.policy.policy import Policy
from millpond.policy.trained.file import save_heads
from millpond.policy.trained.networks import Gates, RetainingHeads
from millpond_lab.bench.generate.candidates import ModelShape, draw_prompts
from millpond_lab.bench.methods.candidate import random_gates, random_heads

#: Methods with networks, and what is named after each of them: with scores that are drawn.
METHODS, DRAWN = {"locret": "heads", "attention_gate": "gate"}, ", scores drawn"
#: Layers as those of Llama 3.1 8B, with a small vocabulary, so that layers are what a step takes.
LARGE = ModelShape(layers=2, width=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocab=512)
#: Evicts at each step without a network.
OTHER = "h2o"


def networks(model: Any, method: str, name: str) -> RetainingHeads | Gates:
    """Those of a method under a name."""
    found: RetainingHeads | Gates = random_heads(model) if method == "locret" else random_gates(model)
    return type(found)(found.layers, found.model, name)  # type: ignore[arg-type]


def drawn_or(scores: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`scores` of the cache, but for networks with the name DRAWN, in whose place it draws numbers from 0 to 1."""
    generator = torch.Generator().manual_seed(0)

    def scores_of(policy: Policy, layer: int, rotary: Any, q: Tensor, k: Tensor, *rest: Any) -> Tensor:
        networks: Any = policy.entry_scores if policy.gates is None else policy.gates
        if networks.name == DRAWN:
            return torch.rand(k.shape[:3], generator=generator)
        return scores(policy, layer, rotary, q, k, *rest)

    return scores_of


def measure(model: Any, prompt: Tensor, tokens: int, budget: str, method: str, options: dict[str, Any]) -> Stopwatch:
    """One prompt and `tokens` steps with a cache of its own."""
    with compress(model, method, budget, **options) as cache:
        watch = Stopwatch()
        model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            cache=cache,
            streamer=watch,
            do_sample=False,
            max_new_tokens=tokens + 1,
            min_new_tokens=tokens + 1,
            disable_compile=True,
        )
    return watch


def row_of(name: str, base: str, times: dict[str, list[tuple[float, float]]]) -> dict[str, Any]:
    """Ratios of `name` to `base`, of prompts and of steps."""
    row: dict[str, Any] = {"name": name, "base": base}
    for place, part in enumerate(("prompt", "step")):
        ratios = [own[place] / other[place] for own, other in zip(times[name], times[base], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        row[part] = {
            "median": middle,
            "quartiles": [low, high],
            "ms": 1e3 * statistics.median(t[place] for t in times[name]),
            "base_ms": 1e3 * statistics.median(t[place] for t in times[base]),
        }
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--budget", default="20%")
    parser.add_argument("--tokens", type=int, default=64, help="Steps of a turn.")
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--large", action="store_true", help="Two layers of the shape of an 8B model.")
    args, shape = begin(parser)
    shape = LARGE if args.large else shape
    model, rng = shape.build(), random.Random(0)
    prompt = draw_prompts(shape, 1, args.prompt, seed=0)
    sizes: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        runs: dict[str, tuple[str, dict[str, Any]]] = {OTHER: (OTHER, {})}
        for method, option in METHODS.items():
            for kind in ("", DRAWN):
                made = networks(model, method, kind or "random")
                file = Path(folder) / f"{method}{kind}.safetensors"
                save_heads(made, file)
                runs[method + kind] = method, {option: str(file), "decode": "evict"}
            sizes[method] = sum(getattr(layer, part).numel() for layer in made.layers for part in layer.PARTS)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
        scores = drawn_or(layer_cache.new_entry_scores)
        with patch.object(layer_cache, "new_entry_scores", scores), torch.inference_mode():
            for method, options in runs.values():  # the first of each is not counted
                measure(model, prompt, 2, args.budget, method, options)
            for _ in range(args.rounds):
                for name in rng.sample(list(runs), len(runs)):
                    watch = measure(model, prompt, args.tokens, args.budget, *runs[name])
                    times[name].append((watch.prefill_s, statistics.mean(watch.steps)))
    layers = sum(p.numel() for p in model.model.layers.parameters())
    for method, size in sizes.items():
        print(f"{method}: the networks have {size / layers:.1%} of the numbers of the model's layers")
    rows = [row_of(method, base, times) for method in METHODS for base in (method + DRAWN, OTHER)]
    rows += [row_of(method + DRAWN, OTHER, times) for method in METHODS]
    for row in rows:
        parts = [
            f"{part} {row[part]['median']:.3f} ({' to '.join(f'{q:.3f}' for q in row[part]['quartiles'])}) x "
            f"{row[part]['base_ms']:.1f} ms"
            for part in ("prompt", "step")
        ]
        print(f"{row['name']:29} of {row['base']:29} {', '.join(parts)}")
    keep(args, rows, parameters=sizes, layer_parameters=layers)


if __name__ == "__main__":
    main()
