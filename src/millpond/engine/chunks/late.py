"""Chunks whose layers are not in when a pass needs them: their prompts step aside, and the others of the pass go on."""

from __future__ import annotations

from collections.abc import Iterable

from millpond.engine.chunks.blend import LayerWait
from millpond.engine.components import Components
from millpond.engine.request_state import RequestState

#: Seconds that a pass waits for layers at most, where other requests wait for the step, and where none does. New
#: requests wait as long.
WAIT_S, WAIT_ALONE_S = 0.02, 0.25


class LateChunks:
    """Bounds the wait of passes for layers of chunks.

    A prompt whose layer was not in has read nothing in that pass. It waits, with what was loaded, until all of its
    files are read, bad, or given up, and begins again then.

    Args:
        parts: Parts of the engine.
    """

    def __init__(self, parts: Components) -> None:
        self._scheduler, self._requests, self._chunk_loads = parts.scheduler, parts.requests, parts.chunk_loads

    def begin_pass(self, reading: Iterable[RequestState]) -> bool:
        """Let the prompts of a pass share its wait, and return whether layers of some are still being read."""
        loading = [state.blend for state in reading if state.blend is not None and state.blend.is_loading]
        wait = LayerWait(WAIT_S if len(self._requests) > 1 else WAIT_ALONE_S)
        for blend in loading:
            blend.wait = wait
        return bool(loading)

    def begins_again(self, state: RequestState) -> bool:
        """Return whether a layer of a prompt was not in; then it waits, and begins again."""
        blend = state.blend
        if blend is None or not blend.lacks_layer:
            return False
        loaded, blend.loaded = blend.loaded, None
        assert loaded is not None, "layers that are not in are being loaded"
        assert self._chunk_loads is not None, "by this"
        blend.store.begun_again()
        state.begin_again()
        self._scheduler.restart(state.scheduled, len(state.unfinished))
        self._chunk_loads.put_back(state, loaded)
        return True
