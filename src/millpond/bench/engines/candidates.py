"""Candidates of `bench engines`: our engine with several caches, and other engines in settings that suit them.

Every engine answers in a process of its own, with the same weights, prompts, threads and 16-bit arithmetic.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from millpond.bench.engines.weights import SCRIPTS, Weights
from millpond.budget import Budget
from millpond.codec import codec_named
from millpond.methods import METHODS

#: Tokens of prompts that an engine may take in one step, where that is ours to set.
STEP_TOKENS = 2048
FULL = "millpond, full"  #: what everything without a closer counterpart is compared with


@dataclass(frozen=True)
class Kind:
    """An engine: the script that answers, and the interpreter of its environment.

    Attributes:
        made_by: the script that makes the environment. model: its weights; runs its converter where that is needed.
    """

    name: str
    python: Path
    script: Path
    made_by: str
    model: Callable[[Weights], Path]


@dataclass(frozen=True)
class EngineCandidate:
    """An engine in one setting.

    Attributes:
        settings: settings of its process besides model and threads, by (batch, prompt, new tokens).
        against: the label of ours that its numbers are compared with.
    """

    kind: Kind
    setting: str
    settings: Callable[[int, int, int], dict[str, Any]]
    against: str = FULL

    @property
    def label(self) -> str:
        """Engine and setting."""
        return f"{self.kind.name}, {self.setting}"


def engine(name: str, python: Path, script: str, converter: str) -> Kind:
    """Another engine, whose environment `benchmarks/engines/<script>_env.sh` makes."""

    def model(weights: Weights) -> Path:
        return weights.converted(script, python, SCRIPTS / converter)

    return Kind(name, python, SCRIPTS / f"{script}_engine.py", f"benchmarks/engines/{script}_env.sh", model)


def ours(methods: Sequence[str], codecs: Sequence[str], budget: str) -> list[EngineCandidate]:
    """Our engine: the full cache, each method at the budget, and the full cache in each codec.

    Raises:
        OptionError: no such method or codec.
    """
    kind = Kind("millpond", Path(sys.executable), SCRIPTS / "millpond_engine.py", "make install", Weights.saved)

    def one(setting: str, method: str, share: str | None, codec: str | None) -> EngineCandidate:
        settings = {"method": method, "budget": share, "codec": codec, "step_tokens": STEP_TOKENS}
        return EngineCandidate(kind, setting, lambda *_: settings)

    for method in methods:
        METHODS.get(method)
    for codec in codecs:
        codec_named(codec)
    return [
        one("full", "full", None, None),
        *(one(f"{method} {budget}", method, budget, None) for method in methods),
        *(one(f"full, {codec}", "full", None, codec) for codec in codecs),
    ]


def stock() -> list[EngineCandidate]:
    """Transformers with its own cache and attention, in our environment."""
    kind = Kind("transformers", Path(sys.executable), SCRIPTS / "transformers_engine.py", "make install", Weights.saved)
    return [EngineCandidate(kind, "DynamicCache, sdpa", lambda *_: {"step_tokens": STEP_TOKENS})]


def openvino(python: Path, budget: str, evicting: str) -> list[EngineCandidate]:
    """OpenVINO GenAI: 16 bits and whole prompts in a step, its eviction at our bytes, and its own defaults.

    `evicting`: the label of ours that its eviction is compared with.
    """
    kind = engine("OpenVINO GenAI", python, "openvino", "openvino_model.py")
    share = float(Budget.parse(budget).amount)
    base = {"keep": 0, "step_tokens": STEP_TOKENS, "defaults": False}
    return [
        EngineCandidate(kind, "full", lambda *_: base),
        EngineCandidate(kind, f"eviction {budget}", lambda _, n, __: {**base, "keep": int(share * n)}, evicting),
        EngineCandidate(kind, "full, its defaults", lambda *_: {**base, "defaults": True}),
    ]


def llamacpp(python: Path, gguf: Path | None = None) -> list[EngineCandidate]:
    """llama.cpp: keys and values in 16 bits, weights in bf16; and, where the model has one, its GGUF file as it is."""
    kind = engine("llama.cpp", python, "llamacpp", "gguf_model.py")

    def settings(batch: int, prompt: int, new_tokens: int) -> dict[str, Any]:
        return {"cache": "f16", "batch": batch, "room": prompt + new_tokens + 1, "step_tokens": STEP_TOKENS}

    found = [EngineCandidate(kind, "full", settings)]
    if gguf is not None:
        found.append(EngineCandidate(replace(kind, model=lambda _: gguf), f"full, weights of {gguf.name}", settings))
    return found
