"""Tokens per second of a model four times as large as its memory: Millpond's sweep and Accelerate's disk offload.

Random weights of a Llama shape are written to a folder once. Every cell runs in a process of its own, with distinct
prompts, inside one cap for all: anonymous memory may grow by the memory and `SLACK` after the imports (`RLIMIT_DATA`),
and a watcher drops the page cache of the folder's files, mapped pages too, when both together are more than that. Ours
runs one block of the plan that is searched for, to its end, so that tokens per second can be compared with what the
plan predicts. Accelerate keeps embeddings, norm and head in memory and reads all layers; it reads its prompts, decodes
`--steps` tokens, and the rest is projected with the median of these. Bandwidth is measured before and after each cell
with the sweep's reads.

    python benchmarks/performance/offload.py --folder build/offload-model --out benchmarks/results/offload.json

Cells that the file of `--out` holds for the same settings are kept, so that a run may be made in parts. Accelerate is
looked for in `--accelerate`, a folder that `pip install --no-deps --target` has filled.
"""

from __future__ import annotations

import argparse
import ctypes
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

SHAPES: dict[str, dict[str, Any]] = {
    "1.04B": {
        "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32,
        "num_key_value_heads": 4, "vocab_size": 32000,
    },
    "0.16B": {
        "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 12,
        "num_key_value_heads": 4, "vocab_size": 8000,
    },
}  # fmt: skip
COMMON = {"max_position_embeddings": 2048, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": None}
#: Ours, by name: arguments of the engine.
OURS: dict[str, dict[str, Any]] = {
    "full": {"method": "full"},
    "h2o": {"method": "h2o", "budget": "20%"},
    "h2o-int4-kv": {"method": "h2o", "budget": "20%", "codec": "int4"},
    "h2o-int4-weights": {"method": "h2o", "budget": "20%", "weights": "int4"},
    "full-int4-weights": {"method": "full", "weights": "int4"},
    "full-no-overlap": {"method": "full"},
}
CELLS = [*OURS, *(f"accelerate-{batch}" for batch in (1, 2, 4, 8, 16))]
#: Bytes over the memory for what no ledger counts: stacks of threads, small objects, parts of products.
SLACK = 64 << 20
_PAGEOUT = 21  # MADV_PAGEOUT


def make_model(folder: Path, shape: str) -> None:
    """Write the model with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM._from_config(LlamaConfig(**SHAPES[shape], **COMMON), dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="700MB")


def prompts_of(n: int, arguments: argparse.Namespace) -> list[list[int]]:
    """Distinct prompts of random tokens."""
    import random

    draw = random.Random(0)
    return [draw.choices(range(3, SHAPES[arguments.shape]["vocab_size"]), k=arguments.prompt) for _ in range(n)]


# ---------------------------------------------------------------------- cap


def data_bytes() -> int:
    """Anonymous memory of this process, as `RLIMIT_DATA` counts it."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData"))


class Cap:
    """Memory that this process may take from now on: anonymous, and the page cache of a folder's files together."""

    def __init__(self, folder: Path, memory: int) -> None:
        self.limit = memory + SLACK
        self.base = data_bytes()
        self.most_cached = self.most_data = 0
        resource.setrlimit(resource.RLIMIT_DATA, (self.base + self.limit,) * 2)
        self._folder, self._libc = folder, ctypes.CDLL(None, use_errno=True)
        self._drop()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            data, cached = data_bytes() - self.base, self._cached()
            self.most_data = max(self.most_data, data)
            self.most_cached = max(self.most_cached, cached)
            if data + cached > self.limit:
                self._drop()
            time.sleep(0.02)

    def _files(self) -> list[Path]:
        return [path for path in self._folder.rglob("*") if path.suffix in (".safetensors", ".dat", ".weights")]

    def _cached(self) -> int:
        """Bytes of the page cache that hold the files (cachestat, Linux 6.5)."""
        pages = 0
        for path in self._files():
            fd = os.open(path, os.O_RDONLY)
            span, found = (ctypes.c_uint64 * 2)(0, 0), (ctypes.c_uint64 * 5)()
            if self._libc.syscall(451, fd, span, found, 0) == 0:
                pages += found[0]
            os.close(fd)
        return pages * 4096

    def _drop(self) -> None:
        for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
            if str(self._folder) in line:
                begin, _, end = line.split()[0].partition("-")
                size = ctypes.c_size_t(int(end, 16) - int(begin, 16))
                self._libc.madvise(ctypes.c_void_p(int(begin, 16)), size, _PAGEOUT)
        for path in self._files():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)

    def found(self) -> dict[str, int]:
        """What was taken at most."""
        return {"most_anonymous_bytes": self.most_data, "most_page_cache_bytes": self.most_cached}


def bandwidth(folder: Path, seconds: float = 2.4) -> float:
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


def run_ours(folder: Path, cell: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One block of the plan that is searched for."""
    import warnings

    import millpond as mp
    from millpond.budget import parse_bytes
    from millpond.engine.config import EngineConfig
    from millpond.engine.engine import Engine
    from millpond.engine.offload.open import open_in_memory
    from millpond.engine.offload.planner import constants_for
    from millpond.engine.offload.workload import Workload
    from millpond.engine.request import Request

    warnings.simplefilter("ignore")
    config, memory = EngineConfig(**OURS[cell]), parse_bytes(arguments.memory)
    disk = folder / "packed"
    disk.mkdir(exist_ok=True)
    machine = constants_for(folder, None)
    cap = Cap(folder, memory)
    at = time.perf_counter()
    opened = open_in_memory(
        folder, memory, None, None, config, disk=disk, machine=machine,
        workload=Workload(prompt=arguments.prompt, new=arguments.new), overlap=not cell.endswith("no-overlap"),
    )  # fmt: skip
    plan = opened.placement.plan
    assert opened.streamed is not None, "the model does not fit"
    assert plan.prediction is not None, "it was searched for"
    assert plan.block is not None, "it was searched for"
    engine = Engine(opened.model, None, opened.config, streamed=opened.streamed)
    open_s = time.perf_counter() - at
    params = mp.SamplingParams(max_tokens=arguments.new, temperature=0, ignore_eos=True)
    for n, prompt in enumerate(prompts_of(plan.block, arguments)):
        engine.add(Request(request_id=str(n), prompt=tuple(prompt), params=params))
    began, steps, prefill_s, running = time.perf_counter(), [], 0.0, 0
    while engine.busy:
        before, at, n_bytes = engine.stats(), time.perf_counter(), opened.streamed.bytes_read
        for output in engine.step():
            if output.error is not None:
                raise output.error
        now = engine.stats()
        if now.prompt_tokens == before.prompt_tokens:
            steps.append((time.perf_counter() - at, opened.streamed.bytes_read - n_bytes))
        else:
            prefill_s = time.perf_counter() - began
        running = max(running, now.running)
    seconds = time.perf_counter() - began
    stats, found = engine.stats(), plan.prediction
    assert stats.generated_tokens == plan.block * arguments.new, "one block to its end"
    result = {
        "requests": plan.block, "running": running, "preempted": stats.preemptions,
        "new_tokens": stats.generated_tokens, "seconds": seconds, "tokens_per_s": stats.generated_tokens / seconds,
        "predicted_tokens_per_s": found.tokens_per_s, "prefill_s": prefill_s, "predicted_prefill_s": found.prefill_s,
        "decode_s": seconds - prefill_s, "predicted_decode_s": found.decode_s, "decode_bound": found.decode_bound,
        "prefill_bound": found.prefill_bound, "decode_step_s": statistics.median(s for s, _ in steps),
        "decode_steps": len(steps), "decode_read_gb_per_s": sum(n for _, n in steps) / sum(s for s, _ in steps) / 1e9,
        "weights_on_disk": plan.share("weights", "disk"), "slots": plan.slots, "prompt_rows": plan.prompt_rows,
        "open_s": open_s, "ledger_peak_bytes": opened.ledger.peak("host"), "planned_read_gb_per_s":
        machine.read_per_s / 1e9, **cap.found(),
    }  # fmt: skip
    engine.close()
    return result


def run_accelerate(folder: Path, batch: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """One batch: the prompts, then a few steps; the rest is projected with their median."""
    sys.path.insert(0, str(arguments.accelerate))
    import accelerate  # noqa: F401  # before the cap, as all imports are
    import torch
    from transformers import AutoModelForCausalLM

    from millpond.budget import parse_bytes

    where: dict[str, Any] = {f"model.layers.{n}": "disk" for n in range(SHAPES[arguments.shape]["num_hidden_layers"])}
    where |= dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    cap = Cap(folder, parse_bytes(arguments.memory))
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, device_map=where, offload_folder=folder / "accelerate"
    )
    ids = torch.tensor(prompts_of(batch, arguments))
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
        "requests": batch, "new_tokens": batch * arguments.new, "seconds": seconds, "projected": True,
        "tokens_per_s": batch * arguments.new / seconds, "prefill_s": parts[0], "decode_step_s": step_s,
        "decode_steps": arguments.steps, **cap.found(),
    }  # fmt: skip


def run_cell(cell: str, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """One cell in this process."""
    import torch

    torch.set_num_threads(arguments.threads)
    before = bandwidth(folder)
    if cell.startswith("accelerate"):
        found = run_accelerate(folder, int(cell.rpartition("-")[2]), arguments)
    else:
        found = run_ours(folder, cell, arguments)
    found["bandwidth_gb_per_s"] = [before, bandwidth(folder)]
    found["peak_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"cell": cell, **found}


def measured_before(out: Path | None, settings: dict[str, str]) -> list[dict[str, Any]]:
    """Rows of a file with the same settings."""
    if out is None or not out.exists():
        return []
    found = json.loads(out.read_text())
    rows: list[dict[str, Any]] = found["rows"]
    return rows if all(found.get(name) == value for name, value in settings.items()) else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("build/offload-model"))
    parser.add_argument("--accelerate", type=Path, default=Path("build/accelerate"))
    parser.add_argument("--shape", default="1.04B", choices=SHAPES)
    parser.add_argument("--memory", default="512MiB")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--steps", type=int, default=10, help="decoding steps of Accelerate that are timed")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cells", nargs="*", default=CELLS, choices=CELLS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--measure", action="store_true", help="measure the machine before the cells")
    parser.add_argument("--prepare", action="store_true", help="write the model and packed weights, and end")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.cell:
        print(json.dumps(run_cell(arguments.cell, arguments.folder, arguments)))
        return
    prepare(arguments)
    if arguments.prepare:
        return
    from millpond.bench.common.machine import describe_machine

    names = ("shape", "memory", "prompt", "new", "threads")
    settings = {name: str(getattr(arguments, name)) for name in names}
    rows = [row for row in measured_before(arguments.out, settings) if row["cell"] not in arguments.cells]
    for cell in arguments.cells:
        command = [sys.executable, __file__, "--cell", cell, *sys.argv[1:]]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            rows.append({"cell": cell, "failed": done.stderr.strip().splitlines()[-1][:300]})
        else:
            rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(json.dumps(rows[-1]), flush=True)
        if arguments.out is not None:
            found = {
                **settings, "slack_bytes": SLACK, "machine": asdict(describe_machine()),
                "model": {**SHAPES[arguments.shape], **COMMON}, "model_bytes": weight_bytes(arguments.folder),
                "rows": sorted(rows, key=lambda row: CELLS.index(row["cell"])),
            }  # fmt: skip
            arguments.out.write_text(json.dumps(found, indent=1) + "\n")


def weight_bytes(folder: Path) -> int:
    """Of the weights as they were saved."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def prepare(arguments: argparse.Namespace) -> None:
    """Write the model, and with `--measure` or `--prepare` what else is made once."""
    if not (arguments.folder / "config.json").exists():
        make_model(arguments.folder, arguments.shape)
    if arguments.measure:
        import torch

        from millpond.engine.offload.planner import constants_for

        torch.set_num_threads(arguments.threads)
        print(constants_for(arguments.folder, None, again=True), flush=True)
    if arguments.prepare:
        from millpond.models.weights.packed_file import packed_sizes
        from millpond.models.weights.skeleton import Skeleton

        disk, began = arguments.folder / "packed", time.perf_counter()
        disk.mkdir(exist_ok=True)
        packed_sizes(disk, arguments.folder.resolve().name, Skeleton.of(arguments.folder), "int4")
        seconds = time.perf_counter() - began
        print(f"packed to int4: {weight_bytes(arguments.folder) / seconds / 1e6:.0f} MB/s in {seconds:.1f} s")


if __name__ == "__main__":
    main()
