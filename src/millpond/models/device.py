"""Check of the device that a user names."""

from __future__ import annotations

import torch

from millpond.errors import OptionError


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
