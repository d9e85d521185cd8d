"""`millpond generate` of a model with packed weights or inside a limit of memory, which runs on an engine."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from millpond.cli.console import errors, notes
from millpond.cli.model_options import ModelOptions, device_of_engine
from millpond.cli.option_groups import OptionGroup
from millpond.cli.options import DeviceMemory, Disk, Memory, Weights
from millpond.cli.prompt_options import encode, wants_template
from millpond.errors import OptionError

if TYPE_CHECKING:
    from millpond.engine.sampling.params import SamplingParams


@dataclass(frozen=True, kw_only=True)
class Placing(OptionGroup):
    """Where the weights of a model lie, and in how many bits."""

    memory: Memory = None
    device_memory: DeviceMemory = None
    disk: Disk = None
    weights: Weights = None

    @property
    def asked(self) -> bool:
        """Whether the model runs on an engine."""
        return (self.memory or self.device_memory or self.disk or self.weights) is not None

    def check(self, device: str | None, chunk: int | None) -> None:
        """
        Raises:
            OptionError: options of `generate` that the engine does not have.
        """
        names = ("memory", "device_memory", "disk", "weights")
        given = ", ".join(f"--{name.replace('_', '-')}" for name in names if getattr(self, name) is not None)
        if device not in (None, "cpu") and (self.disk or self.weights) is not None:
            raise OptionError(f"--device {device}: --disk and --weights run on a CPU; leave --device out")
        if chunk is not None:
            raise OptionError(
                f"--chunk {chunk}: with {given} prompts are read in steps of the engine; leave --chunk out"
            )


def generate_in_engine(
    model: ModelOptions,
    placing: Placing,
    text: str,
    chat: bool | None,
    settings: Mapping[str, Any],
    params: SamplingParams,
) -> None:
    """Write the answer to a text, and a line about it.

    Args:
        chat: as `--chat`. settings: fields of `EngineConfig`. params: of the answer; the end of a turn is added where
            the chat template is used.
    """
    from millpond.cli.chat_backend import LocalBackend
    from millpond.engine.config import EngineConfig
    from millpond.engine.llm import LLM

    config = EngineConfig(**settings, weights=placing.weights, trust_remote_code=model.trust_remote_code)
    dtype = None if model.dtype == "auto" else model.dtype
    device = device_of_engine(model.device, placing.disk, placing.weights, placing.memory)
    with (
        notes(),
        LLM(
            model.model,
            config,
            dtype=dtype,
            memory=placing.memory,
            disk=placing.disk,
            device=device,
            device_memory=placing.device_memory,
        ) as llm,
    ):
        partner = LocalBackend(llm, params, model.model)
        ids = encode(llm.tokenizer, text, chat)[0].tolist()
        for part in partner.stream(tuple(ids), turn=wants_template(llm.tokenizer, chat)):
            sys.stdout.write(part)
            sys.stdout.flush()
        sys.stdout.write("\n")
        line = partner.last()
    errors().print(f"[dim]{escape(line)}[/]", soft_wrap=True, highlight=False)
