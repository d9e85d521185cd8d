"""Ids of llama.cpp for the texts and vocabularies of the tests, written to `tests/models/llamacpp_tokens.json`.

    python -m tests.helpers.gguf.llamacpp_tokens PYTHON

PYTHON is an interpreter that has llama-cpp-python (benchmarks/engines/llamacpp_env.sh makes one); what is written holds
CI to llama.cpp without it. With smollm2-135m at hand, its vocabulary is among them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from millpond.models.downloads import downloaded_gguf
from millpond.models.gguf.header import read_header
from millpond.models.gguf.tokenizer import PRE_TOKENIZERS
from tests.helpers.gguf.texts import TEXTS
from tests.helpers.gguf.vocabulary import Vocabulary, byte_pairs, pieces, write_vocabulary

FILE = Path(__file__).parents[2] / "models" / "llamacpp_tokens.json"
_CHILD = """
import json, sys
import llama_cpp
found = {}
for path, texts in json.load(sys.stdin):
    llm = llama_cpp.Llama(model_path=path, vocab_only=True, verbose=False)
    found[path] = [llm.tokenize(text.encode(), add_bos=False, special=True) for text in texts]
print(json.dumps({"version": llama_cpp.__version__, "ids": found}))
"""


def smollm2() -> Vocabulary:
    """The vocabulary of SmolLM2, read from its file.

    Raises:
        OptionError: it was not downloaded.
    """
    file = downloaded_gguf("smollm2-135m")
    assert file is not None
    keys = [f"tokenizer.ggml.{name}" for name in ("tokens", "token_type", "merges")]
    given = read_header(file, keys).metadata
    ids = {key: given[f"tokenizer.ggml.{key}"] for key in ("bos_token_id", "eos_token_id")}
    return Vocabulary("gpt2", *(given[key] for key in keys), more=ids)


def cases() -> Iterator[tuple[str, str, Vocabulary, dict[str, Any]]]:
    """Set of the fixture, name in it, vocabulary, and what else its file says."""
    yield from (("byte pairs", rule, byte_pairs(), {"pre": rule}) for rule in sorted(PRE_TOKENIZERS))
    yield "pieces", "blank first", pieces("llama"), {}
    yield "pieces", "no blank first", pieces("llama"), {"add_space_prefix": False}
    yield "gemma4", "gemma4", pieces("gemma4"), {}


def smollm2_cases() -> Iterator[tuple[str, str, Vocabulary, dict[str, Any]]]:
    """As `cases`, with SmolLM2's vocabulary."""
    known = smollm2()
    yield from (("smollm2", rule, known, {"pre": rule}) for rule in sorted(PRE_TOKENIZERS))


def texts_of(group: str) -> list[str]:
    """The texts of a set, with the special tokens of its vocabulary."""
    if group != "smollm2":
        return list(TEXTS)
    return [text.replace("<|begin|>", "<|im_start|>").replace("<|end|>", "<|im_end|>") for text in TEXTS]


def write_case(path: Path, vocabulary: Vocabulary, more: dict[str, Any]) -> None:
    """The file of a case."""
    write_vocabulary(path, Vocabulary(**{**vars(vocabulary), "more": {**vocabulary.more, **more}}))


def expected() -> dict[str, dict[str, list[list[int]]]]:
    """Ids of each text, by set and name."""
    written = json.loads(FILE.read_text(encoding="utf-8"))["sets"]
    return {
        group: {
            name: [list(variants[i]) for variants, i in zip(entry["ids"], chosen, strict=True)]
            for name, chosen in entry["names"].items()
        }
        for group, entry in written.items()
    }


def main(python: str) -> None:
    """Write the file."""
    with tempfile.TemporaryDirectory() as folder:
        asked, places = [], []
        for i, (group, name, vocabulary, more) in enumerate([*cases(), *smollm2_cases()]):
            path = Path(folder) / f"{i}.gguf"
            write_case(path, vocabulary, more)
            asked.append((str(path), texts_of(group)))
            places.append((group, name))
        child = subprocess.run(
            [python, "-c", _CHILD], input=json.dumps(asked), capture_output=True, text=True, check=True
        )
        answer = json.loads(child.stdout)
        ids = [answer["ids"][path] for path, _ in asked]
    sets: dict[str, dict[str, Any]] = {}
    for (group, name), found in zip(places, ids, strict=True):
        entry = sets.setdefault(group, {"ids": [[] for _ in TEXTS], "names": {}})
        for variants, one in zip(entry["ids"], found, strict=True):
            if one not in variants:
                variants.append(one)
        entry["names"][name] = [variants.index(one) for variants, one in zip(entry["ids"], found, strict=True)]
    text = json.dumps({"llama-cpp-python": answer["version"], "sets": sets}, separators=(",", ":"))
    FILE.write_text(text.replace('],"', '],\n"').replace("]],[[", "]],\n[[") + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
