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
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import millpond as mp
from millpond.models.chat_template import chat_prompt
from millpond.presets import PRESETS
from millpond_lab.bench.common.machine import describe_machine
from millpond_lab.evals.data.chat_facts import FactChat, draw_chats

#: Texts by kind, relative to the folder of data.
TEXTS = ("text/cpp_docs.md.txt", "text/rust_book.md.txt", "text/wikitext2_valid.txt", "text/sotu.txt")
CHATS, SEED, ANSWER = 20, 7, 48
#: What is compared; the default is what holds where nothing is named.
SETTINGS: dict[str, dict[str, Any]] = {
    "full": {"method": "full"},
    "default": {},
    **{f"preset {name}": {"preset": name} for name in PRESETS},
    "h2o, 20%, at least 512": {"method": "h2o"},
    "snapkv, 20%, at least 512": {"method": "snapkv"},
}

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
    chats = draw_chats([options.data / name for name in TEXTS], CHATS, SEED)
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
