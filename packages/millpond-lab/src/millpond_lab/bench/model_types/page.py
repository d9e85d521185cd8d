"""The page of model types, from what the survey found."""

from __future__ import annotations

import multiprocessing
import re
import resource
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

from millpond_lab.bench.common.report import markdown_table
from millpond_lab.bench.model_types.greedy import LENGTHS, NEW, WITHIN
from millpond_lab.bench.model_types.probe import (
    AMPLE,
    BROKEN,
    EQUAL,
    NOT_TRIED,
    REFUSED,
    SETTINGS,
    SMALL,
    WRONG,
    Finding,
    Outcome,
    probe,
)

_ORDER = (EQUAL, REFUSED, NOT_TRIED, WRONG, BROKEN)
_INTRO = """# Model types

Every type of language model in transformers {transformers}, built in tiny form with random weights and compared with
stock generation (torch {torch}, float32, `{command}`): {counts}.

* **equal**: greedy generation of {new} tokens after a padded batch of {prompts} tokens gives the tokens of
  transformers' own `generate`, and logits within {within:g} of the largest one (or of 1), with a budget of {ample}
  entries that holds everything. With {small} entries no KV head holds more (methods that grow: plus the decoded ones),
  and a second run gives the same numbers. If a method only evicts, logits equal those of transformers' own full cache
  under a mask that hides the evicted entries at each step. `streaming` rotates the positions of the kept entries, so
  that a mask cannot reproduce it; `streaming, absolute` (`positions="absolute"`) does not, and also runs in models
  whose positions cannot be rotated.
* **refused**: `compress`, or the first forward pass, raises the error in the last column.
* **not tried**: the type could not be built, or generates no text of its own, for the reason in the last column.
* **native layers** decode in native calls (`native_layers`) on the CPU of this run; in the others only the large linear
  layers do.

In [hybrids](../how-to/special-models.md#hybrid-models) entries are those of the attention layers; their states are in
transformers' own layers, and in the comparison.
Gemma 3n and Gemma 4 are built with two of four layers that
[share keys](../how-to/special-models.md#layers-that-share-keys): these hold nothing, and the mask hides from them what
it hides from the layers whose keys they read.
A checkpoint may switch on features that the defaults of its type leave off: indexers and the like are refused in every
type.
"""


def render(data: dict[str, Any]) -> str:
    """The page of what `benchmarks/models/model_types.py` wrote."""
    alone, beside = ([Finding.of(row) for row in data[part]] for part in ("text", "composite"))
    text = _INTRO.format(
        transformers=data["transformers"],
        torch=data["torch"],
        command=data["command"],
        counts=_counts(alone + beside),
        new=NEW,
        prompts=" and ".join(map(str, LENGTHS)),
        within=WITHIN,
        ample=AMPLE,
        small=SMALL,
    )
    return (
        f"{text}\n## Text\n\n{_table(alone)}\n## Images or audio with text\n\n"
        "Compared on text alone, except for types that only describe an image, and for "
        "[three](../../tests/hf/test_vision.py) whose tests have images. Types in which an image or a prefix attends "
        f"to later tokens are refused.\n\n{_table(beside)}"
    )


def _counts(findings: Sequence[Finding]) -> str:
    counts = Counter(finding.status for finding in findings)
    return ", ".join(f"{counts[status]} {status}" for status in _ORDER if counts[status])


def _table(findings: Sequence[Finding]) -> str:
    rows = [
        (
            f"`{finding.model_type}`",
            *(finding.outcomes.get(name, Outcome(finding.status)).status for name in SETTINGS),
            "{} of {}".format(*finding.native_layers) if finding.native_layers[1] else "",
            _reason(finding),
        )
        for finding in findings
    ]
    head = ("type", *(f"`{name}`" for name in SETTINGS), "native layers", "why")
    return markdown_table(head, rows).replace("---:", "---")


def _reason(finding: Finding) -> str:
    """Why something is not equal: all, or some of the settings."""
    reasons: dict[str, list[str]] = {}
    for name, outcome in finding.outcomes.items():
        if outcome.reason:
            reasons.setdefault(_short(outcome.reason), []).append(name)
    if finding.reason:
        return _short(finding.reason)
    return "; ".join(f"{', '.join(f'`{name}`' for name in names)}: {reason}" for reason, names in reasons.items())


def _short(reason: str) -> str:
    """Without the name of the class, which the type tells, and on one line of a table."""
    return re.sub(r"^\w*[A-Z]\w* (\(model type '[^']*'\) )?(?=[a-z])", "", reason).replace("|", "\\|")


SECONDS, MEMORY_BYTES = 120.0, 8 << 30  #: what one type may take
_AHEAD = ["torch", "transformers", "transformers.generation", "millpond", "millpond_lab.bench.model_types.probe"]


def survey(kinds: Iterable[str], task: Callable[[str], Finding] = probe) -> Iterator[Finding]:
    """What comes of each type, in order."""
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(_AHEAD)
    for kind in kinds:
        ours, theirs = processes.Pipe(duplex=False)
        child = processes.Process(target=_child, args=(theirs, task, kind), daemon=True)
        child.start()
        theirs.close()
        yield _wait(kind, ours, child)


def _wait(kind: str, connection: Connection[Any, Any], child: Any) -> Finding:
    try:
        if not connection.poll(SECONDS):
            return Finding(kind, BROKEN, f"took longer than {SECONDS:.0f} seconds")
        found: Finding = connection.recv()
        return found
    except EOFError:
        child.join()
        return Finding(kind, BROKEN, f"its process ended with {child.exitcode}")
    finally:
        child.kill()
        child.join()
        connection.close()


def _child(connection: Connection[Any, Any], task: Callable[[str], Finding], kind: str) -> None:
    import torch

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    torch.set_num_threads(1)
    connection.send(task(kind))
    connection.close()
