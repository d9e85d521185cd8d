"""The types of `**options` of constructors, which type checkers need as code: `millpond/engine/options.py`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from generated.results import ROOT
from millpond.cluster.settings import ClusterSettings
from millpond.engine.settings import EngineSettings, LoadSettings

PATH = ROOT / "src" / "millpond" / "engine" / "options.py"
HEAD = '''\
"""Types of `**options`, written by docs/generate.py; edit the dataclasses of the settings instead."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any, TypedDict

import torch

from millpond.budget import Budget
from millpond.cache.chunks.store import ChunkStore
from millpond.codec import CodecSpec
from millpond.engine.offload.machine import MachineConstants
from millpond.engine.offload.plan import Plan
from millpond.engine.settings import OnPressure, Overflow, Preemption
from millpond.hf.calibration.load import CalibrationSource
from millpond.hf.fit import FitSource
from millpond.hf.text_storage import TransformSource
from millpond.models.weights.streamed import Verify
from millpond.runner.runner_choice import Runner
'''


def option_types() -> str:
    """The module."""
    return HEAD + "".join(
        [
            _class("EngineOptions", "TypedDict", "Fields of `EngineConfig`.", _fields(EngineSettings)),
            _class("LLMOptions", "EngineOptions", "The same, and how a model is loaded.", _fields(LoadSettings)),
            _class(
                "ClusterOptions", "EngineOptions", "The same, and the workers of a cluster.", _fields(ClusterSettings)
            ),
        ]
    )


def _class(name: str, base: str, about: str, lines: Iterator[str]) -> str:
    return f'\n\nclass {name}({base}, total=False):\n    """{about}"""\n\n' + "".join(lines)


def _fields(kind: type) -> Iterator[str]:
    return (f"    {one.name}: {one.type}\n" for one in fields(kind))
