"""Optimizers of the recipes: Muon for the matrices between the embeddings, AdamW for everything else."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Optimizers:
    """Several optimisers as one, with learning rates relative to their own base."""

    def __init__(self, parts: list[torch.optim.Optimizer]) -> None:
        self.parts = parts
        self._base = [[group["lr"] for group in part.param_groups] for part in parts]

    def set_rate(self, share: float) -> None:
        """Every learning rate as a share of its base, 0 to 1."""
        for part, bases in zip(self.parts, self._base, strict=True):
            for group, base in zip(part.param_groups, bases, strict=True):
                group["lr"] = share * base

    def step(self) -> None:
        """One update, and no gradients afterwards."""
        for part in self.parts:
            part.step()
            part.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict[str, Any]]:
        """For a checkpoint."""
        return [part.state_dict() for part in self.parts]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """From a checkpoint."""
        for part, state in zip(self.parts, states, strict=True):
            part.load_state_dict(state)


def muon_and_adamw(
    model: nn.Module, *, muon_lr: float, adamw_lr: float, betas: tuple[float, float], weight_decay: float
) -> Optimizers:
    """Muon (Jordan et al., 2024) on hidden matrices, scaled to AdamW's update size; AdamW on embeddings and norms."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    hidden = [p for name, p in named if p.ndim == 2 and "embed" not in name and "lm_head" not in name]
    chosen = {id(p) for p in hidden}
    rest = [p for _, p in named if id(p) not in chosen]
    return Optimizers(
        [
            torch.optim.Muon(hidden, lr=muon_lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(rest, lr=adamw_lr, betas=betas, weight_decay=0.0),
        ]
    )
