"""Options of loading a model, and the progress of slow steps before a model runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from os import PathLike

import torch

from millpond.engine.config import EngineConfig
from millpond.engine.offload.open import Opened, open_in_memory
from millpond.engine.offload.open_on_device import open_on_device
from millpond.engine.offload.plan import Plan, load_plan
from millpond.engine.offload.planner import Workload
from millpond.engine.settings import LoadSettings
from millpond.errors import OptionError
from millpond.models.device import usable_device
from millpond.models.weights.packed_file import Report
from millpond.models.weights.streamed import check_verify


@contextmanager
def bar() -> Iterator[Report]:
    """Yield a function that shows progress: a bar on a terminal with rich, else nothing."""
    if not sys.stderr.isatty() or find_spec("rich") is None:
        yield lambda description, share: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=1.0, visible=False)

        def report(description: str, share: float) -> None:
            progress.update(task, description=description, completed=share, visible=True)

        yield report


#: The plan that is searched for.
AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class LoadOptions(LoadSettings):
    """Options by which `LLM` loads a model; `LoadSettings` explains the fields.

    Raises:
        OptionError: an argument that does nothing without `memory` or `plan`, or a `plan` that is not a plan.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.plan is not None and not isinstance(self.plan, Plan | str | PathLike):
            raise OptionError(
                f"plan={self.plan!r} must be a Plan, a file of 'millpond plan --out', 'auto', or be left out"
            )
        check_verify(self.verify)
        if self.device_memory is not None and self.gpu is None:
            raise OptionError(
                f"device_memory={self.device_memory!r} is memory of an accelerator, and device={self.device!r} is "
                "not one; give device='cuda', or memory= for the host's"
            )
        if self.plan == AUTO and self.memory is None and self.device_memory is None:
            raise OptionError("plan='auto' searches for a plan inside a memory limit; give memory=, such as '1GiB'")
        if self.gpu is not None and self.is_limited:
            if self.gpu.type != "cuda":
                raise OptionError(f"device={self.device!r}: memory limits and plans are for 'cuda' devices and the CPU")
            if self.machine is not None and self.memory is None:
                raise OptionError("machine= is for a plan inside the host's memory; give memory=, or leave it out")
            if self.plan in (None, AUTO) and self.device_memory is None:
                raise OptionError(
                    f"memory= with device={self.device!r} needs device_memory=, such as '16GiB', or a plan"
                )
        planning_options = {name: getattr(self, name) for name in ("disk", "machine", "prompt_tokens", "new_tokens")}
        if not self.is_limited:
            for name, value in planning_options.items():
                if value is not None:
                    raise OptionError(f"{name}= belongs to memory= or plan=; give one of them, or leave it out")
            if self.verify != "first":
                raise OptionError("verify= belongs to memory= or plan=; give one of them, or leave it out")
        if self.plan not in (None, AUTO):
            for name in ("machine", "prompt_tokens", "new_tokens"):
                if planning_options[name] is not None:
                    raise OptionError(f"{name}= is for making a plan, and one is given; leave one of the two out")
        if (self.prompt_tokens is None) != (self.new_tokens is None):
            raise OptionError("prompt_tokens= and new_tokens= describe a plan's requests together; give both")

    @property
    def is_limited(self) -> bool:
        """Whether memory is limited, or a plan given."""
        return self.memory is not None or self.plan is not None or self.device_memory is not None

    @property
    def gpu(self) -> torch.device | None:
        """Accelerator that is named; None for a CPU.

        Raises:
            OptionError: torch knows no such device.
        """
        if self.device is None:
            return None
        try:
            device = torch.device(self.device)
        except RuntimeError as error:
            raise OptionError(f"device={self.device!r}: {str(error).splitlines()[0]}") from error
        return None if device.type == "cpu" else device

    def usable_gpu(self) -> torch.device | None:
        """Return `gpu`, which torch can use here.

        Raises:
            OptionError: torch cannot use it.
        """
        return None if self.gpu is None else usable_device(str(self.gpu), f"device={self.device!r}")

    def open(self, model: str | PathLike[str], dtype: str | None, config: EngineConfig) -> Opened:
        """Open the model in a folder inside the limit, with a bar for slow steps.

        Raises:
            OptionError, BudgetError, UnsupportedModelError, DataError: see `open_in_memory`.
        """
        plan = self.plan
        if isinstance(plan, str | PathLike):
            plan = None if plan == AUTO else load_plan(plan)
        if self.verify != "first" and config.weights is None:
            raise OptionError("verify= is for packed weights, which have checksums; give weights=, or leave it out")
        workload = None
        if self.prompt_tokens is not None and self.new_tokens is not None:
            workload = Workload(prompt=self.prompt_tokens, new=self.new_tokens)
        device = self.usable_gpu()
        with bar() as report:
            if device is not None:
                return open_on_device(
                    model,
                    device,
                    self.device_memory,
                    self.memory,
                    plan,
                    dtype,
                    config,
                    disk=self.disk,
                    machine=self.machine,
                    workload=workload,
                    report=report,
                    verify=self.verify,
                )
            return open_in_memory(
                model,
                self.memory,
                plan,
                dtype,
                config,
                disk=self.disk,
                machine=self.machine,
                workload=workload,
                report=report,
                verify=self.verify,
            )
