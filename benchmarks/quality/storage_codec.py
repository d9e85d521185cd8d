"""KL divergence of stored texts from the full cache on windows of several texts, and the bytes of their files.

A model reads `--prompt` tokens of a window into a full cache, which is stored in each codec and restored, and then
predicts the next `--scored` tokens of the text. The number is KL(full || restored), in nats a token, the mean over the
windows of a text with its standard error. `transform:BITS` writes a document and counts the bytes of the whole file;
`transform:BITS:plain` does without the header of the text, and `transform:BITS:unit` judges a token by the queries of
its own 256 alone. Other names are formats of live pages, such as rotated4 and int4, read into the cache as they are,
whose bytes are those that it holds. Shares are of 16-bit numbers.

    python benchmarks/quality/storage_codec.py MODEL transform:1.5 rotated4 int4 --calibration MODEL.safetensors \\
        --text wiki=wikitext2_test.txt --text novel=emma.txt --windows 12 --out benchmarks/results/storage-codec
"""

from __future__ import annotations

import json
import statistics
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from codec_texts import divergence, parser_of_texts
from rich.console import Console
from rich.progress import track
from torch import Tensor

import millpond as mp
from millpond.codec.transform.transform_file import load_transform
from millpond.hf.calibration.texts import tokens_of, windows_of
from millpond.hf.document import read_document, restore_document, save_document
from millpond.hf.text_storage import TextStorage
from millpond.models.cache_argument import cache_argument
from millpond_lab.bench.common.machine import describe_machine
from millpond_lab.bench.common.report import markdown_table, write_report

#: Of a text that are tokenized.
MOST_CHARACTERS = 3_000_000


@torch.no_grad()
def predictions(model: Any, cache: Any, ids: Tensor) -> Tensor:
    """Log probabilities (scored, V) of a cache that goes on with ids."""
    logits: Tensor = model(ids, **cache_argument(cache)).logits[0].float()
    return logits.log_softmax(-1)


def stored(model: Any, codec: str, calibration: Any, prompt: Tensor, rest: Tensor, file: Path) -> tuple[Tensor, int]:
    """Log probabilities behind a text that was stored and restored, and the bytes of its file."""
    name, bits, *how = codec.split(":")
    with mp.compress(model, "full") as cache:
        storage = TextStorage(cache, f"{name}:{bits}", calibration, adapt="plain" not in how, by_unit="unit" in how)
        read_document(model, cache, prompt)
        n_bytes = save_document(cache, prompt, file, storage=storage)
    restored, _ = restore_document(model, file, calibration=calibration)
    with restored:
        return predictions(model, restored, rest), n_bytes


def live(model: Any, codec: str, prompt: Tensor, rest: Tensor) -> tuple[Tensor, int]:
    """Log probabilities behind a text in a format of live pages, and the bytes that are held."""
    with mp.compress(model, "full", codec=codec) as cache:
        read_document(model, cache, prompt)
        for layer_cache in cache.layer_caches:
            layer_cache.run_plans()
        n_bytes = cache.stats().kv_bytes
        return predictions(model, cache, rest), n_bytes


def main() -> None:
    parser = parser_of_texts(__doc__, windows=12)
    parser.add_argument("codecs", nargs="+")
    parser.add_argument("--calibration", help="transform file")
    parser.add_argument("--out", type=Path, help="name of the JSON and Markdown files, without their endings")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, tokenizer = mp.load_model(args.model), mp.load_tokenizer(args.model)
    calibration = None if args.calibration is None else load_transform(args.calibration)
    found: dict[str, dict[str, list[float]]] = {codec: {} for codec in args.codecs}
    shares: dict[str, list[float]] = {codec: [] for codec in args.codecs}
    with tempfile.TemporaryDirectory() as folder:
        for given in args.text:
            name, _, path = given.partition("=")
            text = Path(path).read_text(encoding="utf-8", errors="replace")[:MOST_CHARACTERS]
            ids = tokens_of(tokenizer, text)
            for window in track(windows_of(ids, args.windows, args.prompt + args.scored), description=name):
                if len(window) < args.prompt + args.scored:
                    raise SystemExit(
                        f"text {name} has {len(window):,} tokens: give a longer one, or a shorter --prompt"
                    )
                prompt, rest = window[None, : args.prompt], window[None, args.prompt :]
                with mp.compress(model, "full") as cache:
                    read_document(model, cache, prompt)
                    n_full = cache.stats().full_kv_bytes * 2 // model.dtype.itemsize
                    full = predictions(model, cache, rest)
                for codec in args.codecs:
                    if codec.startswith("transform"):
                        other, n_bytes = stored(model, codec, calibration, prompt, rest, Path(folder) / "text")
                    else:
                        other, n_bytes = live(model, codec, prompt, rest)
                    shares[codec].append(n_bytes / n_full)
                    found[codec].setdefault(name, []).append(divergence(full, other))
            print(json.dumps({codec: statistics.mean(texts[name]) for codec, texts in found.items()}), flush=True)
    names = [given.partition("=")[0] for given in args.text]
    rows = [
        [codec, f"{statistics.mean(shares[codec]):.1%}", *(_with_error(texts[name]) for name in names)]
        for codec, texts in found.items()
    ]
    table = markdown_table(["codec", "bytes", *names], rows)
    Console().print(table)
    if args.out is not None:
        about = {
            "model": args.model,
            "prompt": args.prompt,
            "scored": args.scored,
            "windows": args.windows,
            "calibration": None if calibration is None else asdict(calibration.calibrated),
            "machine": asdict(describe_machine()),
            "bytes_share": shares,
            "kl": found,
        }
        title = (
            f"# Stored texts, {args.model}\n\n{args.windows} windows of {args.prompt:,} tokens and {args.scored} more. "
        )
        write_report(
            args.out.parent,
            args.out.name,
            about,
            f"{title}KL against the full cache in nats a token, ± standard error.\n\n{table}\n",
        )


def _with_error(kl: list[float]) -> str:
    error = statistics.stdev(kl) / len(kl) ** 0.5 if len(kl) > 1 else 0.0
    return f"{statistics.mean(kl):.4f} ± {error:.4f}"


if __name__ == "__main__":
    main()
