"""Whole models on a CUDA GPU: the sections `methods`, `engine` and `generate` of gpu_check.py."""

from __future__ import annotations

import gc
import itertools
import os
import statistics
import time
import traceback
from dataclasses import replace
from typing import Any

import torch
from gpu_codes import shared
from gpu_machine import Machine, Row
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StoppingCriteria, StoppingCriteriaList

import millpond as mp
from millpond.engine.request import Request
from millpond.methods import list_methods
from millpond.models.cache_argument import cache_argument

CPU = torch.device("cpu")
#: Options of some methods here; the others run as they are with a fifth of the entries.
GIVEN: dict[str, dict[str, Any]] = {
    "full": {}, "attention_gate": {}, "fastgen": {}, "minference": {}, "dms": {"budget": "20%", "window": 32},
    "duo_attention": {"budget": "50%", "recent": 32}, "infllm": {"budget": "20%", "sinks": 4, "block": 8},
    "simlayerkv": {"budget": "20%", "recent": 32}, "layer_table": {"budget": "20%", "table": "3;1"},
}  # fmt: skip
TEXT = "anna kettle " + "quiet rain past meadow and old stone on river " * 30 + "boris lantern "
QUESTIONS = ("<ask> anna <is>", "<ask> boris <is>")
ENGINE_METHODS = ("full", "h2o", "snapkv", "ada", "streaming", "kvmerger", "tova", "locret")
ENGINE_CODECS = ("plain", "int4", "rotated4")


#: Engines with more than a method and a codec: shared prefixes, preemption, prompts that are evicted from while read.
FEATURES: list[tuple[str, str, dict[str, Any]]] = [
    ("full", "plain", {"prefix_cache": True}),
    ("h2o", "plain", {"kv_memory": "1MiB", "overcommit": 4}),
    ("locret", "plain", {"options": {"prefill": "chunks", "chunk": 64}}),
]


def run_methods(machine: Machine) -> list[Row]:
    """generate() of pond-recall in float32 with every method, on the CPU and on the device: tokens and kept entries."""
    model, tokenizer = mp.load_model("pond-recall").float(), mp.load_tokenizer("pond-recall")
    ids = torch.cat([tokenizer(TEXT + asked, return_tensors="pt").input_ids for asked in QUESTIONS])
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    rows = []
    for name in ("full", "h2o") if machine.tiny else list_methods():
        if not machine.mine():
            continue
        options = GIVEN.get(name, {"budget": "20%"})
        row: Row = {"op": "method", "method": name}
        try:
            found = []
            for device in (CPU, machine.device):
                model.to(device)
                with torch.no_grad(), mp.compress(model, name, tokenizer=tokenizer, **options) as cache:
                    out = model.generate(
                        ids.to(device), attention_mask=mask.to(device), cache=cache, do_sample=False,
                        max_new_tokens=24, min_new_tokens=24, disable_compile=True,
                    )  # fmt: skip
                    kept = [[cache.positions(layer, s) for s in range(2)] for layer in range(len(cache.layer_caches))]
                    found.append((out[:, ids.shape[1] :].cpu(), kept))
            (tokens, kept), (tokens2, kept2) = found
            row |= {"same_tokens": float((tokens == tokens2).float().mean()), "same_kept": shared(kept, kept2)}
            row["ok"] = row["same_tokens"] == 1.0 and row["same_kept"] >= 0.98
        except Exception as error:  # what a method does not do on the device is a result
            row |= {"ok": False, "failure": repr(error)[:400], "where": traceback.format_exc()[-700:]}
        rows.append(row)
        print("method", {key: value for key, value in row.items() if key != "op"}, flush=True)
    return rows


def run_engine(machine: Machine) -> list[Row]:
    """Answers of the engine to prompts of many lengths, on the CPU and on the device."""
    tokenizer = mp.load_tokenizer("pond-recall")
    prompts = [TEXT[: 60 * n] + QUESTIONS[0] for n in range(1, 10)]
    params = mp.SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    rows = []
    codecs = [(method, codec, {}) for method, codec in itertools.product(ENGINE_METHODS, ENGINE_CODECS)]
    cells = [("h2o", "plain", {})] if machine.tiny else FEATURES + codecs
    for method, codec, more in cells:
        if not machine.mine():
            continue
        row: Row = {"op": "engine", "method": method, "codec": codec, "options": more}
        options: dict[str, Any] = ({} if method == "full" else {"budget": "20%"}) | more
        if codec != "plain":
            options["codec"] = codec
        try:
            found = []
            for device in (CPU, machine.device):
                model = mp.load_model("pond-recall").float().to(device)
                with mp.LLM(model, tokenizer=tokenizer, method=method, **options) as llm:
                    found.append([list(out.completions[0].token_ids) for out in llm.generate(prompts, params)])
            same = [a == b for one, other in zip(*found, strict=True) for a, b in zip(one, other, strict=True)]
            row["same_tokens"] = sum(same) / len(same)
            row["ok"] = row["same_tokens"] == 1.0 or (codec != "plain" and row["same_tokens"] >= 0.9)
        except Exception as error:
            row |= {"ok": False, "failure": repr(error)[:400], "where": traceback.format_exc()[-900:]}
        rows.append(row)
        print("engine", {key: value for key, value in row.items() if key != "op"}, flush=True)
    return rows


def random_llama(machine: Machine, layers: int) -> Any:
    """A random Llama of the shape of an 8B model, in bf16 on the device."""
    small = machine.tiny
    config: Any = LlamaConfig(
        vocab_size=512 if small else 128_256, hidden_size=64 if small else 4096,
        intermediate_size=128 if small else 14_336, num_hidden_layers=layers, num_attention_heads=4 if small else 32,
        num_key_value_heads=2 if small else 8, max_position_embeddings=65_536, pad_token_id=0, bos_token_id=1,
        eos_token_id=None, rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(machine.device):
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            model: Any = LlamaForCausalLM(config)
        finally:
            torch.set_default_dtype(before)
    model.train(False)
    return model


CACHES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("DynamicCache", {}),
    ("full", {"method": "full"}),
    ("h2o 20%", {"method": "h2o", "budget": "20%"}),
    ("h2o 20% int4", {"method": "h2o", "budget": "20%", "codec": "int4"}),
    ("snapkv 20%", {"method": "snapkv", "budget": "20%"}),
    ("streaming 20%", {"method": "streaming", "budget": "20%"}),
)


class TokenTimes(StoppingCriteria):
    """Notes when each token of generate() was there, and never stops it."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.BoolTensor:
        self._machine.wait()
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)  # type: ignore[return-value]


def run_generate(machine: Machine) -> list[Row]:
    """Seconds of generate() to the first token, milliseconds of a step (the median), and the most memory."""
    model = random_llama(machine, 2 if machine.tiny else 32)
    shapes = [(2, 64, 4)] if machine.tiny else [(1, 8192, 48), (8, 8192, 32)]
    rows = []
    for batch, prompt, new in shapes:
        ids = torch.randint(2, 500, (batch, prompt), device=machine.device)
        for name, given in CACHES:
            row: Row = {"op": "generate", "batch": batch, "prompt": prompt, "cache": name}
            try:
                time_generate(machine, model, ids, 4, given)  # kernels are compiled
                row |= time_generate(machine, model, ids, new, given)
            except Exception as error:
                row |= {"failure": repr(error)[:400], "where": traceback.format_exc()[-900:]}
            rows.append(row)
            shown = {key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}
            print("generate", shown, flush=True)
    return rows


def time_generate(machine: Machine, model: Any, ids: torch.Tensor, new: int, given: dict[str, Any]) -> Row:
    gc.collect()
    machine.reset_memory()
    times = TokenTimes(machine)
    options: dict[str, Any] = {
        "do_sample": False, "max_new_tokens": new, "min_new_tokens": new, "disable_compile": True,
        "stopping_criteria": StoppingCriteriaList([times]),
    }  # fmt: skip
    begin = time.perf_counter()
    with torch.no_grad():
        if given:
            with mp.compress(model, **given) as cache:
                model.generate(ids, **cache_argument(cache), **options)
        else:
            model.generate(ids, **cache_argument(DynamicCache(config=model.config)), **options)
    steps = [late - early for early, late in itertools.pairwise(times.times[1:])]
    return {
        "first_token_s": times.times[0] - begin, "step_ms": statistics.median(steps) * 1e3,
        "tokens_per_s": len(ids) / statistics.median(steps), "peak_gb": machine.peak_bytes() / 1e9,
    }  # fmt: skip


ENGINES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("full", {"method": "full"}),
    ("h2o 20%", {"method": "h2o", "budget": "20%"}),
    ("h2o 20% int4", {"method": "h2o", "budget": "20%", "codec": "int4"}),
)


def run_throughput(machine: Machine) -> list[Row]:
    """Tokens per second of the engine with little memory for KV, and of steps of one request; with and without graphs.

    Another run comes first, in which kernels are compiled; a step is the time between the tokens of an answer, once all
    prompts are read.
    """
    model = random_llama(machine, 2 if machine.tiny else 32)
    shapes = [(1, 4096, 96, "8GiB"), (16, 4096, 96, "16GiB"), (64, 1024, 96, "8GiB")]
    if machine.tiny:
        shapes = [(2, 64, 4, "4MiB")]
    rows = []
    for (n, prompt, new, memory), (name, given), graphs in itertools.product(shapes, ENGINES, ("1", "0")):
        if graphs == "0" and (n > 1 or "int4" in name) and not machine.tiny:
            continue
        row: Row = {"op": "engine", "requests": n, "prompt": prompt, "new": new, "cache": name, "graphs": graphs == "1"}
        try:
            row |= time_engine(machine, model, (n, prompt, new, memory), given, graphs)
        except Exception as error:
            row |= {"failure": repr(error)[:400], "where": traceback.format_exc()[-900:]}
        rows.append(row)
        shown = {key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}
        print("engine", shown, flush=True)
        gc.collect()
    return rows


def time_engine(
    machine: Machine, model: Any, shape: tuple[int, int, int, str], given: dict[str, Any], graphs: str
) -> Row:  # fmt: skip
    n, prompt, new, memory = shape
    os.environ["MILLPOND_CUDA_GRAPHS"] = graphs
    prompts = [torch.randint(2, 500, (prompt,)).tolist() for _ in range(n)]
    params = mp.SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
    found: Row = {}
    with mp.LLM(model, kv_memory=memory, max_step_tokens=4096, max_running=256, **given) as llm:
        for some, most in ((prompts[:2], replace(params, max_tokens=8)), (prompts, params)):
            begin, arrivals = time.perf_counter(), []
            for number, ids in enumerate(some):
                llm.engine.add(Request(request_id=str(number), prompt=tuple(ids), params=most))
            while llm.engine.busy:
                llm.engine.step()
                arrivals.append(time.perf_counter())
            spent = time.perf_counter() - begin
            steps = [late - early for early, late in itertools.pairwise(arrivals[-new // 2 :])]
            found = {"seconds": spent, "tokens_per_s": n * new / spent, "step_ms": statistics.median(steps) * 1e3}
        graph = getattr(getattr(llm.engine._model, "_lean", None), "_graph", None)
        if graph is not None:
            found |= {"recorded": graph.recorded, "replayed": graph.replayed}
        stats = llm.stats()
        found["preempted"] = getattr(stats, "preemptions", None)
    os.environ.pop("MILLPOND_CUDA_GRAPHS")
    return found


PLACES = (
    {"device": 1.0}, {"device": 0.4, "host": 0.6}, {"host": 1.0}, {"device": 0.2, "host": 0.4, "disk": 0.4},
    {"disk": 1.0},
)  # fmt: skip


def run_placed(machine: Machine) -> list[Row]:
    """Answers of the engine with layers on the device, in the host's memory and on the disk, against the CPU."""
    tokenizer = mp.load_tokenizer("pond-recall")
    prompts = [TEXT[: 60 * n] + QUESTIONS[0] for n in range(1, 10)]
    params = mp.SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    rows = []
    places = [weights for weights in PLACES if machine.cuda or "device" not in weights]
    for method, weights in itertools.product(("full", "h2o"), places):
        row: Row = {"op": "placed", "method": method, "weights": weights}
        options: dict[str, Any] = {"method": method} | ({} if method == "full" else {"budget": "20%"})
        try:
            found = []
            for given in ({}, {"device": str(machine.device), "plan": mp.Plan(weights=weights)}):
                with mp.LLM("pond-recall", tokenizer=tokenizer, **options, **given) as llm:
                    found.append([list(out.completions[0].token_ids) for out in llm.generate(prompts, params)])
            same = [a == b for one, other in zip(*found, strict=True) for a, b in zip(one, other, strict=True)]
            row["same_tokens"] = sum(same) / len(same)
            row["ok"] = row["same_tokens"] >= 0.98  # weights are in bf16
        except Exception as error:
            row |= {"ok": False, "failure": repr(error)[:400], "where": traceback.format_exc()[-900:]}
        rows.append(row)
        print("placed", {key: value for key, value in row.items() if key != "op"}, flush=True)
    return rows
