"""Plans as files: what `millpond cluster plan --out` writes, read with everything checked."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from millpond.errors import DataError
from millpond.typed_json import read_json

#: Number of the form of the file.
FORMAT = 1
#: Most workers of a plan.
MAX_WORKERS = 4096
_WAY_OUT = "make one with 'millpond cluster plan --out'"


@dataclass(frozen=True, slots=True)
class PlannedWorkers:
    """Workers by role: either replicas, or some that read prompts and some that decode.

    Attributes:
        devices: Most devices of one worker.
    """

    replicas: int
    prefill: int
    decode: int
    devices: int

    @property
    def count(self) -> int:
        """Of all roles."""
        return self.replicas + self.prefill + self.decode


def load_plan(path: str) -> PlannedWorkers:
    """Return the recommended workers of a plan.

    Raises:
        OptionError: the file cannot be opened.
        DataError: it is no plan, or its workers do not go together.
    """
    data = read_json(path, "plan", FORMAT, _WAY_OUT)
    workers, copies = data.get("workers"), data.get("copies", 1)
    if not isinstance(workers, list) or not _is_count(copies) or not 0 < len(workers) * copies <= MAX_WORKERS:
        raise DataError(f"{path}: workers must be a list, and 1 to {MAX_WORKERS:,} with all copies; {_WAY_OUT}")
    roles: Counter[str] = Counter()
    for one in workers:
        role, devices = (one.get("role"), one.get("devices")) if isinstance(one, dict) else (None, None)
        if role not in ("both", "prefill", "decode") or not _is_count(devices):
            raise DataError(f"{path}: worker {str(one)[:80]} has no role and number of devices; {_WAY_OUT}")
        roles[role] += copies
    if roles.keys() not in ({"both"}, {"prefill", "decode"}):
        raise DataError(f"{path}: roles {sorted(roles)}: workers do both, or some read prompts and others decode")
    return PlannedWorkers(roles["both"], roles["prefill"], roles["decode"], max(one["devices"] for one in workers))


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 < value <= MAX_WORKERS
