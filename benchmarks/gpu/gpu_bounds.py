"""Rates measured in a run, and what a step or a prompt has to read or compute: the bounds of its figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from gpu_machine import Machine


@dataclass(frozen=True)
class Rates:
    """What the device does at best.

    Attributes:
        copy_bytes_per_s: bytes read and bytes written by a copy on the device. flop_per_s: of a product in bf16.
        upload_bytes_per_s: from pinned memory of the host to the device.
    """

    copy_bytes_per_s: float
    flop_per_s: float
    upload_bytes_per_s: float


def measure_rates(machine: Machine) -> Rates:
    """The rates of this device, each the median of a few runs."""
    n, side = (2**20, 128) if machine.tiny else (2**31, 8192)
    source = torch.empty(n, dtype=torch.uint8, device=machine.device).random_()
    target = torch.empty_like(source)
    copy_ms = machine.ms(lambda: target.copy_(source))
    host = torch.empty(n // 4, dtype=torch.uint8, pin_memory=machine.cuda)
    upload_ms = machine.ms(lambda: target[: n // 4].copy_(host, non_blocking=True))
    a, b = (torch.randn(side, side, device=machine.device, dtype=torch.bfloat16) for _ in range(2))
    product_ms = machine.ms(lambda: a @ b)
    return Rates(2 * n / copy_ms * 1e3, 2 * side**3 / product_ms * 1e3, n / 4 / upload_ms * 1e3)


def read_weight_bytes(model: Any) -> int:
    """Bytes of weights that a decoding step reads: all but the embeddings, of which it reads rows, where they are not
    the head too."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    own = 0 if embedding is head else embedding.nbytes
    return sum(weight.nbytes for weight in model.parameters()) - own


def prompt_flop(model: Any, tokens: int) -> float:
    """Floating-point operations of a prompt: two for each weight and token, the head for the last token alone, and
    causal attention."""
    config = model.config
    head = model.get_output_embeddings().weight.numel()
    embedding = model.get_input_embeddings().weight
    weights = sum(weight.numel() for weight in model.parameters()) - embedding.numel()
    weights -= 0 if model.get_output_embeddings().weight is embedding else head
    dim = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    attention = 2 * config.num_hidden_layers * config.num_attention_heads * dim * float(tokens) ** 2
    return 2.0 * weights * tokens + 2.0 * head + attention
