"""Reconstruction pass: the model repeats its prompt over its own cache, and each layer records the attention of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from millpond.cache.state.positions import PositionTracker
from millpond.cache.state.reconstruction import ReconstructionProbe
from millpond.errors import OptionError
from millpond.hf.grad_mode import no_autograd
from millpond.hf.model_profile import ModelProfile
from millpond.models.cache_argument import cache_argument
from millpond.policy.needs import PromptRepeat

if TYPE_CHECKING:
    from millpond.hf.protocol import LayerCaches


class PromptReconstruction:
    """Repetition of the text that every sequence has read since the last time.

    It runs in chunks, and rolls those tokens back.

    Args:
        profile: Profile of the model.
        device: Device of the model.
        repeat: Settings of the repetition.

    Attributes:
        settings: Settings of the repetition.
        running: Whether the text is being repeated.
    """

    def __init__(self, profile: ModelProfile, device: torch.device, repeat: PromptRepeat) -> None:
        self._decoder: Any = profile.modules[-1]
        self._device = device
        self.settings = repeat
        self._begins = torch.tensor(profile.begin_tokens or [-1])
        self._done = np.zeros(0, dtype=np.int64)  # (S,) tokens that were repeated, or evicted before
        self.running = False

    def run(self, cache: LayerCaches) -> None:
        """Repeat the new tokens of all sequences, then plan every layer.

        Raises:
            OptionError: the tokens that wait may be rolled back.
        """
        if cache.draft_rollback.recording:
            raise OptionError(
                "a prompt whose last tokens may be taken back, as in assisted generation, cannot be repeated; use "
                "another method with it"
            )
        seen = cache.tracker.seen.copy()
        self._run_plans(cache, self.measure(cache))
        self._done = seen

    def measure(self, cache: LayerCaches) -> list[ReconstructionProbe]:
        """Repeat the new tokens of all sequences; return what each layer received."""
        tracker, n_seq = cache.tracker, cache.tracker.n_seq
        done = self._done if len(self._done) == n_seq else np.zeros(n_seq, dtype=np.int64)
        columns, seen = tracker.columns, tracker.seen.copy()
        done = np.maximum(done, self._n_begin_marks(tracker))
        probes, n_queries = [], self.settings.queries
        every = max(1, -(-int((seen - done).max()) // n_queries)) if n_queries else 0
        for layer_cache in cache.layer_caches:
            probe = ReconstructionProbe(n_seq, layer_cache.stored.shape[1], int(seen.max()), self._device, every)
            layer_cache.probe = probe
            probes.append(probe)
        self.running = True
        try:
            for begin in range(0, int((seen - done).max()), self.settings.chunk):
                first = np.minimum(done + begin, seen)
                self._repeat(cache, first, np.minimum(first + self.settings.chunk, seen))
                tracker.rewind(columns, seen)
                for layer_cache in cache.layer_caches:
                    layer_cache.columns = columns
        finally:
            self.running = False
            for layer_cache in cache.layer_caches:
                layer_cache.probe = None
        return probes

    def select(self, sequences: list[int]) -> None:
        """Follow a selection of sequences."""
        self._done = self._done[sequences]

    @property
    def done(self) -> np.ndarray:
        """Tokens that were repeated, (S,)."""
        return self._done

    def adopt(self, seen: np.ndarray) -> None:
        """Count the first `seen` (S,) tokens as repeated, which another cache did."""
        self._done = seen.copy()

    def reset(self) -> None:
        """Forget everything."""
        self._done = self._done[:0]

    def _n_begin_marks(self, tracker: PositionTracker) -> np.ndarray:
        """Return 1 for texts that begin with a beginning-of-text token, else 0, (S,).

        The token is not repeated in the middle.
        """
        assert tracker.tokens is not None, "token ids are kept for a policy that looks at them"
        rows = torch.arange(tracker.n_seq, device=self._device)
        opens = tracker.tokens.at(rows, torch.zeros_like(rows)[:, None])[:, 0]
        return torch.isin(opens.cpu(), self._begins).long().numpy()

    @torch.no_grad()
    def _repeat(self, cache: LayerCaches, first: np.ndarray, last: np.ndarray) -> None:
        """Run one pass over the tokens first..last-1 of each sequence, after the question."""
        tracker, question = cache.tracker, self.settings.ids
        assert tracker.tokens is not None, "token ids are kept for a policy that looks at them"
        assert question is not None, "the question is known before a cache uses it"
        lengths = np.where(last > first, last - first + len(question), 0)
        width = int(lengths.max())
        ids = torch.zeros(len(first), width, dtype=torch.long, device=self._device)
        mask = torch.zeros_like(ids)
        for row in np.flatnonzero(lengths).tolist():
            positions = torch.arange(int(first[row]), int(last[row]), device=self._device)[None]
            token_ids = tracker.tokens.at(torch.tensor([row], device=self._device), positions)[0]
            ids[row, width - int(lengths[row]) :] = torch.cat(
                [torch.tensor(question, device=self._device).long(), token_ids]
            )
            mask[row, width - int(lengths[row]) :] = 1
        start = torch.from_numpy(tracker.seen).to(self._device)[:, None]
        self._decoder(
            input_ids=ids,
            **cache_argument(cache),
            attention_mask=torch.cat([tracker.mask().to(mask), mask], 1),
            position_ids=(start + mask.cumsum(1) - 1).clamp(min=0),
        )

    @no_autograd
    def _run_plans(self, cache: LayerCaches, probes: list[ReconstructionProbe]) -> None:
        """Plan every layer; the plan of one may depend on the probes of all."""
        for layer_cache, probe in zip(cache.layer_caches, probes, strict=True):
            layer_cache.reconstruction = probe
        try:
            for layer_cache in cache.layer_caches:
                layer_cache.run_plans()
        finally:
            for layer_cache in cache.layer_caches:
                layer_cache.reconstruction = None
