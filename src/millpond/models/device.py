"""Checks of the device that a user names: that torch can use it, that it has the dtype, and room for the weights."""

from __future__ import annotations

from typing import Any

import torch

from millpond.errors import BudgetError, OptionError
from millpond.kernels.card import BFLOAT16_CAPABILITY, Card


def usable_device(name: str, user_text: str) -> torch.device:
    """Return the device of that name.

    Args:
        name: Name of the device.
        user_text: The user's words for the error: "device='cuda'" or "--device cuda".

    Raises:
        OptionError: torch knows no such device, or cannot use it here.
    """
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).split("\n")[0]
        raise OptionError(f"{user_text}: torch cannot use it here ({reason})") from error
    return device


def check_dtype_there(device: torch.device, dtype: torch.dtype, *, cuda: Any = torch.cuda) -> None:
    """Check that a device computes in a dtype; others than CUDA devices do.

    Args:
        device: The device.
        dtype: Dtype of the model.
        cuda: Module that knows the device; tests pass their own.

    Raises:
        OptionError: bfloat16, on a card that is too old for it.
    """
    if device.type != "cuda" or dtype != torch.bfloat16:
        return
    card = Card.of(device, cuda)
    if card.capability < BFLOAT16_CAPABILITY:
        least = ".".join(map(str, BFLOAT16_CAPABILITY))
        raise OptionError(
            f"the model is in bfloat16, which cards have from compute capability {least} on, and {device} is {card}; "
            "load it with dtype='f16' or dtype='f32'"
        )


def check_room_for(device: torch.device, n_bytes: int, *, cuda: Any = torch.cuda) -> None:
    """Check that the weights of a model fit on a device.

    Others than CUDA devices are not asked.

    Args:
        device: The device.
        n_bytes: Bytes of the weights.
        cuda: Module that knows the device; tests pass their own.

    Raises:
        BudgetError: they do not.
    """
    if device.type != "cuda":
        return
    card = Card.of(device, cuda)
    if n_bytes > card.free_bytes:
        raise BudgetError(
            f"the weights take {n_bytes:,} bytes, and {device} ({card.name}) has {card.free_bytes:,} free of "
            f"{card.total_bytes:,}; give device_memory=, such as '{max(card.free_bytes * 9 // 10 >> 30, 1)}GiB', so "
            "that layers which do not fit stay in the host's memory, or choose a smaller model"
        )
