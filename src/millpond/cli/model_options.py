"""Options of a model that a command loads: which one, in which numbers, and on which device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from millpond.cli.option_groups import OptionGroup
from millpond.cli.options import DeviceName, DtypeName, ModelName, TrustRemoteCode

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class ModelOptions(OptionGroup):
    """The model of a command."""

    model: ModelName = "pond-recall"
    dtype: DtypeName = "auto"
    device: DeviceName = None
    trust_remote_code: TrustRemoteCode = False

    def load(self) -> tuple[Any, PreTrainedTokenizerBase]:
        """The model on its device, and its tokenizer.

        Raises:
            OptionError: the model cannot be loaded, or the device cannot be used.
        """
        return load_on(self.model, self.dtype, self.device, self.trust_remote_code)


def load_on(
    model: str, dtype: str, device: str | None, trust_remote_code: bool = False
) -> tuple[Any, PreTrainedTokenizerBase]:
    """A model on a device, and its tokenizer.

    Raises:
        OptionError: the model cannot be loaded, or the device cannot be used.
    """
    from millpond.models.load import load_model, load_tokenizer

    where = pick_device(device)
    tokenizer = load_tokenizer(model, trust_remote_code=trust_remote_code)
    loaded: Any = load_model(model, dtype, trust_remote_code=trust_remote_code)
    return loaded.to(where), tokenizer


def device_of_engine(name: str | None, *on_cpu: object) -> str | None:
    """The device of an engine's model: the one of that name; without a name a GPU if there is one, but not where one of
    the settings `on_cpu` is given, which are for a CPU.

    Raises:
        OptionError: torch knows no such device, or cannot use it here.
    """
    if name is None and any(setting is not None for setting in on_cpu):
        return None
    found = pick_device(name)
    return None if found.type == "cpu" else str(found)


def pick_device(name: str | None) -> torch.device:
    """The device of that name; without a name, a GPU if there is one.

    Raises:
        OptionError: torch knows no such device, or cannot use it here.
    """
    import torch

    from millpond.models.load import usable_device

    return usable_device(name or ("cuda" if torch.cuda.is_available() else "cpu"), f"--device {name}")
