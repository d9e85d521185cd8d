"""Chats with one fact each, and which settings of the cache still state it.

    python benchmarks/quality/chat_facts.py --model smollm2-135m --data FOLDER --out benchmarks/results/chat-facts.json

Twenty chats of 500 to 4,000 tokens are drawn by a seed: documentation, novels and encyclopedia texts out of FOLDER, a
fact at a random place of them (a name, a date, a code, a constant in a snippet, or an instruction in the system
prompt), one or three turns, and a question about the fact as the last message. Answers are greedy. A setting is
compared with the full cache on the chats whose fact the full cache states. Results of several models go into one file.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import millpond as mp
from millpond.models.chat_template import chat_prompt
from millpond.presets import PRESETS
from millpond_lab.bench.common.machine import describe_machine

Message = dict[str, str]

#: Texts by kind, relative to the folder of data.
TEXTS = ("text/cpp_docs.md.txt", "text/rust_book.md.txt", "text/wikitext2_valid.txt", "text/sotu.txt")
CHATS, SEED, ANSWER = 20, 7, 48
#: Tokens of a chat; a word of these texts has about this many.
SHORTEST, LONGEST, TOKENS_PER_WORD = 500, 4000, 1.45
#: What is compared; the default is what holds where nothing is named.
SETTINGS: dict[str, dict[str, Any]] = {
    "full": {"method": "full"},
    "default": {},
    **{f"preset {name}": {"preset": name} for name in PRESETS},
    "h2o, 20%, at least 512": {"method": "h2o"},
    "snapkv, 20%, at least 512": {"method": "snapkv"},
}
SYLLABLES = ("mar", "vel", "oko", "tin", "ras", "ulm", "bet", "dor", "lia", "fen", "gar", "ise", "nov", "pel", "quo")
MONTHS = ("January", "March", "April", "June", "August", "October", "November")


@dataclass(frozen=True)
class FactChat:
    """One chat.

    Attributes:
        kind: of fact. messages: up to the question. states: what an answer that states the fact contains.
    """

    kind: str
    messages: tuple[Message, ...]
    states: str

    def is_stated_by(self, answer: str) -> bool:
        """Whether an answer states the fact, whatever the case and the white space."""
        return _plain(self.states) in _plain(answer)


def _plain(text: str) -> str:
    return re.sub(r"\s+", " ", text).lower()


def draw_chats(data: Path, n: int = CHATS, seed: int = SEED) -> list[FactChat]:
    """Chats over the texts of a folder, the same for the same seed."""
    rng = random.Random(seed)
    texts = [paragraphs(data / name) for name in TEXTS]
    return [_draw(rng, texts[number % len(texts)], number, n) for number in range(n)]


def paragraphs(path: Path) -> list[str]:
    """The paragraphs of a text that have some words, in their order."""
    found = re.split(r"\n\s*\n", path.read_text(encoding="utf-8"))
    return [one.strip() for one in found if 20 <= len(one.split()) <= 200]


def _draw(rng: random.Random, text: list[str], number: int, n: int) -> FactChat:
    words = int((SHORTEST + (LONGEST - SHORTEST) * number / max(1, n - 1)) / TOKENS_PER_WORD) - 60
    kind, fact, question, states, system = _fact(rng, KINDS[number % len(KINDS)])
    filler = _filler(rng, text, words)
    if fact:
        filler.insert(rng.randrange(len(filler) + 1), fact)
    messages = [{"role": "system", "content": system}]
    if number % 3 == 2:  # three turns
        cut = max(1, len(filler) // 2)
        messages += [
            {"role": "user", "content": "\n\n".join(["Here is the first part of a text.", *filler[:cut]])},
            {"role": "assistant", "content": "I have read the first part."},
            {"role": "user", "content": "\n\n".join(["Here is the second part.", *filler[cut:]])},
            {"role": "assistant", "content": "I have read the second part."},
            {"role": "user", "content": question},
        ]
    else:
        messages.append({"role": "user", "content": "\n\n".join(["Here is a text.", *filler, question])})
    return FactChat(kind, tuple(messages), states)


KINDS = ("name", "date", "code", "snippet", "instruction")
SYSTEM = "You are a helpful assistant. Answer from the text, in one short sentence."


def _fact(rng: random.Random, kind: str) -> tuple[str, str, str, str, str]:
    """Its kind, the paragraph that states it, the question, what an answer contains, and the system prompt."""
    place, person = _word(rng), f"{_word(rng)} {_word(rng)}"
    if kind == "name":
        fact = f"The keeper of the lighthouse at {place} is called {person}."
        return kind, fact, f"What is the keeper of the lighthouse at {place} called?", person, SYSTEM
    if kind == "date":
        date = f"{rng.randint(2, 28)} {rng.choice(MONTHS)} {rng.randint(1901, 1999)}"
        fact = f"The old bridge at {place} was opened on {date}."
        return kind, fact, f"On which date was the old bridge at {place} opened?", date, SYSTEM
    if kind == "code":
        code = f"{rng.randint(100, 999)}-{rng.randint(100, 999)}"
        fact = f"The access code of the archive in {place} is {code}."
        return kind, fact, f"What is the access code of the archive in {place}?", code, SYSTEM
    if kind == "snippet":
        value = str(rng.randint(1000, 9999))
        name = f"{place.upper()}_LIMIT"
        fact = f"```python\n{name} = {value}\n\ndef within(n):\n    return n < {name}\n```"
        return kind, fact, f"What is the value of {name} in the code?", value, SYSTEM
    word = _word(rng)
    system = f"You are a helpful assistant. When the user asks for the secret word, answer: {word}."
    return kind, "", "What is the secret word?", word, system


def _word(rng: random.Random) -> str:
    return "".join(rng.sample(SYLLABLES, 2)).capitalize()


def _filler(rng: random.Random, text: list[str], words: int) -> list[str]:
    """Neighbouring paragraphs, about this many words."""
    start, found = rng.randrange(len(text)), list[str]()
    while sum(len(one.split()) for one in found) < words:
        found.append(text[(start + len(found)) % len(text)])
    return found


# ---------------------------------------------------------------------- answers


def answered(model: Any, tokenizer: Any, chats: Sequence[FactChat], setting: dict[str, Any]) -> list[dict[str, Any]]:
    """The answer to each chat under one setting, one after another, and what its cache held of a full one."""
    params = mp.SamplingParams(max_tokens=ANSWER, temperature=0)
    rows = []
    with mp.LLM(model, tokenizer=tokenizer, **setting) as llm:
        for chat in chats:
            ids, _ = chat_prompt(tokenizer, chat.messages)
            (output,) = llm.generate([ids], params)
            kv = output.outputs[0].kv
            assert kv is not None
            text = output.outputs[0].text
            rows.append(
                {
                    "kind": chat.kind,
                    "tokens": len(ids),
                    "answer": text,
                    "stated": chat.is_stated_by(text),
                    "bytes": kv.kv_bytes / kv.full_kv_bytes,
                }
            )
    return rows


def counted(rows: Sequence[dict[str, Any]], full: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How many facts a setting states, of those that the full cache states, and its mean share of the bytes."""
    asked = [row for row, whole in zip(rows, full, strict=True) if whole["stated"]]
    return {
        "stated": sum(row["stated"] for row in asked),
        "of": len(asked),
        "bytes": sum(row["bytes"] for row in rows) / len(rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--name", help="of the model in the results; its own by default")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--settings", help="some of them, separated by semicolons", default=";".join(SETTINGS))
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    model, tokenizer = mp.load_model(options.model), mp.load_tokenizer(options.model)
    chats = draw_chats(options.data)
    report = json.loads(options.out.read_text()) if options.out.exists() else {"models": {}}
    report |= {"machine": asdict(describe_machine()), "chats": len(chats), "seed": SEED}
    full = answered(model, tokenizer, chats, SETTINGS["full"])
    own = report["models"].setdefault(options.name or options.model, {})
    own["tokens"] = [row["tokens"] for row in full]
    for name in options.settings.split(";"):
        rows = full if name == "full" else answered(model, tokenizer, chats, SETTINGS[name])
        own[name] = {**counted(rows, full), "answers": [{k: row[k] for k in ("kind", "stated")} for row in rows]}
        print(options.name or options.model, name, counted(rows, full), flush=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
