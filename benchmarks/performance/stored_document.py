"""A text in the storage codec against reading it: CPU seconds of storing it, by part, and of its first token.

Usage: python benchmarks/performance/stored_document.py MODEL --text FILE [--tokens 4096] [--codec transform:1.5]
    [--dtype bf16] [--rounds 3] [--threads 1] [--json FILE]

In each round the text is read with its queries sampled, stored, and restored for one more token; then it is read,
plain, up to the same token. "exact" is finding the exact tokens and "encode" all between entries and pages; both are
parts of "storing". "first token" is restoring the file and one pass over one token. Figures are medians of rounds,
seconds of the process's CPU time and, in brackets, of the clock; shares are medians of the rounds' shares of reading.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
from script import keep

import millpond as mp
from millpond.hf import text_storage
from millpond.hf.document import restore_document, save_document

#: Functions between entries and pages.
ENCODING = ["projected", "moments", "adapted_headers", "encode"]


class Clock:
    """Seconds of parts, CPU time and time."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def measured(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            with torch.inference_mode():
                cpu, clock = process_time(), perf_counter()
                found = call(*args, **kwargs)
                own = self.seconds.setdefault(part, [0.0, 0.0])
                own[0] += process_time() - cpu
                own[1] += perf_counter() - clock
            return found

        return timed


def store(clock: Clock, save: Callable[[], object]) -> None:
    """Store a text, and tell its parts apart."""
    before = {name: getattr(text_storage, name) for name in ENCODING}
    exact = text_storage.TextStorage._exact
    for name, function in before.items():
        setattr(text_storage, name, clock.measured("encode", function))
    text_storage.TextStorage._exact = clock.measured("exact", exact)  # type: ignore[method-assign]
    clock.measured("storing", save)()
    for name, function in before.items():
        setattr(text_storage, name, function)
    text_storage.TextStorage._exact = exact  # type: ignore[method-assign]


def a_round(model: Any, ids: torch.Tensor, codec: str, path: Path) -> dict[str, list[float]]:
    clock = Clock()
    text, last = ids[:, :-1], ids[:, -1:]

    def first_token() -> None:
        cache, _ = restore_document(model, path)
        model(last, cache=cache, logits_to_keep=1)

    def read_and_token() -> None:
        with mp.compress(model, "full", codec="auto") as cache:
            model(text, cache=cache, logits_to_keep=1)
            model(last, cache=cache, logits_to_keep=1)

    with mp.compress(model, "full", codec="auto") as cache:
        storage = text_storage.TextStorage(cache, codec, None)
        clock.measured("reading, sampled", model)(text, cache=cache, logits_to_keep=1)
        store(clock, lambda: save_document(cache, text, path, storage=storage))
    clock.measured("first token", first_token)()
    clock.measured("reading", read_and_token)()
    return clock.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--codec", default="transform:1.5")
    parser.add_argument("--dtype", default="bf16", help="Of the model; f32 is faster on a CPU that has no bf16.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, tokenizer = mp.load_model(args.model, args.dtype), mp.load_tokenizer(args.model)
    ids = tokenizer(args.text.read_text()[: 8 * args.tokens], return_tensors="pt")["input_ids"][:, : args.tokens + 1]
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "text.safetensors"
        for _ in range(args.rounds):
            rounds.append(a_round(model, ids, args.codec, path))
            print({part: [round(x, 2) for x in own] for part, own in rounds[-1].items()}, flush=True)
    results: dict[str, object] = {}
    for part in rounds[0]:
        of = [one[part] for one in rounds]
        cpu, clock = (statistics.median(own[n] for own in of) for n in (0, 1))
        share = [
            statistics.median(own[n] / one["reading"][n] for own, one in zip(of, rounds, strict=True)) for n in (0, 1)
        ]
        results[part] = {"cpu_s": cpu, "clock_s": clock, "share_of_reading": share}
        print(f"{part}: {cpu:.2f} s ({clock:.2f} s), {share[0]:.3f} ({share[1]:.3f}) of reading")
    keep(args, [results], rounds=rounds)


if __name__ == "__main__":
    main()
