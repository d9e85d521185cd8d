"""KL divergence of FlexGen's sparse values from all values on windows of several texts, and the bytes that are read.

A model reads `--prompt` tokens of a window, and then the next `--scored` ones in decoding steps, in which every layer
attends as one on the host of a device does: it scores all keys, and reads the values of a share of the entries. The
numbers are KL(all || share), in nats a token, and the bytes of keys and values that the steps read, as a share of all.

    python benchmarks/quality/sparse_values.py MODEL 1 0.5 0.1 --text wiki=wikitext2_test.txt --out FILE.json
"""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from codec_texts import divergence, parser_of_texts, tokens, windows
from rich.progress import track
from torch import Tensor

import millpond as mp
from millpond.cache.attention.host_attention import HostAttention
from millpond.cache.attention.sparse_values import SparseValues
from millpond.cache.layer.layer_cache import LayerCache
from millpond.models.cache_argument import cache_argument
from millpond_lab.bench.common.machine import describe_machine


def decoded(model: Any, ids: Tensor, prompt: int, sparse: SparseValues | None) -> Tensor:
    """Log probabilities (scored, V) of the steps behind a prompt; None reads all values."""
    with patch.object(LayerCache, "_attention_type", HostAttention):
        held = mp.compress(model, "full", codec="auto", native_layers=False)
    with held as cache, torch.no_grad():
        model(ids[:, :prompt], **cache_argument(cache), logits_to_keep=1)
        for layer_cache in cache.layer_caches:
            assert isinstance(layer_cache.attention, HostAttention)
            layer_cache.attention.sparse = sparse
        steps = [model(ids[:, i : i + 1], **cache_argument(cache)).logits[0, 0] for i in range(prompt, ids.shape[1])]
    return torch.stack(steps).float().log_softmax(-1)


def bytes_of_all(model: Any, prompt: int, scored: int) -> int:
    """Bytes of all keys and values that so many steps behind a prompt attend to, their own included."""
    entries = sum(range(prompt + 1, prompt + scored + 1))
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    row = config.num_key_value_heads * head_dim
    return int(entries * config.num_hidden_layers * 2 * row * model.dtype.itemsize)


def main() -> None:
    parser = parser_of_texts(__doc__)
    parser.add_argument("shares", nargs="+", type=float)
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, tokenizer = mp.load_model(args.model), mp.load_tokenizer(args.model)
    found: dict[float, dict[str, list[float]]] = {share: {} for share in args.shares}
    read, read_all = dict.fromkeys(args.shares, 0), 0
    for name, _, path in (given.partition("=") for given in args.text):
        for window in track(windows(tokens(tokenizer, Path(path)), args.windows, args.prompt + args.scored), name):
            every = decoded(model, window, args.prompt, None)
            read_all += bytes_of_all(model, args.prompt, args.scored)
            for share in args.shares:
                sparse = SparseValues(share)
                other = decoded(model, window, args.prompt, sparse)
                read[share] += sparse.bytes_read
                found[share].setdefault(name, []).append(divergence(every, other))
    rows = [{"share": share, "bytes": read[share] / read_all, "kl": found[share]} for share in args.shares]
    for row in rows:
        means = (f"{name} {statistics.mean(kl):.4f}" for name, kl in row["kl"].items())
        print(f"{row['share']:g}: {row['bytes']:.1%} of the bytes;", *means)
    about = {"model": args.model, "prompt": args.prompt, "scored": args.scored, "windows": args.windows, "rows": rows}
    report = about | {"machine": asdict(describe_machine())}
    args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
