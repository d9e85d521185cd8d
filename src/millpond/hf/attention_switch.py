"""Temporary replacement of the attention of a configuration's models, until its last user ends."""

from __future__ import annotations

import threading
from collections.abc import Callable

from transformers import PreTrainedConfig

#: Configurations whose attention is switched: id -> (users, the implementation before the first).
_switched: dict[int, tuple[int, str | None]] = {}
# taken by finalizers too, which may run in a thread that holds it
_lock = threading.RLock()


def switch(config: PreTrainedConfig, name: str) -> Callable[[], None]:
    """Let models of this configuration attend through the implementation called `name`.

    Returns:
        What undoes it, once no other caller needs it. It keeps the configuration alive.
    """
    with _lock:
        users, before = _switched.get(id(config), (0, config._attn_implementation))
        _switched[id(config)] = (users + 1, before)
        config._attn_implementation = name

    def undo() -> None:
        with _lock:
            users, before = _switched.pop(id(config))
            if users > 1:
                _switched[id(config)] = (users - 1, before)
            else:
                config._attn_implementation = before

    return undo


def before(config: PreTrainedConfig | None) -> str | None:
    """The implementation that a configuration had before it was switched; None where it is not."""
    return _switched.get(id(config), (0, None))[1]
