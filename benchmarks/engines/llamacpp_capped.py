"""llama.cpp with its weights mapped from a file, in a cap on memory: a cell of `millpond bench offload`.

    llamacpp_capped.py JSON

Makes the file where it is not there yet ("make": true, from a folder with safetensors, in bf16 or 4 bits), or reads
prompts and takes some steps, and prints one line of JSON. The cap is that of the other cells: it counts the memory of
this process and the page cache of the file, and drops the page cache where both together are more.

Weights are not packed again in memory when the file is loaded, as llama.cpp does for some formats: that is memory of
the process, which the cap does not allow. A prompt is read by itself, in batches of at most 512 tokens, its default,
each of which reads all weights.
"""

from __future__ import annotations

import json
import runpy
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import llama_cpp as lib

HERE = Path(__file__).parent


def make(settings: dict[str, Any]) -> None:
    """Write the file, under another name until it is whole."""
    out = Path(settings["file"])
    plain, part = out.with_name("bf16.gguf"), out.with_suffix(".part")
    if not plain.exists():
        argv, sys.argv = sys.argv, ["gguf_model.py", settings["folder"], str(part)]
        runpy.run_path(str(HERE / "gguf_model.py"), run_name="__main__")
        sys.argv = argv
        part.replace(plain)
    if out != plain and not out.exists():
        params = lib.llama_model_quantize_default_params()
        params.ftype, params.nthread = lib.LLAMA_FTYPE_MOSTLY_Q4_0, settings["threads"]
        if code := lib.llama_model_quantize(str(plain).encode(), str(part).encode(), params):
            raise RuntimeError(f"llama_model_quantize answered {code}")
        part.replace(out)


def waited_s() -> float:
    """Seconds in which this thread could have run, and other processes had the cores."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()[1]) / 1e9
    except (OSError, ValueError):
        return 0.0


def run(settings: dict[str, Any]) -> dict[str, Any]:
    """Prompts, and steps behind them, in the cap."""
    from llamacpp_engine import LlamaCpp

    cap_of: Any = runpy.run_path(settings["cap"])["Cap"]
    cap = cap_of(Path(settings["file"]).parent, settings["memory"])
    engine = LlamaCpp(
        {
            "model": settings["file"],
            "threads": settings["threads"],
            "batch": len(settings["prompts"]),
            "room": len(settings["prompts"][0]) + settings["new"],
            "cache": "f16",
            "step_tokens": 512,
            "repack": False,
        }
    )
    began, waited = time.perf_counter(), waited_s()
    found = engine.run(settings["prompts"], settings["steps"])
    return {
        "waited_s": waited_s() - waited,
        "timed_s": time.perf_counter() - began,
        "prefill_s": found["prefill_s"],
        "decode_step_s": statistics.median(found["steps_ms"]) / 1e3,
        "decode_steps": settings["steps"],
        "kv_bytes": found["kv_bytes"],
        "version": lib.__version__,
        **cap.end(),
    }


def main() -> None:
    settings: dict[str, Any] = json.loads(sys.argv[1])
    out, sys.stdout = sys.stdout, sys.stderr
    lib.llama_backend_init()
    if settings["make"]:
        make(settings)
        found: dict[str, Any] = {}
    else:
        found = run(settings)
    out.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
