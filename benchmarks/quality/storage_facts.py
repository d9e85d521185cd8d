"""Facts in texts that were stored and restored before anybody asked, and how many a model still states.

Texts of 1,024 to 4,096 tokens are drawn by a seed: neighbouring paragraphs of a book with eight facts between them (a
code, a name, a value, a date), none in the first or the newest tokens. A model reads a text into a cache, which is
stored in a codec and restored, or loses entries to a method; then it is asked for each fact, with greedy answers from
a copy of the same cache. `outside` says that no token of the answer is stored as it is in any layer of the stored text.

    python benchmarks/quality/storage_facts.py MODEL full transform:1.5 snapkv:17% h2o:34% --calibration FILE \\
        --text emma.txt --text wikitext2_test.txt --contexts 14 --rows benchmarks/results/storage-facts.jsonl
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

import millpond as mp
from millpond.codec.transform.exact_tokens import NEWEST
from millpond.hf.document import read_document, restore_document, save_document
from millpond.hf.text_storage import TextStorage, transform_of
from millpond.models.cache_argument import cache_argument
from millpond_lab.evals.data.chat_facts import MONTHS, paragraphs

SEED, FACTS, ANSWER = 48, 8, 12
#: Tokens of a text.
SHORTEST, LONGEST = 1024, 4096
PLACES = ("Velmar", "Okotin", "Rasulm", "Betdor", "Liafen", "Garise", "Novpel", "Quomar", "Tinvel", "Ulmoko", "Dorras")
NAMES = ("Ellen", "Marcus", "Judith", "Oscar", "Helga", "Victor", "Nadia", "Felix", "Greta", "Simon", "Clara", "Boris")
FAMILIES = ("Harding", "Pelmore", "Quill", "Stanton", "Weaver", "Ashdown", "Corbet", "Lindgren", "Marsh", "Tolland")
#: A fact of each kind up to what is asked; the model goes on with the question's beginning, which is the same.
KINDS = (
    "The access code of the archive in {place} is",
    "The keeper of the lighthouse at {place} is called",
    "The number of steps of the tower of {place} is",
    "The old bridge at {place} was opened on",
)


@dataclass(frozen=True)
class Fact:
    """A sentence of a text: its beginning, by which it is asked for, and what an answer contains."""

    begins: str
    states: str


@dataclass(frozen=True)
class FactText:
    """The ids of a text (1, n), its facts, and where the tokens of their answers stand."""

    ids: Tensor
    facts: tuple[Fact, ...]
    answers: tuple[range, ...]


def drawn_facts(rng: random.Random) -> list[Fact]:
    """Eight facts about different places."""
    facts = []
    for number, place in enumerate(rng.sample(PLACES, FACTS)):
        kind = number % len(KINDS)
        states = (
            lambda: f"{rng.randint(100, 999)}-{rng.randint(100, 999)}",
            lambda: f"{rng.choice(NAMES)} {rng.choice(FAMILIES)}",
            lambda: str(rng.randint(1000, 9999)),
            lambda: f"{rng.randint(2, 28)} {rng.choice(MONTHS)} {rng.randint(1901, 1999)}",
        )[kind]()
        facts.append(Fact(KINDS[kind].format(place=place), states))
    return facts


def draw(tokenizer: Any, text: list[str], number: int, contexts: int) -> FactText:
    """A text with facts, the same for the same number."""
    rng = random.Random(f"{SEED}.{number}")
    wanted = SHORTEST + (LONGEST - SHORTEST) * number // max(1, contexts - 1)
    facts = drawn_facts(rng)

    def ids_of(words: str) -> list[int]:
        return list(tokenizer(words, add_special_tokens=False, verbose=False).input_ids)

    at = rng.randrange(len(text))
    filler: list[int] = []
    while len(filler) < wanted:
        filler += ids_of(text[at % len(text)] + "\n\n")
        at += 1
    room = wanted - sum(len(ids_of(f"{fact.begins} {fact.states}.\n\n")) for fact in facts)
    places = sorted(rng.sample(range(16, room - NEWEST - 96), len(facts)))
    ids: list[int] = []
    answers, begin = [], 0
    for place, fact in zip(places, facts, strict=True):
        ids += filler[begin:place] + ids_of(f"\n\n{fact.begins}")
        answer = ids_of(f" {fact.states}")
        answers.append(range(len(ids), len(ids) + len(answer)))
        ids += answer + ids_of(".\n\n")
        begin = place
    ids += filler[begin:room]
    return FactText(torch.tensor([ids]), tuple(facts), tuple(answers))


@torch.no_grad()
def answered(model: Any, tokenizer: Any, cache: Any, facts: Sequence[Fact]) -> list[bool]:
    """Whether the greedy continuation of each question states its fact."""
    found = []
    for fact in facts:
        ids = tokenizer(f"\n\n{fact.begins}", add_special_tokens=False, return_tensors="pt").input_ids
        written: list[int] = []
        with cache.fork() as copy:
            for _ in range(ANSWER):
                ids = model(ids, **cache_argument(copy), logits_to_keep=1).logits[:, -1:].argmax(-1)
                written.append(int(ids))
        found.append(tokenizer.decode(written).strip().startswith(fact.states))
    return found


def exact_tokens(file: Path) -> set[int]:
    """The tokens that a stored text holds as they are, in any layer."""
    with safe_open(file, "pt") as stored:
        parts = [stored.get_tensor(name) for name in stored.keys() if name.endswith("exact.at")]  # noqa: SIM118
    return set(torch.cat(parts).tolist())


def asked(model: Any, tokenizer: Any, text: FactText, setting: str, transform: Any) -> dict[str, Any]:
    """The facts that a setting states, and the bytes that it takes of 16-bit numbers."""
    name, _, amount = setting.partition(":")
    with tempfile.TemporaryDirectory() as folder:
        if name == "transform":
            file = Path(folder) / "text"
            with mp.compress(model, "full") as cache:
                storage = TextStorage(cache, setting, transform)
                read_document(model, cache, text.ids)
                full = cache.stats().full_kv_bytes * 2 // model.dtype.itemsize
                share = save_document(cache, text.ids, file, storage=storage) / full
            exact = exact_tokens(file)
            cache, _ = restore_document(model, file, calibration=transform)
            outside = [not exact & set(answer) for answer in text.answers]
        else:
            outside = []
            cache = mp.compress(model, name, **({"budget": amount} if amount else {}))
            read_document(model, cache, text.ids)
            for layer_cache in cache.layer_caches:
                layer_cache.run_plans()
            stats = cache.stats()
            share = stats.kv_bytes / stats.full_kv_bytes
        with cache:
            stated = answered(model, tokenizer, cache, text.facts)
    return {"bytes": round(share, 5), "stated": stated, "outside": outside}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("settings", nargs="+")
    parser.add_argument("--calibration", help="transform file; the one of millpond-models by default")
    parser.add_argument("--name", help="of the model in the rows; its own by default")
    parser.add_argument("--dtype", default="auto", help="of the model; f32 is faster on a CPU that has no bf16")
    parser.add_argument("--text", type=Path, action="append", required=True)
    parser.add_argument("--contexts", type=int, default=14)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=Path, required=True, help="file of rows, which new ones are added to")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, tokenizer = mp.load_model(args.model, args.dtype), mp.load_tokenizer(args.model)
    transform = transform_of(model, args.calibration)
    rows = [json.loads(line) for line in args.rows.read_text().splitlines()] if args.rows.exists() else []
    known = {(row["model"], row["contexts"], row["number"], row["setting"]) for row in rows}
    texts = [paragraphs(path) for path in args.text]
    for number in range(args.contexts):
        text = draw(tokenizer, texts[number % len(texts)], number, args.contexts)
        for setting in args.settings:
            key = {"model": args.name or args.model, "contexts": args.contexts, "number": number, "setting": setting}
            if tuple(key.values()) in known:
                continue
            about = {"dtype": str(model.dtype).removeprefix("torch."), "tokens": text.ids.shape[1]}
            row = {**key, **about, **asked(model, tokenizer, text, setting, transform)}
            with args.rows.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(number, row["tokens"], setting, sum(row["stated"]), f"{row['bytes']:.1%}", flush=True)


if __name__ == "__main__":
    main()
