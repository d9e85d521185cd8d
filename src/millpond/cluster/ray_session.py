"""RaySession: a private Ray on this machine, or the connection to one that runs."""

from __future__ import annotations

import os
import shutil
import tempfile
from typing import Any

from millpond.errors import OptionError
from millpond.optional import require

#: Addresses of this machine; others need a token, since whoever reaches Ray runs code there.
_LOCAL = ("auto", "local", "localhost", "127.0.0.1", "[::1]")
#: Bytes of the object store besides what waits to be moved: Ray takes no fewer.
_STORE = 96 * 2**20


class RaySession:
    """Ray for the workers of one cluster.

    Args:
        address: of a running Ray ("auto": that of this machine); None: one of its own, which ends with the session.
        n_workers: CPUs that a Ray of its own offers, one for each worker. n_bytes: that may be on their way at a time.

    Raises:
        OptionError: Ray is not installed, cannot be reached, or is on another machine and asks for no token.
    """

    def __init__(self, address: str | None, n_workers: int, n_bytes: int) -> None:
        self.ray: Any = require("ray", "cluster", "a cluster of several engines")
        self._folder: str | None = None
        self._own = False
        if address is not None:
            check_address(address)
        if self.ray.is_initialized():
            return
        options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
        if address is None:
            self._folder = tempfile.mkdtemp(prefix="millpond-ray-")
            options |= {
                "address": "local", "num_cpus": n_workers, "include_dashboard": False, "_temp_dir": self._folder,
                "object_store_memory": _STORE + 2 * n_bytes, "_system_config": {"worker_niceness": 0},
            }  # fmt: skip
        else:
            options["address"] = address
        try:
            self.ray.init(**options)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            self._remove()
            raise OptionError(f"Ray cannot be reached at {address or 'this machine'}: {error}") from error
        self._own = True

    def close(self) -> None:
        """End a Ray of its own, with its files, or leave the one that runs."""
        if self._own:
            self.ray.shutdown()
        self._remove()

    def _remove(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


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
