"""KL divergence of prompts that reuse stored chunks from the same prompts computed in full.

Usage: python benchmarks/quality/chunk_reuse.py TEXT [--model smollm2-135m] [--windows 20] [--chunks 6] [--tokens 96]
    [--suffix 32] [--context 192] [--threads 1] [--seed 0] [--rest FORMATS] [--out benchmarks/results/chunk-reuse]

A window is `chunks` x `tokens` tokens of the text and the `suffix` tokens behind them, from evenly spaced places. Each
chunk is stored once alone, and once behind `context` tokens from another place of the text. The prompt is the window
with its chunks from the store; the number is KL(full || reused), in nats, the mean over the suffix. Ratios are of means
over windows, with a bootstrap over windows that draws both sides together. float32, greedy of nothing: no sampling.

With --rest (such as auto,bf16,int8,int4) number formats of the store are compared instead of picks: of chunks stored
behind another text, and of the same prompt once more, where nothing but the format can differ.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import millpond as mp
from millpond.cache.chunks.store import ChunkStore
from millpond.engine.chunks.prompt import PromptSpan
from millpond.engine.chunks.reuse import ChunkReuse, model_mark
from millpond.engine.engine import Engine
from millpond.engine.request import CacheOptions
from millpond.engine.step_executor import PromptSegment, run
from millpond.policy.reuse import Pick
from millpond_lab.bench.common.machine import describe_machine
from millpond_lab.bench.common.report import markdown_table

SHARES = (0.05, 0.15, 0.30)
PICKS: tuple[Pick, ...] = ("attention", "head", "deviation", "random")
ALPHA = 0.17  # of `auto`: about 15 % of chunks with nothing in common with their old context


class Reader:
    """A model that reads prompts of parts, each with its own store."""

    def __init__(self, name: str, suffix: int) -> None:
        self._model = mp.load_model(name, "f32")
        self._mark = model_mark(self._model, None)
        self._engine = Engine(self._model, method="full")
        self._suffix = suffix

    def store(self, rest: str = "auto") -> ChunkReuse:
        store = ChunkStore(None, memory="4GiB", alpha=ALPHA, dtype=rest)
        return ChunkReuse(store, self._engine._model, self._mark)

    def read(
        self, reuse: ChunkReuse, parts: Sequence[np.ndarray], recompute: Any, pick: Pick = "attention"
    ) -> tuple[Tensor, float]:
        """Log probabilities (suffix, vocabulary) after chunks and a last part, and the share of chunk tokens computed.

        Chunks that have no variant are stored.
        """
        ends = np.cumsum([len(part) for part in parts]).tolist()
        spans = [
            PromptSpan(end - len(part), end, place < len(parts) - 1)
            for place, (part, end) in enumerate(zip(parts, ends, strict=True))
        ]
        ids = np.concatenate(parts)
        options = CacheOptions(recompute=recompute, pick=pick)
        blend = reuse.begin(ids, spans, options, len(parts[-1]), None)
        share = float(blend.computed[: spans[-1].begin].mean())
        stack = self._engine._parts.decode_groups.group(CacheOptions(method="full")).cache_factory.make_cache(len(ids))
        part = PromptSegment(stack, ids, 0, True, True, blend.span(0, len(ids)))
        with torch.no_grad():
            (logits,) = run(self._engine._model, [], [part])
        blend.finish()
        stack.clear()
        return torch.log_softmax(logits[-len(parts[-1]) :].float(), -1), share


def windows(ids: np.ndarray, args: argparse.Namespace) -> Iterator[tuple[list[np.ndarray], list[np.ndarray]]]:
    """Chunks and suffix of each window, and the foreign contexts of its chunks."""
    rng = np.random.default_rng(args.seed)
    size = args.chunks * args.tokens + args.suffix
    for place in range(args.windows):
        begin = (place * (len(ids) - size)) // args.windows
        window = ids[begin : begin + size]
        cuts = [*range(args.tokens, args.chunks * args.tokens + 1, args.tokens)]
        far = [
            int(begin + size + rng.integers(0, len(ids) - size - args.context)) % (len(ids) - args.context)
            for _ in range(args.chunks)
        ]
        yield np.split(window, cuts), [ids[at : at + args.context] for at in far]


def measure(reader: Reader, parts: list[np.ndarray], foreign: list[np.ndarray]) -> dict[str, tuple[float, float]]:
    """KL and share of the chunk tokens that were computed, by setting."""
    alone, behind = reader.store(), reader.store()
    end = parts[-1]
    for chunk, context in zip(parts[:-1], foreign, strict=True):
        reader.read(alone, [chunk, end[:1]], "auto")
        # the context is a text, not a chunk: only the chunk is stored
        stored_behind(reader, behind, context, chunk)
    full, _ = reader.read(alone, parts, 1)
    settings: list[tuple[str, ChunkReuse, Any, Pick]] = [
        ("alone / nothing", alone, 0, "attention"),
        ("behind / nothing", behind, 0, "attention"),
        ("behind / auto", behind, "auto", "attention"),
    ]
    settings.append(("alone / head 15%", alone, 0.15, "head"))
    settings += [
        (f"behind / {pick} {share:.0%}", behind, share, pick)
        for share in SHARES
        for pick in (PICKS if share < SHARES[-1] else PICKS[:2])
    ]
    found: dict[str, tuple[float, float]] = {}
    for name, reuse, recompute, pick in settings:
        got, share = reader.read(reuse, parts, recompute, pick)
        found[name] = float((full.exp() * (full - got)).sum(-1).mean()), share
    return found


def measure_formats(
    reader: Reader, parts: list[np.ndarray], foreign: list[np.ndarray], formats: Sequence[str]
) -> dict[str, tuple[float, float]]:
    """As `measure`, for number formats."""
    full, _ = reader.read(reader.store(), parts, 1)
    alone = reader.store()
    for chunk in parts[:-1]:
        reader.read(alone, [chunk, parts[-1][:1]], "auto")
    found: dict[str, tuple[float, float]] = {}
    settings: list[tuple[str, ChunkReuse, Any]] = [("alone / nothing", alone, 0)]
    for rest in formats:
        behind, same = reader.store(rest), reader.store(rest)
        for chunk, context in zip(parts[:-1], foreign, strict=True):
            stored_behind(reader, behind, context, chunk)
        reader.read(same, parts, "auto")
        name = f", {rest}" if rest != "auto" else ""
        settings += [(f"behind / nothing{name}", behind, 0), (f"behind / auto{name}", behind, "auto")]
        settings.append((f"the same prompt{', float32' if rest == 'auto' else name}", same, 0))
    for name, reuse, recompute in settings:
        got, share = reader.read(reuse, parts, recompute)
        found[name] = float((full.exp() * (full - got)).sum(-1).mean()), share
    return found


def stored_behind(reader: Reader, reuse: ChunkReuse, context: np.ndarray, chunk: np.ndarray) -> None:
    """Store a chunk behind a context that is not stored."""
    ids = np.concatenate([context, chunk, chunk[:1]])
    n, m = len(context), len(chunk)
    spans = [PromptSpan(0, n, False), PromptSpan(n, n + m, True), PromptSpan(n + m, n + m + 1, False)]
    blend = reuse.begin(ids, spans, CacheOptions(), 1, None)
    stack = reader._engine._parts.decode_groups.group(CacheOptions(method="full")).cache_factory.make_cache(len(ids))
    with torch.no_grad():
        run(reader._engine._model, [], [PromptSegment(stack, ids, 0, True, False, blend.span(0, len(ids)))])
    blend.finish()
    stack.clear()


def ratio(top: np.ndarray, base: np.ndarray, seed: int = 7) -> tuple[float, float, float]:
    """Ratio of means, and its 95 % interval by a bootstrap over windows."""
    drawn = np.random.default_rng(seed).integers(0, len(top), (2000, len(top)))
    low, high = np.percentile(top[drawn].mean(1) / base[drawn].mean(1), [2.5, 97.5])
    return float(top.mean() / base.mean()), float(low), float(high)


def table(rows: dict[str, list[tuple[float, float]]]) -> tuple[str, list[dict[str, Any]]]:
    kl = {name: np.array([one for one, _ in found]) for name, found in rows.items()}
    lines, data = [], []
    for name, found in rows.items():
        share = float(np.mean([one for _, one in found]))
        against_alone = ratio(kl[name], kl["alone / nothing"])
        against_behind = ratio(kl[name], kl["behind / nothing"])
        data.append(
            {
                "setting": name,
                "kl": float(kl[name].mean()),
                "computed": share,
                "of_alone": against_alone,
                "of_behind": against_behind,
                "windows": kl[name].tolist(),
            }
        )
        lines.append(
            (
                name,
                f"{max(kl[name].mean(), 0):.4f}",
                f"{share:.1%}",
                *(f"{mid:.2f} [{low:.2f}, {high:.2f}]" for mid, low, high in (against_alone, against_behind)),
            )
        )
    head = ("stored / computed again", "KL, nats", "of chunk tokens", "x naive, stored alone", "x naive, stored behind")
    return markdown_table(head, lines), data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    for name, value in (("windows", 20), ("chunks", 6), ("tokens", 96), ("suffix", 32), ("context", 192)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rest", type=lambda text: text.split(","), help="formats; the first must be auto")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = mp.load_tokenizer(args.model)
    text = args.text.read_text(encoding="utf-8")
    ids = np.array(tokenizer(text[:600_000], add_special_tokens=False)["input_ids"], dtype=np.int64)
    reader, rows = Reader(args.model, args.suffix), {}
    began = time.perf_counter()
    for number, (parts, foreign) in enumerate(windows(ids, args)):
        formats = args.rest and measure_formats(reader, parts, foreign, args.rest)
        for name, found in (formats or measure(reader, parts, foreign)).items():
            rows.setdefault(name, []).append(found)
        print(f"window {number + 1} of {args.windows}, {time.perf_counter() - began:.0f} s", flush=True)
        if args.out is not None and (number + 1) % 5 == 0:
            write(args, rows)
    print(table(rows)[0])
    if args.out is not None:
        write(args, rows)


def write(args: argparse.Namespace, rows: dict[str, list[tuple[float, float]]]) -> None:
    shown, data = table(rows)
    n = len(next(iter(rows.values())))
    settings = {name: value for name, value in vars(args).items() if name not in ("out", "text")}
    about = {"text": args.text.name, "windows_done": n, **settings, "alpha_of_auto": ALPHA}
    report = describe_machine().header("chunk-reuse") | {"settings": about, "rows": data}
    args.out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    page = f"# Reused chunks on {args.model}\n\n{n} windows of {args.chunks} x {args.tokens} tokens of "
    page += f"`{args.text.name}` and {args.suffix} behind them, float32; intervals are 95 %, over windows.\n\n{shown}\n"
    args.out.with_suffix(".md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
