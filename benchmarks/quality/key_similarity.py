"""How alike neighbouring keys are, over texts and over layers: what KVMerger's thresholds of layers rest on.

    key_similarity.py smollm2-135m --text wiki=wikitext2_test.txt --text novel=emma.txt --out RESULTS.json

The number is the cosine of the keys of two tokens of one head as a cache holds them, behind RoPE and without the first
four tokens: of tokens beside each other, and of tokens of the same window paired at random. A window's is the mean of
each layer over its heads and places. Windows are read whole with the full cache, in float32. The paper
(arXiv:2407.08454) says that neighbours are alike, and that how much is of the model's layers rather than of the text.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from attention_mass import SINK
from codec_texts import parser_of_texts, tokens, windows
from setting_texts import write
from torch import Tensor
from torch.nn import functional as F

import millpond as mp
from millpond_lab.bench.common.machine import describe_machine

SEED = 7


def alike(keys: Tensor, other: Tensor) -> float:
    """Mean cosine of keys (H, n, D) and others."""
    return float(F.cosine_similarity(keys, other, dim=-1).mean())


@torch.inference_mode()
def of_window(model: Any, ids: Tensor) -> tuple[list[float], list[float]]:
    """Of each layer of a window (1, L): the similarity of neighbours, and of pairs at random."""
    beside, drawn = [], []
    for layer in model(ids, use_cache=True, logits_to_keep=1).past_key_values.layers:
        keys = layer.keys[0, :, SINK:].float()
        order = torch.randperm(keys.shape[1], generator=torch.Generator().manual_seed(SEED))
        beside.append(round(alike(keys[:, 1:], keys[:, :-1]), 4))
        drawn.append(round(alike(keys[:, order], keys[:, order.roll(1)]), 4))
    return beside, drawn


def main() -> None:
    given = parser_of_texts(__doc__)
    given.add_argument("--name", help="of the model in the results; its own by default")
    given.add_argument("--out", type=Path, required=True, help="results of several models are added to it")
    args = given.parse_args()
    torch.set_num_threads(args.threads)
    model, tokenizer = mp.load_model(args.model, "f32"), mp.load_tokenizer(args.model)
    texts: dict[str, Any] = {}
    for name, _, path in (one.partition("=") for one in args.text):
        found = [of_window(model, ids) for ids in windows(tokens(tokenizer, Path(path)), args.windows, args.prompt)]
        texts[name] = {"beside": [one for one, _ in found], "random": [one for _, one in found]}
        print(name, flush=True)
    report = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {"models": {}}
    report["models"][args.name or args.model] = {
        "windows": args.windows,
        "length": args.prompt,
        "hardware": describe_machine().hardware,
        "texts": texts,
    }
    write(args.out, report)


if __name__ == "__main__":
    main()
