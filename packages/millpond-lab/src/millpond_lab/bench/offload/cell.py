"""One cell of the offloading benchmark, in a process of its own: `python -m millpond_lab.bench.offload.cell JSON`."""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time
import warnings
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from millpond.engine.config import EngineConfig
from millpond.engine.engine import Engine
from millpond.engine.llm import LLM
from millpond.engine.offload.model_size import model_size
from millpond.engine.offload.open import open_in_memory
from millpond.engine.offload.plan import ENGINE
from millpond.engine.offload.planner import Workload, constants_for
from millpond.engine.request import Request
from millpond.engine.sampling.params import SamplingParams
from millpond.models.load import resolve
from millpond.tiers.buffers import Slot, aligned_buffer
from millpond.tiers.files import DirectFile
from millpond.tiers.loader import Extent, Loader, Ticket
from millpond.tiers.threads import ThreadBackend
from millpond_lab.bench.offload.batch import time_batch
from millpond_lab.bench.offload.cap import Cap
from millpond_lab.bench.offload.deepspeed import run_deepspeed
from millpond_lab.bench.offload.flexgen import run_flexgen
from millpond_lab.bench.offload.llamacpp import run_llamacpp
from millpond_lab.bench.offload.projection import growth, sizes_of
from millpond_lab.bench.offload.settings import OURS, OffloadSettings, Packages
from millpond_lab.bench.offload.shapes import SHAPES, is_opt, kv_bytes, prompts_of
from millpond_lab.bench.offload.waited import waited_s

#: Seconds for which the bandwidth is measured before and after a cell; the last third counts, since disks of virtual
#: machines give more at first, for some seconds.
BANDWIDTH_S = 12.0


def bandwidth(folder: Path) -> float:
    """GB/s of direct reads of the weights, as the sweep reads them, in the last third of `BANDWIDTH_S`."""
    size = 64 << 20
    loader, slots = Loader(ThreadBackend()), [Slot(aligned_buffer(size)) for _ in range(2)]
    files = [DirectFile(path) for path in sorted(folder.glob("*.safetensors"))]
    places = [(file, offset) for file in files for offset in range(0, file.size - size, size)]
    tickets: list[Ticket] = []
    times = [time.perf_counter()]
    begin, n = times[0], 0
    while time.perf_counter() - begin < BANDWIDTH_S:
        if len(tickets) == 2:
            tickets.pop(0).wait().release()
            times.append(time.perf_counter())
        file, offset = places[n % len(places)]
        tickets.append(loader.read([Extent(file, offset, size, size, 0)], slots[n % 2]))
        n += 1
    loader.close()
    late = [at for at in times if at >= begin + BANDWIDTH_S * 2 / 3]
    return size * (len(late) - 1) / (late[-1] - late[0]) / 1e9


class TimedFile(DirectFile):
    """A file that counts the seconds of its reads, those in which the reading thread waited for a core, and bytes.

    Of all files together, read by one thread.
    """

    seconds, waited, nbytes = 0.0, 0.0, 0

    def read_into(self, offset: int, room: memoryview) -> int:
        began, waited = time.perf_counter(), waited_s()
        n = super().read_into(offset, room)
        TimedFile.seconds += time.perf_counter() - began
        TimedFile.waited += waited_s() - waited
        TimedFile.nbytes += n
        return n

    @classmethod
    def so_far(cls) -> tuple[float, float, int]:
        """Seconds, seconds waited, and bytes."""
        return cls.seconds, cls.waited, cls.nbytes


def run_ours(folder: Path, cell: str, settings: OffloadSettings) -> dict[str, Any]:
    """One block of the plan that is searched for, in a schedule in which all of it is there at once.

    Its decoding steps behind the prompts are at most `our_steps`; the rest takes as long as those, on average.
    """
    warnings.simplefilter("ignore")
    config, memory = EngineConfig(**OURS[cell]), settings.memory
    disk = folder / "packed"
    disk.mkdir(exist_ok=True)
    machine = constants_for(folder, None)
    with LLM("pond-recall") as llm:  # what is imported and built at the first use
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2))
    cap = Cap(folder, memory)
    at = time.perf_counter()
    opened = open_in_memory(
        folder,
        memory,
        None,
        None,
        config,
        disk=disk,
        machine=machine,
        workload=Workload(prompt=settings.prompt, new=settings.new),
        overlap=not cell.endswith("no-overlap"),
        open_file=TimedFile,
        capabilities=replace(ENGINE, schedules=("row", "zigzag")),
    )
    plan = opened.placement.plan
    assert opened.streamed is not None, "the model does not fit"
    assert plan.prediction is not None, "it was searched for"
    assert plan.block is not None, "it was searched for"
    engine = Engine(opened.model, None, opened.config, streamed=opened.streamed, tier=opened.tier)
    open_s = time.perf_counter() - at
    params = SamplingParams(max_tokens=settings.new, temperature=0, ignore_eos=True)
    for n, prompt in enumerate(prompts_of(plan.block, settings.prompt, settings.shape)):
        engine.add(Request(request_id=str(n), prompt=prompt, params=params))
    n_prompt_tokens = plan.block * settings.prompt
    began, steps, prefill_s, running, last = time.perf_counter(), [], 0.0, 0, 0
    waited = prefill_waited = waited_s()
    before_reads = prefill_reads = TimedFile.so_far()
    while engine.busy:
        before, at, n_bytes = engine.stats(), time.perf_counter(), opened.streamed.bytes_read
        for output in engine.step():
            if output.error is not None:
                raise output.error
        now = engine.stats()
        if now.prompt_tokens == before.prompt_tokens:
            steps.append((time.perf_counter() - at, opened.streamed.bytes_read - n_bytes))
        else:
            prefill_s, last = time.perf_counter() - began, len(steps)
            prefill_waited = waited_s()
            prefill_reads = TimedFile.so_far()
        running = max(running, now.running)
        if now.prompt_tokens == n_prompt_tokens and len(steps) - last == settings.our_steps:
            break
    seconds, end_waited = time.perf_counter() - began, waited_s()
    all_reads = TimedFile.so_far()
    stats, found = engine.stats(), plan.prediction
    new_tokens, projected = plan.block * settings.new, engine.busy
    assert projected or stats.generated_tokens == new_tokens, "one block to its end"
    longer = 1.0
    if projected and settings.our_steps:
        caches = sizes_of(model_size(folder, config.weights), config, settings.prompt)
        far, weight_bytes = plan.block * plan.share("kv", "disk"), statistics.fmean(n for _, n in steps)
        grown = growth(caches, settings.our_steps, settings.new, far, weight_bytes)
        longer = grown * (settings.new - 1) / settings.our_steps
    decode_timed_s = seconds - prefill_s
    decode_s, decode_waited = longer * decode_timed_s, longer * (end_waited - prefill_waited)
    seconds = prefill_s + decode_s
    result = {
        "requests": plan.block,
        "running": running,
        "preempted": stats.preemptions,
        "new_tokens": new_tokens,
        "seconds": seconds,
        "tokens_per_s": new_tokens / seconds,
        "projected": projected,
        "predicted_tokens_per_s": found.tokens_per_s,
        "prefill_s": prefill_s,
        "predicted_prefill_s": found.prefill_s,
        "prefill_waited_s": prefill_waited - waited,
        "decode_waited_s": decode_waited,
        "decode_timed_s": decode_timed_s,
        "decode_s": decode_s,
        "predicted_decode_s": found.decode_s,
        "decode_bound": found.decode_bound,
        "prefill_bound": found.prefill_bound,
        "decode_step_s": statistics.median(s for s, _ in steps),
        "decode_steps": len(steps),
        "decode_read_gb_per_s": sum(n for _, n in steps) / sum(s for s, _ in steps) / 1e9,
        "weights_on_disk": plan.share("weights", "disk"),
        "kv_on_disk": plan.share("kv", "disk"),
        "slots": plan.slots,
        "schedule": plan.schedule,
        "prompt_rows": plan.prompt_rows,
        "prefill_reads": [after - one for after, one in zip(prefill_reads, before_reads, strict=True)],
        "decode_reads": [after - one for after, one in zip(all_reads, prefill_reads, strict=True)],
        "open_s": open_s,
        "ledger_peak_bytes": opened.ledger.peak("host"),
        "planned_read_gb_per_s": machine.read_per_s / 1e9,
        **cap.end(),
    }
    engine.close()
    return result


def run_accelerate(folder: Path, batch: int, settings: OffloadSettings, accelerate: Path) -> dict[str, Any]:
    """One batch: the prompts, then a few steps; the rest is projected with their median."""
    sys.path.insert(0, str(accelerate))
    import_module("accelerate")  # before the cap, as all imports are
    # what is imported at the first use
    first: Any = AutoModelForCausalLM.from_pretrained(resolve("pond-recall"), trust_remote_code=False)
    first.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2)
    del first
    cached = kv_bytes(settings.shape, batch * (settings.prompt + settings.new))
    if cached > settings.memory:
        raise MemoryError(f"{cached:,} bytes of keys and values at the end, and {settings.memory:,} allowed")
    rest: tuple[str, ...]
    inner, rest = "model", ("model.embed_tokens", "model.norm", "model.rotary_emb")
    if is_opt(settings.shape):
        inner = "model.decoder"
        rest = tuple(f"{inner}.{name}" for name in ("embed_tokens", "embed_positions", "final_layer_norm"))
    where: dict[str, Any] = {f"{inner}.layers.{n}": "disk" for n in range(SHAPES[settings.shape]["num_hidden_layers"])}
    where |= dict.fromkeys((*rest, "lm_head"), "cpu")
    cap = Cap(folder, settings.memory)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, device_map=where, offload_folder=folder / "accelerate", trust_remote_code=False
    )
    return {**time_batch(model, batch, settings), **cap.end()}


def run_cell(cell: str, folder: Path, packages: Packages, settings: OffloadSettings) -> dict[str, Any]:
    """A cell in this process."""
    torch.set_num_threads(settings.threads)
    before = bandwidth(folder)
    kind, _, rest = cell.partition("-")
    if cell in OURS:
        found = run_ours(folder, cell, settings)
    elif kind == "llamacpp":
        weights, batch = rest.split("-")
        found = run_llamacpp(folder, weights, int(batch), settings, packages.llamacpp)
    elif kind == "deepspeed":
        device, batch = rest.split("-")
        found = run_deepspeed(folder, device, int(batch), settings, packages.deepspeed)
    elif kind == "flexgen":
        batch, batches = rest.split("x")
        found = run_flexgen(folder, int(batch), int(batches), settings, packages.flexgen)
    else:
        found = run_accelerate(folder, int(rest), settings, packages.accelerate)
    found["bandwidth_gb_per_s"] = [before, bandwidth(folder)]
    found["peak_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"cell": cell, **found}


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    packages = Packages(**{name: Path(path) for name, path in given["packages"].items()})
    settings = OffloadSettings(**given["settings"])
    print(json.dumps(run_cell(given["cell"], Path(given["folder"]), packages, settings)))
