"""`millpond train retain` on a CUDA GPU: a random model of 1B parameters in bf16 and texts of 32,768 tokens.

    PYTHONPATH=src python benchmarks/gpu/gpu_train.py [--steps 4] [--tiny] [--out FILE]

It shows that the recipe runs there unchanged, how long a step takes and how much memory; not that heads become good.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from millpond.cli.app import app
from millpond.models.load import resolve


def make(folder: Path, tiny: bool) -> None:
    """A random model with the tokenizer of pond-text, and a text."""
    source = Path(resolve("pond-text"))
    for file in source.glob("tokenizer*"):
        shutil.copy(file, folder)
    config: Any = LlamaConfig(
        vocab_size=4096,
        hidden_size=64 if tiny else 2048,
        intermediate_size=128 if tiny else 8192,
        num_hidden_layers=2 if tiny else 16,
        num_attention_heads=4 if tiny else 32,
        num_key_value_heads=2 if tiny else 8,
        max_position_embeddings=65_536,
        pad_token_id=0,
        bos_token_id=1,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model: Any = LlamaForCausalLM(config)
    model.bfloat16().cpu().save_pretrained(folder)
    rng = random.Random(0)
    words = ["river", "stone", "lamp", "letter", "ship", "winter", "garden", "silver", "road", "window"]
    (folder / "text.txt").write_text(" ".join(rng.choice(words) for _ in range(4_000 if tiny else 120_000)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--tiny", action="store_true", help="a small model and texts of 512 tokens, on any device")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    make(folder, options.tiny)
    length, device = (512 if options.tiny else 32_768), "cuda" if torch.cuda.is_available() else "cpu"
    begin = time.perf_counter()
    arguments = [
        "train",
        "retain",
        "--model",
        str(folder),
        "--data",
        str(folder / "text.txt"),
        "--length",
        f"{length},{length}",
        "--steps",
        str(options.steps),
        "--device",
        device,
        "--out",
        str(folder / "heads.safetensors"),
    ]
    app(arguments, standalone_mode=False)
    spent = time.perf_counter() - begin
    lines = (folder / "heads.safetensors.log.jsonl").read_text().splitlines()
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    found = {
        "device": name,
        "torch": torch.__version__,
        "tokens": length,
        "steps": options.steps,
        "seconds": spent,
        "peak_bytes": peak,
        "log": [json.loads(line) for line in lines],
    }
    print(found)
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
