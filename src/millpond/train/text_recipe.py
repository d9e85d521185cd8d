"""The numbers of `pond-text`: its shapes, its schedule, and the two sizes that are meant to be trained."""

from __future__ import annotations

from dataclasses import dataclass

from millpond.errors import unknown


@dataclass(frozen=True)
class TextRecipe:
    """Everything that decides a run besides its data, its seed and how many tokens it reads."""

    name: str
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    tokens: int  # read in the whole run, unless the run is told otherwise
    tokens_per_step: int
    context: int = 4096
    rope_theta: float = 1e5
    vocab_size: int = 4096
    #: (share of the tokens from which on, window length)
    lengths: tuple[tuple[float, int], ...] = ((0.0, 512), (0.72, 2048), (0.95, 4096))
    muon_lr: float = 4e-3
    adamw_lr: float = 3e-3
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.05
    clip: float = 1.0
    warmup_steps: int = 40
    decay_from: float = 0.4  # share of the tokens at which the learning rate begins to fall, to zero at the end
    facts: float = 0.15  # share of windows with facts to remember
    copies: float = 0.08  # share of windows with passages told again
    #: (share of the tokens from which on, share of windows that are copying drills)
    drills: tuple[tuple[float, float], ...] = ((0.0, 0.3), (0.3, 0.1))

    def length_at(self, share: float) -> int:
        """Tokens of a window after `share` of the run."""
        return [length for begin, length in self.lengths if share >= begin][-1]

    def drills_at(self, share: float) -> float:
        """Share of the windows that are copying drills after `share` of the run."""
        return [part for begin, part in self.drills if share >= begin][-1]

    def rate_at(self, step: int, share: float) -> float:
        """The learning rate as a share of its base: up, level, and down to zero in a straight line."""
        rise = min(1.0, (step + 1) / self.warmup_steps)
        fall = min(1.0, (1.0 - share) / (1.0 - self.decay_from))
        return rise * max(0.0, fall)

    @property
    def first_mark(self) -> float:
        """The share of the run at which its plan first makes a difference."""
        marks = (self.decay_from, *(begin for begin, _ in (*self.lengths, *self.drills)))
        return min(mark for mark in marks if mark > 0)

    @property
    def longest(self) -> int:
        """Tokens of the longest window."""
        return max(length for _, length in self.lengths)


PRESETS = {
    recipe.name: recipe
    for recipe in (
        TextRecipe(
            "cpu",
            256,
            704,
            6,
            8,
            4,
            32,
            tokens=5_600_000,
            tokens_per_step=4096,
            decay_from=0.7,
            drills=((0.0, 0.0), (0.375, 0.5), (0.7, 0.15)),
        ),
        TextRecipe("gpu", 512, 1408, 8, 8, 4, 64, tokens=150_000_000, tokens_per_step=65_536, warmup_steps=100),
    )
}


def preset(name: str) -> TextRecipe:
    """The recipe called `name`.

    Raises:
        OptionError: there is none.
    """
    if name not in PRESETS:
        raise unknown("preset", name, PRESETS)
    return PRESETS[name]
