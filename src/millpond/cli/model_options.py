"""Options of a model that a command loads: which one, in which numbers, and on which device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from millpond.cli.option_groups import OptionGroup
from millpond.cli.options import DeviceName, DtypeName, ModelName
from millpond.errors import OptionError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class ModelOptions(OptionGroup):
    """The model of a command."""

    model: ModelName = "pond-recall"
    dtype: DtypeName = "auto"
    device: DeviceName = None

    def load(self) -> tuple[Any, PreTrainedTokenizerBase]:
        """The model on its device, and its tokenizer.

        Raises:
            OptionError: the model cannot be loaded, or the device cannot be used.
        """
        return load_on(self.model, self.dtype, self.device)


def load_on(model: str, dtype: str, device: str | None) -> tuple[Any, PreTrainedTokenizerBase]:
    """A model on a device, and its tokenizer.

    Raises:
        OptionError: the model cannot be loaded, or the device cannot be used.
    """
    from millpond.models.load import load_model, load_tokenizer

    where = pick_device(device)
    loaded: Any = load_model(model, dtype)
    return loaded.to(where), load_tokenizer(model)


def pick_device(name: str | None) -> torch.device:
    """The device of that name; without a name, a GPU if there is one.

    Raises:
        OptionError: torch knows no such device, or cannot use it here.
    """
    import torch

    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).split("\n")[0]
        raise OptionError(f"--device {name}: torch cannot use it here ({reason})") from error
    return device
