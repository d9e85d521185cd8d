"""What chunks of a store cost and save: the figures of the page on retrieved texts, part by part.

Usage: python benchmarks/quality/chunk_reuse.py TEXT [--part picks] [--model smollm2-135m] [--windows 20] [--chunks 6]
    [--tokens 96] [--suffix 32] [--context 192] [--threads 1] [--seed 0] [--rest FORMATS]
    [--out benchmarks/results/chunk-reuse-smollm2]

Parts of windows, each `chunks` x `tokens` tokens of the text and the `suffix` tokens behind them, from evenly spaced
places. Each chunk is stored behind `context` tokens from another place of the text. The prompt is the window with its
chunks from the store; the number is KL(full || reused), in nats, the mean over the suffix. Ratios are of means over
windows, with a bootstrap over windows that draws both sides together. float32, greedy of nothing: no sampling.

  picks     what is computed again, and which tokens; also of chunks stored alone.
  formats   number formats of the store (--rest auto,bf16,int8,int4), and the same prompt once more, where nothing but
            the format can differ.
  focus     tokens of chunks out of the question's focus end early: row-layers and divergence.
  variants  the first chunk behind the second and behind the third in turns: what each round computes, with further
            variants and without.

Parts of streams and times, see `chunk_streams.py`: zipf, room, preload, alpha. --model random is a tiny random model.
A run goes on from the units that the file of --out has of the same settings.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from chunk_rows import Kept, interval, ratio
from chunk_streams import STREAMS, model_named
from torch import Tensor

import millpond as mp
from millpond.cache.chunks.store import ChunkStore
from millpond.engine.chunks.prompt import PromptSpan
from millpond.engine.chunks.reuse import ChunkReuse, model_mark
from millpond.engine.engine import Engine
from millpond.engine.request import CacheOptions
from millpond.engine.step_executor import PromptSegment, run
from millpond.policy.reuse import Pick
from millpond_lab.bench.common.report import markdown_table

SHARES = (0.05, 0.15, 0.30)
PICKS: tuple[Pick, ...] = ("attention", "head", "deviation", "random")
ALPHA = 0.17  # of `auto`: about 15 % of chunks with nothing in common with their old context
#: alpha, focus and coverage; the first one is what the others are compared with.
FOCUSES = (
    (ALPHA, 0, 0.5),
    *((ALPHA, layers, 0.5) for layers in (2, 4, 6)),
    (ALPHA, 6, 0.7),
    (ALPHA, 4, 0.9),
    (0.25, 4, 0.5),
    (0.25, 6, 0.7),
)
ROUNDS = 4  #: of each two contexts
#: Name of a setting -> KL, and the share of the chunk tokens that was computed.
Measured = dict[str, tuple[float, float]]
Windowed = Callable[["Reader", list[np.ndarray], list[np.ndarray], argparse.Namespace], Measured]


class Reader:
    """A model that reads prompts of parts, each with its own store."""

    def __init__(self, name: str, suffix: int) -> None:
        self._model = model_named(name)
        self._mark = model_mark(self._model, None)
        self._engine = Engine(self._model, method="full")
        self._suffix = suffix

    def store(self, rest: str = "auto", keep_above: float = 1) -> ChunkReuse:
        """A store in memory; its chunks stay as they were stored first, unless `keep_above` is below 1."""
        store = ChunkStore(None, memory="4GiB", alpha=ALPHA, dtype=rest, keep_above=keep_above)
        return ChunkReuse(store, self._engine._model, self._mark)

    @property
    def n_layers(self) -> int:
        return len(self._engine._model.layers)

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


def measure(reader: Reader, parts: list[np.ndarray], foreign: list[np.ndarray], _: argparse.Namespace) -> Measured:
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
    found: Measured = {}
    for name, reuse, recompute, pick in settings:
        got, share = reader.read(reuse, parts, recompute, pick)
        found[name] = divergence(full, got), share
    return found


def divergence(full: Tensor, got: Tensor) -> float:
    """KL(full || got), in nats, the mean over rows of log probabilities."""
    return float((full.exp() * (full - got)).sum(-1).mean())


def measure_formats(
    reader: Reader, parts: list[np.ndarray], foreign: list[np.ndarray], args: argparse.Namespace
) -> Measured:
    """As `measure`, for number formats."""
    full, _ = reader.read(reader.store(), parts, 1)
    alone = reader.store()
    for chunk in parts[:-1]:
        reader.read(alone, [chunk, parts[-1][:1]], "auto")
    found: Measured = {}
    settings: list[tuple[str, ChunkReuse, Any]] = [("alone / nothing", alone, 0)]
    for rest in args.rest:
        behind, same = reader.store(rest), reader.store(rest)
        for chunk, context in zip(parts[:-1], foreign, strict=True):
            stored_behind(reader, behind, context, chunk)
        reader.read(same, parts, "auto")
        name = f", {rest}" if rest != "auto" else ""
        settings += [(f"behind / nothing{name}", behind, 0), (f"behind / auto{name}", behind, "auto")]
        settings.append((f"the same prompt{', float32' if rest == 'auto' else name}", same, 0))
    for name, reuse, recompute in settings:
        got, share = reader.read(reuse, parts, recompute)
        found[name] = divergence(full, got), share
    return found


def measure_focus(
    reader: Reader, parts: list[np.ndarray], foreign: list[np.ndarray], _: argparse.Namespace
) -> Measured:
    """As `measure`, for focuses; the share is of the row-layers of chunks."""
    behind = reader.store()
    for chunk, context in zip(parts[:-1], foreign, strict=True):
        stored_behind(reader, behind, context, chunk)
    full, _share = reader.read(behind, parts, 1)
    n_rows, store = sum(map(len, parts[:-1])) * reader.n_layers, behind.store
    found: Measured = {}
    for alpha, layers, coverage in FOCUSES:
        store.alpha, store.focus, store.coverage = alpha, layers, coverage
        before = store.stats().left_out
        got, share = reader.read(behind, parts, "auto")
        name = f"alpha {alpha:g}, focus {layers}" + (f", coverage {coverage:g}" if layers else "")
        found[name] = divergence(full, got), share - (store.stats().left_out - before) / n_rows
    return found


def measure_variants(reader: Reader, parts: list[np.ndarray], _: list[np.ndarray], __: argparse.Namespace) -> Measured:
    """As `measure`, of a chunk behind two others in turns, by round."""
    chunk, end = parts[0], parts[-1]
    prompts = [[lead, chunk, end] for lead in parts[1:3]]
    fulls = [reader.read(reader.store(), prompt, 1)[0] for prompt in prompts]
    found: Measured = {}
    for name, keep_above in (("kept", 0.05), ("none", 1.0)):
        store = reader.store(keep_above=keep_above)
        for turn in range(ROUNDS):
            read = [reader.read(store, prompt, "auto") for prompt in prompts]
            kl = np.mean([divergence(full, got) for full, (got, _share) in zip(fulls, read, strict=True)])
            found[f"{name}, round {turn + 1}"] = float(kl), float(np.mean([share for _got, share in read]))
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


def picks_page(found: list[Measured]) -> tuple[str, list[dict[str, Any]]]:
    """Settings against the chunks used as they are, stored alone and behind another text."""
    kl = {name: np.array([window[name][0] for window in found]) for name in found[0]}
    lines, data = [], []
    for name in kl:
        share = float(np.mean([window[name][1] for window in found]))
        alone, behind = ratio(kl[name], kl["alone / nothing"]), ratio(kl[name], kl["behind / nothing"])
        data.append(
            {"setting": name, "kl": float(kl[name].mean()), "computed": share, "of_alone": alone, "of_behind": behind}
        )
        lines.append((name, f"{max(kl[name].mean(), 0):.4f}", f"{share:.1%}", interval(alone), interval(behind)))
    head = ("stored / computed again", "KL, nats", "of chunk tokens", "x naive, stored alone", "x naive, stored behind")
    return markdown_table(head, lines), data


def focus_page(found: list[Measured]) -> tuple[str, list[dict[str, Any]]]:
    """Focuses against none."""
    kl = {name: np.array([window[name][0] for window in found]) for name in found[0]}
    rows = {name: np.array([window[name][1] for window in found]) for name in found[0]}
    base = next(iter(kl))
    lines, data = [], []
    for name in kl:
        fewer, against = 1 - float(rows[name].mean() / rows[base].mean()), ratio(kl[name], kl[base])
        data.append({"setting": name, "kl": float(kl[name].mean()), "fewer_row_layers": fewer, "of_base": against})
        lines.append((name, f"{kl[name].mean():.4f}", f"{fewer:.0%}", interval(against)))
    return markdown_table(("setting", "KL, nats", "fewer row-layers", f"KL, x {base}"), lines), data


def variants_page(found: list[Measured]) -> tuple[str, list[dict[str, Any]]]:
    """Rounds, with further variants and without."""
    lines, data = [], []
    for name in found[0]:
        kl, share = (float(np.mean([window[name][part] for window in found])) for part in (0, 1))
        data.append({"setting": name, "kl": kl, "computed": share})
        lines.append((name, f"{max(kl, 0):.4f}", f"{share:.1%}"))
    return markdown_table(("further variants, round", "KL, nats", "of chunk tokens computed"), lines), data


WINDOWED: dict[str, tuple[Windowed, Callable[[list[Measured]], tuple[str, list[dict[str, Any]]]]]] = {
    "picks": (measure, picks_page),
    "formats": (measure_formats, picks_page),
    "focus": (measure_focus, focus_page),
    "variants": (measure_variants, variants_page),
}


def run_windows(ids: np.ndarray, args: argparse.Namespace, kept: Kept) -> None:
    """Measure the windows of a part that the file does not have, and write its page."""
    measure_window, page_of = WINDOWED[args.part]
    reader = Reader(args.model, args.suffix)
    found = [
        kept.unit(f"window {number + 1} of {args.windows}", partial(measure_window, reader, parts, foreign, args))
        for number, (parts, foreign) in enumerate(windows(ids, args))
    ]
    shown, rows = page_of(found)
    page = (
        f"# Reused chunks on {args.model}: {args.part}\n\n{len(found)} windows of {args.chunks} x {args.tokens} tokens "
    )
    page += (
        f"of `{args.text.name}` and {args.suffix} behind them, float32; intervals are 95 %, over windows.\n\n{shown}"
    )
    kept.write(page, rows=rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--part", choices=[*WINDOWED, *STREAMS], default="picks")
    parser.add_argument("--model", default="smollm2-135m")
    for name, value in (("windows", 20), ("chunks", 6), ("tokens", 96), ("suffix", 32), ("context", 192)):
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, value in (("queries", 60), ("seeds", 3), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=value, help="of streams and times")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--rest", type=lambda text: text.split(","), default=["auto"], help="formats; auto is the first"
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    settings = {name: value for name, value in vars(args).items() if name not in ("out", "text")}
    kept = Kept(args.out, {"text": args.text.name, **settings, "alpha_of_auto": ALPHA})
    if args.part in STREAMS:
        STREAMS[args.part](args, kept)
        return
    tokenizer = mp.load_tokenizer(args.model)
    text = args.text.read_text(encoding="utf-8")
    ids = np.array(tokenizer(text[:600_000], add_special_tokens=False)["input_ids"], dtype=np.int64)
    run_windows(ids, args, kept)


if __name__ == "__main__":
    main()
