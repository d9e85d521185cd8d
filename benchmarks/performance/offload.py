"""Tokens per second of a model four times as large as its memory: Millpond's sweep and Accelerate's disk offload.

Random weights of a Llama shape (1.03 billion parameters, bf16, 2.07 GB) are written to a folder once. Every cell runs
in a process of its own, with distinct prompts. The sweep is held to `--memory` by its own ledger. Accelerate keeps
embeddings, norm and head in memory and reads all layers; it has no limit of its own, so a watcher drops the page cache
of the weights while it runs. Bandwidth is measured before and after each cell with the sweep's reads.

    python benchmarks/performance/offload.py --folder build/offload-model --out benchmarks/results/offload.json

Accelerate is looked for in `--accelerate`, a folder that `pip install --no-deps --target` has filled.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

SHAPE = {
    "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32,
    "num_key_value_heads": 4, "vocab_size": 32000, "max_position_embeddings": 2048, "tie_word_embeddings": True,
    "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
CELLS = ["full", "h2o", "full-no-overlap", "accelerate-1", "accelerate-4"]


def make_model(folder: Path) -> None:
    """Write the model with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM._from_config(LlamaConfig(**SHAPE), dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="700MB")


def prompts_of(n: int, length: int) -> list[list[int]]:
    """Distinct prompts of random tokens."""
    import random

    draw = random.Random(0)
    return [draw.choices(range(3, SHAPE["vocab_size"]), k=length) for _ in range(n)]  # type: ignore[call-overload]


def bandwidth(folder: Path, seconds: float = 4.5) -> float:
    """GB/s of direct reads of the weights, as the sweep reads them, in the last third of `seconds`."""
    from millpond.tiers.aligned import aligned_buffer
    from millpond.tiers.backends.threads import ThreadBackend
    from millpond.tiers.files import DirectFile
    from millpond.tiers.loader import Extent, Loader
    from millpond.tiers.slots import Slot

    size = 64 << 20
    loader, slots = Loader(ThreadBackend()), [Slot(aligned_buffer(size)) for _ in range(2)]
    files = [DirectFile(path) for path in sorted(folder.glob("*.safetensors"))]
    places = [(file, offset) for file in files for offset in range(0, file.size - size, size)]
    tickets, times = [], [time.perf_counter()]
    begin, n = times[0], 0
    while time.perf_counter() - begin < seconds:
        if len(tickets) == 2:
            tickets.pop(0).wait().release()
            times.append(time.perf_counter())
        file, offset = places[n % len(places)]
        tickets.append(loader.read([Extent(file, offset, size, size, 0)], slots[n % 2]))
        n += 1
    loader.close()
    late = [at for at in times if at >= begin + seconds * 2 / 3]
    return size * (len(late) - 1) / (late[-1] - late[0]) / 1e9


def run_ours(folder: Path, method: str, overlap: bool, arguments: argparse.Namespace) -> dict[str, Any]:
    """One wave of as many requests as fit."""
    import warnings

    import millpond as mp
    from millpond.engine.config import EngineConfig
    from millpond.engine.engine import Engine
    from millpond.engine.offload.open import open_in_memory
    from millpond.engine.request import Request

    warnings.simplefilter("ignore")
    config = EngineConfig(
        method=method, budget=None if method == "full" else "20%", max_step_tokens=256, max_running=64
    )
    opened = open_in_memory(folder, arguments.memory, None, None, config, overlap=overlap)
    assert opened.streamed is not None, "the model does not fit"
    engine = Engine(opened.model, None, opened.config, streamed=opened.streamed)
    params = mp.SamplingParams(max_tokens=arguments.new, temperature=0, ignore_eos=True)
    for n, prompt in enumerate(prompts_of(arguments.most, arguments.prompt)):
        engine.add(Request(request_id=str(n), prompt=prompt, params=params))
    began, steps, tokens, running = time.perf_counter(), [], 0, 0
    while engine.busy:
        before, at, n_bytes = engine.stats(), time.perf_counter(), opened.streamed.bytes_read
        outputs = engine.step()
        now = engine.stats()
        if now.prompt_tokens == before.prompt_tokens:
            steps.append((time.perf_counter() - at, opened.streamed.bytes_read - n_bytes))
        running = max(running, now.running)
        tokens = now.generated_tokens
        if now.waiting and now.finished:  # the first wave is over: what is left would run alike
            break
        del outputs
    seconds = time.perf_counter() - began
    step_s = statistics.median(s for s, _ in steps) if steps else None
    found = {
        "requests_at_a_time": running, "new_tokens": tokens, "seconds": seconds, "tokens_per_s": tokens / seconds,
        "decode_step_s": step_s, "decode_steps": len(steps), "prompt_tokens": engine.stats().prompt_tokens,
        "decode_read_gb_per_s": sum(n for _, n in steps) / sum(s for s, _ in steps) / 1e9 if steps else None,
        "ledger_peak_bytes": opened.ledger.peak("host"), "plan": str(opened.placement),
    }  # fmt: skip
    engine.close()
    return found


def run_accelerate(folder: Path, batch: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """One batch: the prompts, then a few steps; the rest is projected with their median."""
    sys.path.insert(0, str(arguments.accelerate))
    import torch
    from transformers import AutoModelForCausalLM

    n_layers = int(SHAPE["num_hidden_layers"])  # type: ignore[call-overload]
    where = {f"model.layers.{n}": "disk" for n in range(n_layers)}
    where |= dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, device_map=where, offload_folder=folder / "accelerate"
    )
    watch_cache(folder)
    ids = torch.tensor(prompts_of(batch, arguments.prompt))
    times = [time.perf_counter()]
    with torch.no_grad():
        out = model(ids, use_cache=True, logits_to_keep=1)
        for _ in range(arguments.steps):
            times.append(time.perf_counter())
            newest = out.logits[:, -1:].argmax(-1)
            out = model(newest, past_key_values=out.past_key_values, use_cache=True)
    times.append(time.perf_counter())
    parts = [after - before for before, after in pairwise(times)]
    step_s = statistics.median(parts[1:])
    seconds = parts[0] + (arguments.new - 1) * step_s
    return {
        "requests_at_a_time": batch, "new_tokens": batch * arguments.new, "seconds": seconds, "projected": True,
        "tokens_per_s": batch * arguments.new / seconds, "prefill_s": parts[0], "decode_step_s": step_s,
        "decode_steps": arguments.steps,
    }  # fmt: skip


def watch_cache(folder: Path) -> None:
    """Drop the page cache of the weights every 50 ms, in a thread that ends with the process."""
    files = [os.open(path, os.O_RDONLY) for path in folder.glob("*.safetensors")]

    def watch() -> None:
        while True:
            for fd in files:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            time.sleep(0.05)

    threading.Thread(target=watch, daemon=True).start()


def run_cell(cell: str, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """One cell in this process."""
    import torch

    torch.set_num_threads(arguments.threads)
    before = bandwidth(folder)
    if cell.startswith("accelerate"):
        found = run_accelerate(folder, int(cell.rpartition("-")[2]), arguments)
    else:
        found = run_ours(folder, cell.partition("-")[0], not cell.endswith("no-overlap"), arguments)
    found["bandwidth_gb_per_s"] = [before, bandwidth(folder)]
    found["peak_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"cell": cell, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("build/offload-model"))
    parser.add_argument("--accelerate", type=Path, default=Path("build/accelerate"))
    parser.add_argument("--memory", default="512MiB")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--most", type=int, default=64, help="requests of ours")
    parser.add_argument("--steps", type=int, default=8, help="decoding steps of Accelerate that are timed")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cells", nargs="*", default=CELLS, choices=CELLS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.cell:
        print(json.dumps(run_cell(arguments.cell, arguments.folder, arguments)))
        return
    from millpond.bench.common.machine import describe_machine

    if not (arguments.folder / "config.json").exists():
        make_model(arguments.folder)
    rows = []
    for cell in arguments.cells:
        command = [sys.executable, __file__, "--cell", cell, *sys.argv[1:]]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            rows.append({"cell": cell, "failed": done.returncode})
        else:
            rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(json.dumps(rows[-1]), flush=True)
        if arguments.out is not None:
            settings = {name: str(getattr(arguments, name)) for name in ("memory", "prompt", "new", "threads")}
            found = {**settings, "machine": asdict(describe_machine()), "shape": SHAPE, "rows": rows}
            arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
