"""Descriptions of pictures by a small vision-language model whose cache is evicted from, merged or whole.

    python benchmarks/quality/image_grids.py --checkpoint out/image-grids.pt --out benchmarks/results/image-grids.json

Elastic Cache (arXiv:2407.18121) says that on vision-language models merging evicted entries into anchors keeps more
than H2O's eviction and StreamingLLM, at 20 to 80 % of the cache, by perplexity and ROUGE. Here the model is trained
first (`image_grid_model`; it goes on from the checkpoint), on pictures of nine shapes each, and then describes pictures
that it has not seen: its entries leave after the prompt and at each token of the answer. The right description is fed
token by token (perplexity), and one is decoded greedily (cells named right, ROUGE-L). Intervals are the bootstrap's
over pictures, differences are paired by picture.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from image_grid_model import CELLS, IMAGE, PLACES, WORDS, Batch, Grid, Recipe, batch_of, held_out, train_model
from torch import Tensor
from torch.nn.functional import cosine_similarity

import millpond as mp
from millpond.methods import make_policy
from millpond.models.cache_argument import cache_argument, cache_of
from millpond.policy.policy import Policy
from millpond_lab.bench.common.machine import describe_machine, torch_threads
from millpond_lab.evals.harness.summary import resampled_interval
from millpond_lab.evals.metrics import rouge

SEED, GRIDS, PAGE_SLOTS = 7, 96, 4
BUDGETS = ("20%", "40%", "60%", "80%")
#: What is compared at each budget. The paper's place of the entry that leaves while decoding is 25 before the end of
#: about 600 tokens, which is 4 before the end of 84.
SETTINGS: dict[str, dict[str, Any]] = {
    "elastic": {"method": "elastic"},
    "elastic:merge=none": {"method": "elastic", "merge": "none"},
    "elastic:distance=-4": {"method": "elastic", "distance": -4},
    "h2o": {"method": "h2o"},
    "streaming": {"method": "streaming"},
}
PAIRS = (*(("elastic", other) for other in ("h2o", "streaming", "elastic:merge=none")), ("elastic:distance=-4", "h2o"))


@dataclass(frozen=True, slots=True)
class GrowingPolicy(Policy):
    """A method whose budget is a share of all tokens so far, as that of `elastic` is and those of the paper are."""

    @property
    def grows(self) -> bool:
        return True


def setting(name: str) -> dict[str, Any]:
    """Arguments of `compress`: at each token all hold the same number of entries."""
    options = SETTINGS[name]
    if options["method"] == "elastic":
        return options
    policy = make_policy(options["method"], {})
    return {"method": GrowingPolicy(**{one.name: getattr(policy, one.name) for one in fields(Policy)})}


@dataclass(frozen=True, slots=True)
class Answers:
    """What a model said of pictures, one number a picture.

    Attributes:
        nats: mean negative log probability of the tokens of the right description.
        right: share of the cells that the greedy description names right. rouge: its ROUGE-L.
        bytes, entries: what the cache held at its end, as shares of the full cache.
    """

    nats: list[float]
    right: list[float]
    rouge: list[float]
    bytes: float
    entries: float


# ---------------------------------------------------------------------- answers


@torch.inference_mode()
def read(model: Any, batch: Batch, cache: Any, forced: bool) -> tuple[Tensor, Tensor]:
    """Log probabilities (B, A) of the right answers and the tokens (B, A) that were chosen, one pass a token.

    Args:
        forced: feed the right answer, not the chosen tokens.
    """
    given: dict[str, Any] = {"input_ids": batch.prompt, "pixel_values": batch.pixels}
    told, chosen = [], []
    for right in batch.answer.T:
        logits = model(**given, **cache_argument(cache), use_cache=True, logits_to_keep=1).logits[:, -1].float()
        told.append(logits.log_softmax(-1).gather(1, right[:, None]))
        chosen.append(logits.argmax(-1))
        given = {"input_ids": (right if forced else chosen[-1])[:, None]}
    return torch.cat(told, 1), torch.stack(chosen, 1)


def answers(model: Any, grids: Sequence[Grid], batch: Batch, options: Mapping[str, Any]) -> Answers:
    """Both ways of one setting over all pictures."""
    with mp.compress(model, codec="auto", page_slots=PAGE_SLOTS, **options) as cache:
        told, _ = read(model, batch, cache, forced=True)
        stats = cache.stats()
    with mp.compress(model, codec="auto", page_slots=PAGE_SLOTS, **options) as cache:
        _, chosen = read(model, batch, cache, forced=False)
    said = [[WORDS[i] for i in row] for row in chosen.tolist()]
    texts = [" ".join(WORDS[i] for i in row) for row in batch.answer.tolist()]
    return Answers(
        (-told.mean(1)).tolist(),
        [named_right(grid, words) for grid, words in zip(grids, said, strict=True)],
        [rouge([text], " ".join(words)).long for text, words in zip(texts, said, strict=True)],
        stats.kv_bytes / stats.full_kv_bytes,
        float(np.mean(stats.stored)) / float(np.mean(stats.seen)),
    )


def named_right(grid: Grid, words: Sequence[str]) -> float:
    """The share of the cells whose place is followed by their colour and shape."""
    named = {words[i]: tuple(words[i + 1 : i + 3]) for i in range(len(words) - 1, -1, -1) if words[i] in PLACES}
    return sum(named.get(place) == cell for place, cell in zip(PLACES, grid.cells, strict=True)) / CELLS


@torch.inference_mode()
def alike(model: Any, batch: Batch) -> dict[str, dict[str, float]]:
    """Mean cosine of keys and of values of image tokens: of those beside each other in a row, and of any two."""
    out = model(input_ids=batch.prompt, pixel_values=batch.pixels, use_cache=True)
    places = (batch.prompt[0] == IMAGE).nonzero().flatten()
    side = int(len(places) ** 0.5)
    order = torch.randperm(len(places), generator=torch.Generator().manual_seed(SEED))
    found = {}
    for part in ("keys", "values"):
        beside, any_two = [], []
        for layer in cache_of(out).layers:
            image = getattr(layer, part)[:, :, places]
            rows = image.unflatten(2, (side, side))
            beside.append(float(cosine_similarity(rows[..., 1:, :], rows[..., :-1, :], dim=-1).mean()))
            any_two.append(float(cosine_similarity(image[:, :, order], image[:, :, order.roll(1)], dim=-1).mean()))
        found[part] = {"beside": round(float(np.mean(beside)), 4), "any two": round(float(np.mean(any_two)), 4)}
    return found


# ---------------------------------------------------------------------- rows


def over_pictures(values: Sequence[float], scale: Callable[[Any], Any] = np.positive) -> dict[str, float]:
    """The mean over pictures with its 95 % interval."""
    found = resampled_interval(np.array(values, float), np.ones(len(values)), SEED, scale)
    return {"mean": round(found.mean, 3), "low": round(found.low, 3), "high": round(found.high, 3)}


def row(name: str, budget: str, found: Answers) -> dict[str, Any]:
    """What a setting gave."""
    return {
        "method": name,
        "budget": budget,
        "perplexity": over_pictures(found.nats, np.exp),
        "right": over_pictures(found.right),
        "rouge": over_pictures(found.rouge),
        "bytes": round(found.bytes, 3),
        "entries": round(found.entries, 3),
    }


def difference(own: str, other: str, budget: str, found: Mapping[tuple[str, str], Answers]) -> dict[str, Any]:
    """By how much the first setting of a pair is better, picture by picture; of nats, by how many it has fewer."""
    left, right = found[own, budget], found[other, budget]
    better = {
        "nats": [b - a for a, b in zip(left.nats, right.nats, strict=True)],
        "right": [a - b for a, b in zip(left.right, right.right, strict=True)],
        "rouge": [a - b for a, b in zip(left.rouge, right.rouge, strict=True)],
    }
    return {"better": own, "than": other, "budget": budget} | {
        name: over_pictures(values) for name, values in better.items()
    }


def judged(model: Any, grids: Sequence[Grid], budgets: Sequence[str]) -> dict[str, Any]:
    """Rows of all settings, and differences of the pairs."""
    batch = batch_of(grids, "description")
    rows = [row("full", "", answers(model, grids, batch, {"method": "full"}))]
    print(json.dumps(rows[0]), flush=True)
    found: dict[tuple[str, str], Answers] = {}
    for budget in budgets:
        for name in SETTINGS:
            found[name, budget] = answers(model, grids, batch, setting(name) | {"budget": budget})
            rows.append(row(name, budget, found[name, budget]))
            print(json.dumps(rows[-1]), flush=True)
    differences = [difference(*pair, budget, found) for pair in PAIRS for budget in budgets]
    return {"prompt": batch.prompt.shape[1], "answer": batch.answer.shape[1], "rows": rows, "differences": differences}


def compact(report: Mapping[str, Any]) -> str:
    """JSON with a line for each row."""
    lines = []
    for name, value in report.items():
        rows = isinstance(value, list) and ",\n  ".join(map(json.dumps, value))
        lines.append(f" {json.dumps(name)}: " + (f"[\n  {rows}\n ]" if rows else json.dumps(value)))
    return "{\n" + ",\n".join(lines) + "\n}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True, help="of the training; not to be committed")
    parser.add_argument("--out", type=Path, required=True, help="JSON file of the rows")
    parser.add_argument("--steps", type=int, default=Recipe.steps, help="of the whole training")
    parser.add_argument("--width", type=int, default=Recipe.width, help="of the language model")
    parser.add_argument("--max-minutes", type=float, help="end the training there, and judge what it has come to")
    parser.add_argument("--grids", type=int, default=GRIDS, help="held-out pictures")
    parser.add_argument("--budgets", default=",".join(BUDGETS))
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args(arguments)
    recipe = Recipe(steps=args.steps, width=args.width)
    with torch_threads(args.threads):
        model, step = train_model(args.checkpoint, recipe, args.max_minutes)
        grids = held_out(args.grids, SEED)
        report = {
            "command": "python benchmarks/quality/image_grids.py",
            "model": {"parameters": sum(one.numel() for one in model.parameters()), **asdict(recipe)},
            "trained": {"steps": step, "pictures": step * recipe.batch},
            "grids": len(grids),
            "seed": SEED,
            "settings": SETTINGS,
            "page_slots": PAGE_SLOTS,
            "alike": alike(model, batch_of(grids, "description")),
            **judged(model, grids, args.budgets.split(",")),
            "hardware": describe_machine().hardware,
        }
    args.out.write_text(compact(report) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
