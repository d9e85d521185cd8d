"""Candidates of `bench engines`: our engine with several caches, and other engines in settings that suit them.

Every engine answers in a process of its own, with the same weights, prompts, threads and 16-bit arithmetic.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from millpond.budget import Budget
from millpond.codec import codec_named
from millpond.errors import MillpondError, OptionError
from millpond.methods import METHODS
from millpond.runner.packed_model import check_format
from millpond_lab.bench.common.optional_peer import TIMEOUT_S
from millpond_lab.bench.generate.candidates import BenchModel

SCRIPTS = Path("benchmarks/engines")  #: of the repository, as seen from its root


class ConversionError(MillpondError):
    """A model could not be converted for an engine."""


@dataclass(frozen=True)
class Weights:
    """A model's files below `folder`: made on first use, and kept for later runs.

    timeout_s: that a conversion may take.
    """

    shape: BenchModel
    seed: int
    folder: Path
    timeout_s: float = TIMEOUT_S

    @property
    def root(self) -> Path:
        """Where all formats of this model lie; its name follows from shape and seed."""
        return self.folder / sha256(repr((self.shape, self.seed)).encode()).hexdigest()[:12]

    def saved(self) -> Path:
        """The folder as transformers loads it, in bfloat16."""
        target = self.root / "transformers"
        if not target.exists():
            part, model = _fresh(target), self.shape.build(self.seed)
            part.mkdir()
            model.config.dtype, model.config.architectures = model.dtype, [type(model).__name__]
            model.config.save_pretrained(part)
            save_file(dict(model.named_parameters()), part / "model.safetensors", {"format": "pt"})
            part.rename(target)
        return target

    def converted(self, name: str, python: Path, script: Path) -> Path:
        """Convert the saved model by `script FROM TO`, run by `python`; return TO.

        Raises:
            ConversionError: the script failed (with the last line that it wrote), or took too long.
        """
        target, source = self.root / name, self.saved()
        if not target.exists():
            part = _fresh(target)
            command = [str(python), "-W", "ignore", str(script), str(source), str(part)]
            try:
                done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=self.timeout_s)
            except subprocess.TimeoutExpired as error:
                late = f"{script.name} was not done within {self.timeout_s:g} s and was ended"
                raise ConversionError(late) from error
            if done.returncode:
                last = (done.stderr.strip().splitlines() or ["no message"])[-1]
                raise ConversionError(f"{script.name} failed: {last}")
            part.rename(target)
        return target


def _fresh(target: Path) -> Path:
    """An empty path next to `target` for a partial file."""
    part = target.with_name(target.name + ".part")
    part.parent.mkdir(parents=True, exist_ok=True)
    if part.is_dir():
        shutil.rmtree(part)
    part.unlink(missing_ok=True)
    return part


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


def ours(
    methods: Sequence[str], codecs: Sequence[str], budget: str, weights: str | None = None, gguf: Path | None = None
) -> list[EngineCandidate]:
    """Our engine: the full cache, each method at the budget, the full cache in each codec, and with packed weights.

    Args:
        weights: "int8" or "int4", of another candidate with the full cache. gguf: that it is read from; None: from the
            saved model.

    Raises:
        OptionError: no such method, codec or format.
    """
    kind = Kind("millpond", Path(sys.executable), SCRIPTS / "millpond_engine.py", "make install", Weights.saved)
    of_file = kind if gguf is None else replace(kind, model=lambda _: gguf)

    def one(setting: str, method: str, share: str | None, codec: str | None) -> EngineCandidate:
        settings = {"method": method, "budget": share, "codec": codec, "weights": None, "step_tokens": STEP_TOKENS}
        return EngineCandidate(kind, setting, lambda *_: settings)

    for method in methods:
        METHODS.get(method)
    for codec in codecs:
        codec_named(codec)
    check_format(weights)
    full = one("full", "full", None, None)
    packed = {**full.settings(0, 0, 0), "weights": weights}
    return [
        full,
        *(one(f"{method} {budget}", method, budget, None) for method in methods),
        *(one(f"full, {codec}", "full", None, codec) for codec in codecs),
        *([EngineCandidate(of_file, _packed(weights), lambda *_: packed)] if weights else []),
    ]


def _packed(weights: str) -> str:
    """Our setting with the full cache and packed weights."""
    return f"full, {weights} weights"


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


def llamacpp(python: Path, gguf: Path | None = None, weights: str | None = None) -> list[EngineCandidate]:
    """llama.cpp: keys and values in 16 bits, weights in bf16; and, where the model has one, its GGUF file as it is.

    weights: of ours that the file is compared with; None: those of the saved model.
    """
    kind = engine("llama.cpp", python, "llamacpp", "gguf_model.py")

    def settings(batch: int, prompt: int, new_tokens: int) -> dict[str, Any]:
        return {"cache": "f16", "batch": batch, "room": prompt + new_tokens + 1, "step_tokens": STEP_TOKENS}

    found = [EngineCandidate(kind, "full", settings)]
    if gguf is not None:
        against = FULL if weights is None else f"millpond, {_packed(weights)}"
        of_file = replace(kind, model=lambda _: gguf)
        found.append(EngineCandidate(of_file, f"full, weights of {gguf.name}", settings, against))
    return found


def only(candidates: Sequence[EngineCandidate], parts: Sequence[str]) -> list[EngineCandidate]:
    """The candidates whose labels contain one of the parts; all of them without parts.

    Raises:
        OptionError: a part that no label contains.
    """
    for part in parts:
        if not any(part in candidate.label for candidate in candidates):
            labels = "; ".join(candidate.label for candidate in candidates)
            raise OptionError(f"--only {part!r} is in no label; the candidates are {labels}")
    return [one for one in candidates if not parts or any(part in one.label for part in parts)]
