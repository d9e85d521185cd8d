"""Settings of `pond-text`: its shapes, its schedules, and the two sizes that are meant to be trained."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from millpond.errors import unknown
from millpond_lab.train.common.network_run import greedy
from millpond_lab.train.common.progress import no_bars
from millpond_lab.train.text.tokenizer import BOS_ID, EOS_ID, PAD_ID, save_tokenizer


class Tasks(NamedTuple):
    """Shares of the windows: with facts to remember, with repeated passages, and copying drills."""

    facts: float
    copies: float
    drills: float


@dataclass(frozen=True)
class TextRecipe:
    """Everything that decides a run besides its data, its seed and how many tokens it reads."""

    name: str
    model: str  # what a finished run of it is called
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    tokens: int  # read in the whole run, unless the run sets another number
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
    #: (share of the tokens from which on, what the windows get)
    tasks: tuple[tuple[float, Tasks], ...] = ((0.0, Tasks(0.15, 0.08, 0.0)),)

    def length_at(self, share: float) -> int:
        """Tokens of a window after `share` of the run."""
        return [length for begin, length in self.lengths if share >= begin][-1]

    def tasks_at(self, share: float) -> Tasks:
        """What the windows get after `share` of the run."""
        return [tasks for begin, tasks in self.tasks if share >= begin][-1]

    def rate_at(self, step: int, share: float) -> float:
        """The learning rate as a share of its base: up, level, and down to zero in a straight line."""
        rise = min(1.0, (step + 1) / self.warmup_steps)
        fall = min(1.0, (1.0 - share) / (1.0 - self.decay_from))
        return rise * max(0.0, fall)

    @property
    def first_mark(self) -> float:
        """The share of the run at which its plan first makes a difference."""
        marks = (self.decay_from, *(begin for begin, _ in (*self.lengths, *self.tasks)))
        return min(mark for mark in marks if mark > 0)

    @property
    def longest(self) -> int:
        """Tokens of the longest window."""
        return max(length for _, length in self.lengths)


_CPU = TextRecipe(
    "cpu",
    "pond-text",
    hidden=256,
    ffn=704,
    layers=6,
    heads=8,
    kv_heads=4,
    head_dim=32,
    tokens=10_500_000,
    tokens_per_step=4096,
    decay_from=0.5,
    lengths=((0.0, 128), (0.14, 256), (0.55, 512), (0.8, 1024), (0.9, 2048), (0.98, 4096)),
    tasks=((0.0, Tasks(0.0, 0.0, 0.5)), (0.14, Tasks(0.15, 0.08, 0.1))),
)
_GPU = TextRecipe(
    "gpu",
    "pond-text",
    hidden=512,
    ffn=1408,
    layers=8,
    heads=8,
    kv_heads=4,
    head_dim=64,
    tokens=150_000_000,
    tokens_per_step=65_536,
    warmup_steps=100,
    decay_from=0.4,
    lengths=((0.0, 128), (0.1, 512), (0.7, 2048), (0.95, 4096)),
    tasks=((0.0, Tasks(0.0, 0.0, 0.5)), (0.1, Tasks(0.15, 0.08, 0.05))),
)
#: A second term for a model that the preset `cpu` has grown: as many tokens again, all of them in long windows.
_CPU_LONG = replace(
    _CPU,
    name="cpu-long",
    model="pond-text-long",
    tokens=11_000_000,
    tokens_per_step=8192,
    muon_lr=2.4e-3,
    adamw_lr=1.8e-3,
    decay_from=0.2,
    lengths=((0.0, 1024), (0.4, 2048), (0.75, 4096)),
    tasks=((0.0, Tasks(0.15, 0.08, 0.03)),),
)
PRESETS = {recipe.name: recipe for recipe in (_CPU, _CPU_LONG, _GPU)}


def recipe_named(name: str) -> TextRecipe:
    """The recipe called `name`.

    Raises:
        OptionError: there is none.
    """
    if name not in PRESETS:
        raise unknown("preset", name, PRESETS)
    return PRESETS[name]


ANSWER_TOKENS = 64


def build_text_model(recipe: TextRecipe, vocab_size: int, seed: int) -> LlamaForCausalLM:
    """A fresh float32 model on the CPU; equal seeds give equal weights. The caller's random state is kept.

    A Llama with grouped queries, RoPE and tied embeddings.
    """
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=recipe.hidden,
        intermediate_size=recipe.ffn,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.head_dim,
        max_position_embeddings=recipe.context,
        rope_parameters={"rope_type": "default", "rope_theta": recipe.rope_theta},
        tie_word_embeddings=True,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def save_text_model(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write bfloat16 weights (safetensors), configs and tokenizer, so that the Auto classes load the folder."""
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy.to(torch.bfloat16)  # type: ignore[arg-type]
    copy.generation_config = greedy(ANSWER_TOKENS, BOS_ID, EOS_ID, PAD_ID)
    with no_bars():
        copy.save_pretrained(folder)
    save_tokenizer(tokenizer, folder, model.config.max_position_embeddings)
