"""The same weights for every engine: saved once, and converted by scripts in the engines' own environments."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from safetensors.torch import save_file

from millpond.errors import MillpondError
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
        """What `script FROM TO`, run by `python`, makes of the saved model, at TO.

        Raises:
            ConversionError: the script failed, and the last line that it wrote says why; or it took too long.
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
