"""What the engines of `millpond bench engines` share as child processes: the lines they read and write, and memory.

One JSON request per line in, one JSON answer per line out:

* {"hello": true} -> {"versions": "..."}
* {"load": {...}} -> {}: the settings of the parent's `EngineCandidate`; comes once, before any reading.
* {"prompts": [[id, ...], ...], "new_tokens": n} -> {"prefill_s", "steps_ms", "kv_bytes"}: n steps in which every
  sequence gets a token, after the first token of the last of them.

Every answer to prompts carries rss_bytes, the most resident memory while it was worked out, beyond what the process
held before it loaded a model. Imports nothing of Millpond.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol


class Engine(Protocol):
    """A loaded engine."""

    def run(self, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
        """One reading; leaves nothing running."""
        ...


def resident(field: str) -> int | None:
    """VmRSS or VmHWM of this process in bytes; None where the system does not tell."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":")), None)


def serve(versions: str, load: Callable[[dict[str, Any]], Engine]) -> None:
    """Answer until standard input ends; only answers go to standard output."""
    out, sys.stdout = sys.stdout, sys.stderr
    before = resident("VmRSS")
    engine: Engine | None = None
    for line in sys.stdin:
        try:
            request = json.loads(line)
            if request.get("hello"):
                answer = {"versions": versions}
            elif "load" in request:
                engine, answer = load(request["load"]), {}
            elif engine is None:
                raise RuntimeError("nothing is loaded")
            else:
                with suppress(OSError):
                    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM after loading
                answer = engine.run(request["prompts"], request["new_tokens"])
                peak = resident("VmHWM")
                answer["rss_bytes"] = None if before is None or peak is None else max(0, peak - before)
        except Exception as error:  # the parent reports it with the others' numbers
            answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        out.write(json.dumps(answer) + "\n")
        out.flush()
