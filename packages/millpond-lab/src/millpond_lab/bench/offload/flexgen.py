"""Cells of FlexGen's own code, whose calls of CUDA are answered by the CPU."""

from __future__ import annotations

import shutil
import statistics
import sys
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from millpond.engine.config import EngineConfig
from millpond.engine.offload.model_size import model_size
from millpond.errors import OptionError
from millpond_lab.bench.offload.cap import Cap
from millpond_lab.bench.offload.projection import growth, sizes_of
from millpond_lab.bench.offload.settings import OffloadSettings
from millpond_lab.bench.offload.shapes import COMMON, SHAPES, is_opt, prompts_of, weight_bytes
from millpond_lab.bench.offload.waited import waited_s

#: Folders of its weights and of what it offloads, in the folder of the model.
WEIGHTS, OFFLOADED = "flexgen", "flexgen-offloaded"
#: Of its weights' folder, which it names after the model.
_NAME = "random"
#: Ending of its files, by which the cap finds them.
_ENDING = ".dat"


def check(package: Path, shape: str) -> None:
    """
    Raises:
        OptionError: the folder holds no FlexGen, or the model is none that it knows.
    """
    if not (package / "flexllmgen").is_dir():
        raise OptionError(
            f"{package} holds no package flexllmgen: run benchmarks/engines/flexgen_env.sh, or choose other --cells"
        )
    if not is_opt(shape):
        raise OptionError(
            f"FlexGen runs only OPT, and {shape} is not an OPT: give --shape opt-1.0B, or choose other --cells"
        )


def run_flexgen(folder: Path, batch: int, batches: int, settings: OffloadSettings, package: Path) -> dict[str, Any]:
    """One block: the prompts, then a few steps; later steps read caches that have grown, and take longer by that.

    All weights and all keys and values are on the disk, as in its paper for models beyond memory; activations are in
    memory. Its device is the CPU: copies between the two memories of its machine are copies in one here, and products
    of float16 are computed in float32, since CPUs have none that are fast. It may take more than the memory of the
    settings, and the result says how much it took.

    Args:
        batch: sequences that are computed at a time. batches: of a block, for which weights are read once.
        package: a folder that `flexgen_env.sh` made.
    """
    answer_cuda()
    sys.path[:0] = [str(package), str(package / "packages")]
    opt, backend = import_module("flexllmgen.flex_opt"), import_module("flexllmgen.pytorch_backend")
    utils, timers = import_module("flexllmgen.utils"), import_module("flexllmgen.timer").timers
    compression = import_module("flexllmgen.compression").CompressionConfig
    _name_files(backend)
    write_weights(folder, settings.shape)
    shutil.rmtree(folder / OFFLOADED, ignore_errors=True)
    cap = Cap(folder, settings.memory, enforce=False)
    device, memory = backend.TorchDevice("cpu"), backend.TorchDevice("cpu")
    disk = backend.TorchDisk(str(folder / OFFLOADED))
    mixed = backend.TorchMixedDevice([device, memory, disk])
    env = utils.ExecutionEnv(gpu=device, cpu=memory, disk=disk, mixed=mixed)
    bits = {"num_bits": 4, "group_size": 64, "symmetric": False}
    policy = opt.Policy(
        batch, batches, 0, 0, 0, 0, 100, 0,
        overlap=True, sep_layer=True, pin_weight=False, cpu_cache_compute=False, attn_sparsity=1.0,
        compress_weight=False, comp_weight_config=compression(group_dim=0, **bits),
        compress_cache=False, comp_cache_config=compression(group_dim=2, **bits),
    )  # fmt: skip
    try:
        model = opt.OptLM(_config(settings.shape), env, str(folder / WEIGHTS), policy)
        prompts = np.array(prompts_of(batch * batches, settings.prompt, settings.shape))
        waited = waited_s()
        timers("generate").reset()
        model.generate(prompts, max_new_tokens=settings.new, cut_gen_len=min(settings.steps + 1, settings.new))
        waited = waited_s() - waited
    finally:
        env.close_copy_threads()
        shutil.rmtree(folder / OFFLOADED, ignore_errors=True)
    prefill_s, *steps = timers("generate").costs
    sizes = sizes_of(model_size(folder), EngineConfig(method="full"), settings.prompt)
    grown = growth(sizes, len(steps), settings.new, batch * batches, weight_bytes(folder))
    decode_s = grown * statistics.fmean(steps) * (settings.new - 1)
    new_tokens = batch * batches * settings.new
    return {
        "requests": batch * batches,
        "new_tokens": new_tokens,
        "seconds": prefill_s + decode_s,
        "projected": len(steps) < settings.new - 1,
        "tokens_per_s": new_tokens / (prefill_s + decode_s),
        "prefill_s": prefill_s,
        "decode_step_s": statistics.median(steps),
        "decode_steps": len(steps),
        "waited_s": waited,
        "timed_s": prefill_s + sum(steps),
        **cap.end(),
    }


def _config(shape: str) -> Any:
    its, config = SHAPES[shape], import_module("flexllmgen.opt_config").OptConfig
    width = its["hidden_size"]
    return config(
        name=_NAME,
        num_hidden_layers=its["num_hidden_layers"],
        max_seq_len=COMMON["max_position_embeddings"],
        hidden_size=width,
        n_head=its["num_attention_heads"],
        input_dim=width,
        ffn_embed_dim=its["intermediate_size"],
        vocab_size=its["vocab_size"],
    )


def write_weights(folder: Path, shape: str) -> None:
    """Write the model's weights as FlexGen reads them, an array in float16 a file, unless they are there."""
    into = folder / WEIGHTS / f"{_NAME}-np"
    if into.is_dir():
        return
    part = into.with_name("part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  # no dict
                array = tensors.get_tensor(name).to(torch.float16).numpy()
                known = name.removeprefix("model.").replace("decoder.final_layer_norm", "decoder.layer_norm")
                with (part / known).open("wb") as out:
                    np.save(out, array)
    part.rename(into)


def _name_files(backend: Any) -> None:
    """Let its files end in `_ENDING`."""
    named = backend.TorchTensor.next_name
    backend.TorchTensor.next_name = classmethod(lambda cls: named() + _ENDING)


def answer_cuda() -> None:
    """Let the CPU answer the calls of CUDA that FlexGen makes, and compute products of float16 in float32."""
    library: Any = torch
    cuda, functional, half = library.cuda, library.nn.functional, torch.float16
    cuda.Stream = lambda *given, **more: None
    cuda.stream = lambda stream: nullcontext()
    cuda.synchronize = lambda *given: None
    cuda.set_device = lambda device: None
    changed: Any = Tensor
    changed.cuda = lambda self, *given, **more: self
    changed.pin_memory = lambda self, *given: self
    empty, linear, bmm = library.empty, functional.linear, library.bmm

    def unpinned(*given: Any, pin_memory: bool = False, **more: Any) -> Tensor:
        made: Tensor = empty(*given, **more)
        return made

    def wide_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        wide = x.dtype == half
        given = (
            (x, weight, bias) if not wide else tuple(one if one is None else one.float() for one in (x, weight, bias))
        )
        out: Tensor = linear(*given)
        return out.to(half) if wide else out

    def wide_bmm(one: Tensor, other: Tensor) -> Tensor:
        wide = one.dtype == half
        out: Tensor = bmm(one.float(), other.float()) if wide else bmm(one, other)
        return out.to(half) if wide else out

    library.empty, functional.linear, library.bmm = unpinned, wide_linear, wide_bmm
