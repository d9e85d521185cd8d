"""KL divergence of stored texts from the full cache on windows of several texts, and the bytes of their files.

A model reads `--prompt` tokens of a window into a full cache, which is stored in each codec and restored, and then
predicts the next `--scored` tokens of the text. The number is KL(full || restored), in nats a token.
`transform:BITS` writes a document and counts the bytes of the whole file; `transform:BITS:plain` does without the
header of the text, `transform:BITS:unit` judges a token by the queries of its own 256 alone, and
`transform:BITS:plain:unit` does both. Other names are formats of live pages, such as rotated4 and int4, read into the
cache as they are, whose bytes are those that it holds. `METHOD:BUDGET`, such as `snapkv:50%`, evicts and is stored in
plain numbers, and `snapkv:50%+transform:1.5` in codes, which have two numbers: that to the full cache, and `pair`, that
to the same cache before it was stored. Shares are of 16-bit numbers.

Each number is a line of `--rows`, which an interrupted run goes on with. Windows are spread over a text, the first n of
them evenly for every n, and all texts have their first before one has its second.

    python benchmarks/quality/storage_codec.py MODEL transform:1.5 rotated4 int4 --calibration MODEL.safetensors \\
        --text wiki=wikitext2_test.txt --text novel=emma.txt --windows 12 --rows benchmarks/results/storage-codec.jsonl
    python benchmarks/quality/storage_codec.py MODEL snapkv:50% snapkv:50%+transform:1.5 \\
        --text wiki=wikitext2_test.txt --rows benchmarks/results/storage-eviction.jsonl
"""

from __future__ import annotations

import json
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from codec_texts import divergence, parser_of_texts
from torch import Tensor

import millpond as mp
from millpond.codec.transform.storage_codec import parse_storage_codec
from millpond.codec.transform.transform_file import ModelTransform
from millpond.hf.calibration.texts import tokens_of
from millpond.hf.document import read_document, restore_document, save_document
from millpond.hf.text_storage import TextStorage, transform_of
from millpond.models.cache_argument import cache_argument
from millpond_lab.bench.common.machine import describe_machine

#: Of a text that are tokenized.
MOST_CHARACTERS = 3_000_000
CODED = "transform"
#: What distinguishes a row; a run does not measure again what has one.
KEY = ("model", "dtype", "calibration", "prompt", "scored", "text", "begin", "codec")


def begin_of(number: int, n_tokens: int, length: int) -> int:
    """The first token of a window: the first ones of any number of windows are spread evenly (van der Corput).

    Example:
        >>> [begin_of(number, 180, 100) for number in range(4)]
        [40, 20, 60, 10]
    """
    share, base = 0.0, 0.5
    number += 1
    while number:
        share += base * (number & 1)
        number, base = number >> 1, base / 2
    return int(share * (n_tokens - length))


@torch.no_grad()
def predictions(model: Any, cache: Any, ids: Tensor) -> Tensor:
    """Log probabilities (scored, V) of a cache that goes on with ids."""
    logits: Tensor = model(ids, **cache_argument(cache)).logits[0].float()
    return logits.log_softmax(-1)


def measured(
    model: Any,
    tokenizer: Any,
    codecs: Sequence[str],
    transform: ModelTransform | None,
    prompt: Tensor,
    rest: Tensor,
    file: Path,
) -> dict[str, dict[str, float]]:
    """What each codec loses on a window and the bytes that it takes."""
    found: dict[str, dict[str, float]] = {}
    evicting: dict[str, list[str]] = {}
    for name in codecs:
        if budget_of(name) is not None:
            evicting.setdefault(name.partition("+")[0], []).append(name)
    codecs = [name for name in codecs if budget_of(name) is None]
    stored = [codec for codec in codecs if codec.startswith(CODED)]
    with mp.compress(model, "full") as cache:
        storage = TextStorage(cache, "transform:1.5", transform) if stored else None
        read_document(model, cache, prompt)
        n_full = cache.stats().full_kv_bytes * 2 // model.dtype.itemsize
        for codec in stored:
            assert storage is not None
            found[codec] = saved(cache, prompt, storage, codec, n_full, file.with_name(codec))
        full = predictions(model, cache, rest)
    for setting, names in evicting.items():
        found |= evicted(model, tokenizer, setting, names, transform, prompt, rest, full, n_full, file)
    for codec in codecs:
        if codec in stored:
            begun = time.process_time()
            restored, _ = restore_document(model, file.with_name(codec), calibration=transform)
            found[codec]["restore_s"] = time.process_time() - begun
            with restored:
                other = predictions(model, restored, rest)
        else:
            with mp.compress(model, "full", codec=codec) as cache:
                read_document(model, cache, prompt)
                for layer_cache in cache.layer_caches:
                    layer_cache.run_plans()
                found[codec] = {"bytes": cache.stats().kv_bytes / n_full}
                other = predictions(model, cache, rest)
        found[codec]["kl"] = divergence(full, other)
    return found


def saved(cache: Any, prompt: Tensor, storage: TextStorage, codec: str, n_full: int, path: Path) -> dict[str, float]:
    """The bytes of a text stored in a codec such as `transform:1.5:plain`, and the seconds that it takes."""
    name, bits, *how = codec.split(":")
    storage.codec = parse_storage_codec(f"{name}:{bits}")
    storage.adapt, storage.by_unit = "plain" not in how, "unit" in how
    begun = time.process_time()
    n_bytes = save_document(cache, prompt, path, storage=storage)
    return {"bytes": n_bytes / n_full, "encode_s": time.process_time() - begun}


def budget_of(name: str) -> str | None:
    """The budget of a setting that evicts, such as `snapkv:50%+transform:1.5`; None for a codec."""
    method, _, budget = name.partition("+")[0].partition(":")
    return budget if budget.endswith("%") and method != CODED else None


def evicted(
    model: Any,
    tokenizer: Any,
    setting: str,
    names: Sequence[str],
    transform: ModelTransform | None,
    prompt: Tensor,
    rest: Tensor,
    full: Tensor,
    n_full: int,
    file: Path,
) -> dict[str, dict[str, float]]:
    """What eviction loses on a window, alone and with codes behind it, and the bytes of its files.

    setting: such as `snapkv:50%`. names: itself, if asked, and with codecs behind a plus sign. full: predictions of the
    full cache.
    """
    found: dict[str, dict[str, float]] = {}
    coded = [name for name in names if name != setting]
    method, _, budget = setting.partition(":")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # budgets of few entries
        with mp.compress(model, method, budget, "auto", tokenizer=tokenizer) as cache:
            storage = TextStorage(cache, "transform:1.5", transform) if coded else None
            read_document(model, cache, prompt)
            for name in coded:
                assert storage is not None
                codec = name.partition("+")[2]
                found[name] = saved(cache, prompt, storage, codec, n_full, file.with_name(name))
            n_bytes = save_document(cache, prompt, file)
            alone = predictions(model, cache, rest)
    if setting in names:
        found[setting] = {"bytes": n_bytes / n_full, "kl": divergence(full, alone)}
    for name in coded:
        begun = time.process_time()
        restored, _ = restore_document(model, file.with_name(name), tokenizer=tokenizer, calibration=transform)
        found[name]["restore_s"] = time.process_time() - begun
        with restored:
            other = predictions(model, restored, rest)
        found[name] |= {"kl": divergence(full, other), "pair": divergence(alone, other)}
    return found


def main() -> None:
    parser = parser_of_texts(__doc__, windows=12)
    parser.add_argument("codecs", nargs="+")
    parser.add_argument("--calibration", help="transform file; the one of millpond-models by default")
    parser.add_argument("--name", help="of the model in the rows; its own by default")
    parser.add_argument("--dtype", default="auto", help="of the model; bf16 rounds differently behind any change")
    parser.add_argument("--rows", type=Path, required=True, help="file of rows, which new ones are added to")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, tokenizer = mp.load_model(args.model, args.dtype), mp.load_tokenizer(args.model)
    coded = any(CODED in codec for codec in args.codecs)
    transform = transform_of(model, args.calibration) if coded else None
    file = "shipped" if args.calibration is None else Path(args.calibration).stem
    calibrated = "" if transform is None else f"{file} {transform.digest()[:12]}"
    texts = {name: Path(path) for name, _, path in (given.partition("=") for given in args.text)}
    ids = {
        name: tokens_of(tokenizer, path.read_text(encoding="utf-8", errors="replace")[:MOST_CHARACTERS])
        for name, path in texts.items()
    }
    rows = [json.loads(line) for line in args.rows.read_text().splitlines()] if args.rows.exists() else []
    known = {tuple(row[name] for name in KEY) for row in rows}
    length = args.prompt + args.scored
    about = {"isa": (machine := asdict(describe_machine()))["isa"], "cpu": machine["cpu"], "threads": args.threads}
    for number in range(args.windows):
        for name, tokens in ids.items():
            if len(tokens) < length:
                raise SystemExit(f"text {name} has {len(tokens):,} tokens: give a longer one, or a shorter --prompt")
            begin = begin_of(number, len(tokens), length)
            facts = {
                "model": args.name or args.model,
                "dtype": str(model.dtype).removeprefix("torch."),
                "prompt": args.prompt,
                "scored": args.scored,
                "text": name,
            }
            facts |= {"begin": begin}

            def row_of(codec: str, facts: dict[str, Any] = facts) -> dict[str, Any]:
                return {**facts, "codec": codec, "calibration": calibrated if CODED in codec else ""}

            left = [codec for codec in args.codecs if tuple(row_of(codec)[key] for key in KEY) not in known]
            if not left:
                continue
            window = tokens[begin : begin + length][None]
            with tempfile.TemporaryDirectory() as folder, args.rows.open("a", encoding="utf-8") as file:
                prompt, rest = window[:, : args.prompt], window[:, args.prompt :]
                path = Path(folder) / "text"
                for codec, numbers in measured(model, tokenizer, left, transform, prompt, rest, path).items():
                    row = {**row_of(codec), **{key: round(value, 6) for key, value in numbers.items()}, **about}
                    file.write(json.dumps(row) + "\n")
                    print(
                        name, number, codec, f"KL {row['kl']:.4f} {row.get('pair', '')}, {row['bytes']:.1%}", flush=True
                    )


if __name__ == "__main__":
    main()
