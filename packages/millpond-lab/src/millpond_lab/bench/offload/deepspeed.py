"""Cells of DeepSpeed's ZeRO-3 inference, with weights in host memory or in files of its own."""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from millpond.errors import OptionError
from millpond.models.load import resolve
from millpond_lab.bench.offload.batch import time_batch
from millpond_lab.bench.offload.cap import Cap
from millpond_lab.bench.offload.settings import OffloadSettings
from millpond_lab.bench.offload.shapes import SHAPES, is_opt

#: Folder of its files, in the folder of the model.
FILES = "deepspeed"
#: Buffers of matrices that are read from files: with fewer it refuses to run, and its default.
_FEWEST_BUFFERS, _MOST_BUFFERS = 2, 5


def check(package: Path) -> None:
    """
    Raises:
        OptionError: the folder holds no DeepSpeed.
    """
    if not (package / "deepspeed").is_dir():
        raise OptionError(
            f"{package} holds no package deepspeed: run benchmarks/engines/deepspeed_env.sh, or choose other --cells"
        )


def run_deepspeed(folder: Path, device: str, batch: int, settings: OffloadSettings, package: Path) -> dict[str, Any]:
    """One batch: the prompts, then a few steps; the rest is projected with their median.

    It may take more than the memory of the settings, since with "host" all weights are in memory; the result says how
    much it took.

    Args:
        device: where the weights are, "host" or "nvme". package: a folder that `deepspeed_env.sh` made.

    Raises:
        RuntimeError: its operator that reads files cannot be built.
    """
    library = _library(package)
    if device == "nvme":
        _load_operator()
    # what is imported at the first use
    first: Any = AutoModelForCausalLM.from_pretrained(resolve("pond-recall"), trust_remote_code=False)
    first.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2)
    del first
    files = folder / FILES
    shutil.rmtree(files, ignore_errors=True)
    library.init_distributed("gloo")
    try:
        cap = Cap(folder, settings.memory, enforce=False)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, trust_remote_code=False)
        engine = library.initialize(model=model, config=config_of(device, files, settings))[0]
        return {**time_batch(engine.module.eval(), batch, settings), **cap.end(), "version": library.__version__}
    finally:
        shutil.rmtree(files, ignore_errors=True)
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def config_of(device: str, files: Path, settings: OffloadSettings) -> dict[str, Any]:
    """Settings of ZeRO-3.

    From files, it has a buffer of the largest matrix for each that it reads at a time, 2 to 5 of them in half of the
    memory, and the weights of at most two layers beyond that; its defaults are 1 GB and all weights.

    Args:
        files: an empty folder for what it writes.
    """
    zero: dict[str, Any] = {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": False}}
    if device == "nvme":
        shape = SHAPES[settings.shape]
        hidden, inner = shape["hidden_size"], shape["intermediate_size"]
        largest = hidden * max(shape["vocab_size"], inner)
        buffers = min(max(settings.memory // 2 // (2 * largest), _FEWEST_BUFFERS), _MOST_BUFFERS)
        kv = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
        layer = hidden * (2 * hidden + 2 * kv + (2 if is_opt(settings.shape) else 3) * inner)
        zero["offload_param"] |= {
            "device": "nvme",
            "nvme_path": str(files),
            "buffer_count": buffers,
            "buffer_size": largest,
            "max_in_cpu": 0,
        }
        zero |= {
            "stage3_prefetch_bucket_size": layer,
            "stage3_max_live_parameters": 2 * layer,
            "stage3_max_reuse_distance": 0,
        }
    return {"zero_optimization": zero, "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}}


def _library(package: Path) -> Any:
    """DeepSpeed on the CPU, for one process; what it compiles is kept in the folder."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {
        "DS_ACCELERATOR": "cpu",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCH_EXTENSIONS_DIR": str((package / "operators").resolve()),
        "PATH": f"{(package / 'bin').resolve()}:{os.environ['PATH']}",
    }
    libaio = (package / "libaio").resolve()
    if libaio.is_dir():  # unpacked there, since the system has none
        os.environ |= {"CPATH": str(libaio / "include"), "LIBRARY_PATH": str(libaio / "lib")}
        ctypes.CDLL(str(libaio / "lib" / "libaio.so.1"), mode=ctypes.RTLD_GLOBAL)
    sys.path.insert(0, str(package))
    return import_module("deepspeed")


def _load_operator() -> None:
    """Compile the operator that reads files, unless that was done before, about two minutes."""
    builder = import_module("deepspeed.ops.op_builder").AsyncIOBuilder()
    if not builder.is_compatible():
        raise RuntimeError(
            "DeepSpeed's operator async_io needs libaio with its headers, and the compiler does not find them; "
            "install libaio-dev, and run benchmarks/engines/deepspeed_env.sh again"
        )
    builder.load()
