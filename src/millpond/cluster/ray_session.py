"""RaySession: a private Ray on this machine, or the connection to one that runs."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from typing import Any

from millpond.errors import OptionError
from millpond.optional import require

#: Addresses of this machine; others need a token, since whoever reaches Ray runs code there.
_LOCAL = ("auto", "local", "localhost", "127.0.0.1", "[::1]")
#: Bytes of the object store besides what waits to be moved: Ray takes no fewer.
_STORE = 96 * 2**20


class _Connection:
    """A Ray to which this process is connected because of sessions, and those that still use it.

    Attributes:
        address: as it was given. folder: with the files of a private one.
    """

    def __init__(self, address: str | None, folder: str | None) -> None:
        self.address, self.folder = address, folder
        self.users: set[RaySession] = set()


#: A process has one connection to Ray at most; `_lock` guards it.
_lock = threading.Lock()
_connection: _Connection | None = None


class RaySession:
    """Ray for the workers of one cluster.

    A process is connected to one Ray at most: clusters of one process share it, and the last one that closes ends it.

    Args:
        address: of a running Ray ("auto": that of this machine); None: one of this process.
        n_workers: CPUs that a Ray of its own offers, one for each worker. n_bytes: that may be on their way at a time.

    Raises:
        OptionError: Ray is not installed, cannot be reached, or is on another machine and asks for no token; or the
            process has clusters at another address.
    """

    def __init__(self, address: str | None, n_workers: int, n_bytes: int) -> None:
        self.ray: Any = require("ray", "cluster", "a cluster of several engines")
        if address is not None:
            check_address(address)
        self._connection: _Connection | None = None
        with _lock:
            self._join(address, n_workers, n_bytes)

    def _join(self, address: str | None, n_workers: int, n_bytes: int) -> None:
        global _connection
        if not self.ray.is_initialized():
            _connection = _connected(self.ray, address, n_workers, n_bytes)
        elif _connection is None:
            return  # whoever connected this process to Ray ends that too
        elif _connection.address != address:
            have, want = (where or "a private one" for where in (_connection.address, address))
            raise OptionError(
                f"this process has clusters on one Ray ({have}) and cannot have others on another ({want}): give all "
                "the same address=, or close those first"
            )
        self._connection = _connection
        self._connection.users.add(self)

    def close(self) -> None:
        """Leave Ray; the last cluster of this process ends a private one, with its files."""
        global _connection
        with _lock:
            mine = self._connection
            if mine is None or self not in mine.users:
                return
            mine.users.remove(self)
            if mine.users:
                return
            if _connection is mine:  # else it was ended by others, and there is another one
                _connection = None
                self.ray.shutdown()
            _remove(mine.folder)


def _connected(ray: Any, address: str | None, n_workers: int, n_bytes: int) -> _Connection:
    """
    Raises:
        OptionError: Ray cannot be reached.
    """
    options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    folder: str | None = None
    if address is None:
        folder = tempfile.mkdtemp(prefix="millpond-ray-")
        options |= {
            "address": "local",
            "num_cpus": n_workers,
            "include_dashboard": False,
            "_temp_dir": folder,
            "object_store_memory": _STORE + 2 * n_bytes,
            "_system_config": {"worker_niceness": 0},
        }
    else:
        options["address"] = address
    try:
        ray.init(**options)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        _remove(folder)
        raise OptionError(f"Ray cannot be reached at {address or 'this machine'}: {error}") from error
    return _Connection(address, folder)


def _remove(folder: str | None) -> None:
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def check_address(address: str) -> None:
    """
    Raises:
        OptionError: an address of another machine without token authentication.
    """
    host = address.removeprefix("ray://").rpartition(":")[0] or address
    if host not in _LOCAL and os.environ.get("RAY_AUTH_MODE") != "token":
        raise OptionError(
            f"address={address!r} is another machine, and whoever reaches Ray there runs code: set RAY_AUTH_MODE=token "
            "and the cluster's token on all machines, or use address='auto' on one of them"
        )
