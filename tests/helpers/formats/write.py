"""Write the kept files, texts and tokens: python -m tests.helpers.formats.write PART ...

Parts: "texts" after a change of options or routes that is meant; "tokens" and "files" only where a format gets a new
version or a method new results, and then the old files stay beside the new ones. "unread" writes the kept request with
all its fields anew, after one of them was added that has a default: the file of before must still be read, as
`tests/formats` has shown before. "coded" writes the text in the codec `transform` alone, "coded-kept" one whose heads
hold other tokens each, and "coded-sequences" the turn and the request in it. "bits" prints a hash of the bits of each
run on this machine, and writes nothing.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from typing import Any

import torch

from tests.helpers.formats import engine_files, runs, texts
from tests.helpers.formats.coded import (
    coded_content,
    kept_content,
    second_coded_turn,
    write_coded,
    write_coded_request,
    write_coded_turn,
    write_kept,
)
from tests.helpers.formats.documents import write_documents
from tests.helpers.formats.files import write_chat, write_files
from tests.helpers.formats.model import DATA, sure, write_model

#: What the kept files hold, and what was written.
CONTENT, TOKENS = DATA / "content.json", DATA / "tokens.json"
#: Logits of weights in bfloat16 differ by more.
COARSE = 0.15
#: Where a code is rounded the other way, logits differ by less.
CODED = 0.2


def write_all_files() -> None:
    """Models, documents and everything else that is loaded."""
    write_model()
    found: dict[str, Any] = {}
    engine_files.write_plan()
    found["files"] = write_files()
    found["documents"] = write_documents()
    found["coded"] = _coded()
    found["coded kept"] = _coded_kept()
    found |= _coded_sequences()
    engine_files.write_weights()
    found["weights"] = sure(lambda seed: engine_files.streamed(engine_files.WEIGHTS, engine_files.PLAN, seed), COARSE)
    said = engine_files.write_sessions()
    found["sessions"] = sure(lambda seed: engine_files.second_turn_of_copy(said, seed))
    engine_files.write_chunks()
    found["chunks"] = sure(engine_files.chunked_copy)
    found["request"] = sure(engine_files.write_under_way)
    engine_files.write_unread()
    write_chat()
    _write(CONTENT, found)


def _coded() -> dict[str, Any]:
    write_coded()
    return sure(coded_content)


def _coded_kept() -> dict[str, Any]:
    write_kept()
    return sure(kept_content)


def _coded_sequences() -> dict[str, Any]:
    said = write_coded_turn()
    return {
        "coded sessions": sure(lambda seed: second_coded_turn(said, seed)),
        "coded request": sure(write_coded_request),
    }


def write_coded_sequences_alone() -> None:
    """A turn and a request in the codec `transform` beside the other files, which stay."""
    _write(CONTENT, {**json.loads(CONTENT.read_text(encoding="utf-8")), **_coded_sequences()})


def write_coded_kept_alone() -> None:
    """A text in the codec `transform` whose heads hold other tokens each beside the other files, which stay."""
    _write(CONTENT, {**json.loads(CONTENT.read_text(encoding="utf-8")), "coded kept": _coded_kept()})


def write_coded_alone() -> None:
    """The text in the codec `transform` beside the other files, which stay."""
    _write(CONTENT, {**json.loads(CONTENT.read_text(encoding="utf-8")), "coded": _coded()})


def write_tokens() -> None:
    """What all runs write."""
    found: dict[str, Any] = {}
    for name, (_, _, codec, _) in runs.RUNS.items():
        least = {} if codec == "auto" else {"least": CODED}
        found[f"generate {name}"] = sure(lambda seed, name=name: runs.generated(name, seed), **least)
        found[f"engine {name}"] = sure(lambda seed, name=name: runs.deterministic(name, seed), **least)
    found["shared beginning"] = sure(runs.shared)
    _write(TOKENS, found)


def write_texts() -> None:
    """What users know by name."""
    texts.FOLDER.mkdir(exist_ok=True)
    for name, text in texts.texts().items():
        (texts.FOLDER / name).write_text(text, encoding="utf-8")
    _write(texts.VERSIONS, texts.versions())


def kept_tokens() -> dict[str, Any]:
    """What was written."""
    found: dict[str, Any] = json.loads(TOKENS.read_text(encoding="utf-8"))
    return found


def _write(path: Any, found: Any) -> None:
    path.write_text(json.dumps(found) + "\n", encoding="utf-8")


def main(asked: list[str]) -> None:
    parts = {
        "files": write_all_files,
        "coded": write_coded_alone,
        "coded-kept": write_coded_kept_alone,
        "coded-sequences": write_coded_sequences_alone,
        "tokens": write_tokens,
        "texts": write_texts,
        "unread": engine_files.write_unread,
    }
    if not asked or not {*asked} <= {*parts, "bits"}:
        raise SystemExit(__doc__)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    DATA.mkdir(parents=True, exist_ok=True)
    os.chdir(DATA)  # documents name the files of their methods from here
    for name in asked:
        if name == "bits":
            print("\n".join(runs.bits(kept_tokens())))
        else:
            parts[name]()


if __name__ == "__main__":
    main(sys.argv[1:])
