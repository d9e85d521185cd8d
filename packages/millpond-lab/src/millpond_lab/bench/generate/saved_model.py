"""Trained weights for the benchmarks that otherwise run on random ones."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from millpond.errors import OptionError
from millpond.models.downloads import downloaded_gguf
from millpond.models.gguf.convert import find_gguf
from millpond.models.load import load_model, resolve

_TOLD = (
    "model_type",
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
)


@dataclass(frozen=True)
class SavedModel:
    """A folder of safetensors.

    Attributes:
        sha256: of its weights. gguf: the file that it was converted from, if any.
    """

    folder: Path
    sha256: str
    gguf: Path | None = None

    @staticmethod
    def of(name: str) -> SavedModel:
        """The model that `--model` names: a folder, a GGUF file, or a model on this machine.

        Raises:
            OptionError: there is no such model on this machine, or its weights are not safetensors.
        """
        path = Path(name)
        gguf = find_gguf(path) if path.exists() else downloaded_gguf(name)
        folder = Path(resolve(name, "bf16"))
        files = sorted(folder.glob("*.safetensors")) if (folder / "config.json").is_file() else []
        if not files:
            raise OptionError(
                f"model {name!r}: the benchmark needs a folder with config.json and safetensors on this machine, "
                "a GGUF file, or a name of 'millpond models'"
            )
        digest = hashlib.sha256()
        for file in files:
            with file.open("rb") as opened:
                while part := opened.read(1 << 20):
                    digest.update(part)
        return SavedModel(folder, digest.hexdigest(), gguf)

    @property
    def vocab(self) -> int:
        """Number of token ids."""
        return int(self._read()["vocab_size"])

    def config(self) -> dict[str, Any]:
        """Fields of a report."""
        config = self._read()
        size = {"head_dim": config["hidden_size"] // config["num_attention_heads"]}
        told = {key: config[key] for key in _TOLD if key in config}
        name = self.gguf.stem if self.gguf else self.folder.name
        return {"name": name, "weights_sha256": self.sha256, **size, **told}

    def build(self, seed: int = 0) -> PreTrainedModel:
        """The model in bfloat16; `seed` is ignored."""
        return load_model(self.folder, "bf16")

    def weight_bytes(self) -> int:
        """Bytes of its weights in bfloat16."""
        return sum(weight.nbytes for weight in self.build().parameters())

    def _read(self) -> dict[str, Any]:
        config: dict[str, Any] = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))
        return config
