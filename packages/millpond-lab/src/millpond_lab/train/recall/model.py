"""Shape of `pond-recall`, its initial weights, and how it is saved."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from millpond.models.installed import BUNDLED
from millpond_lab.pond.words import BOS_ID, EOS_ID, PAD_ID, VOCABULARY, build_tokenizer
from millpond_lab.train.common.network_run import greedy
from millpond_lab.train.common.progress import no_bars

MAX_POSITIONS = 8192
ANSWER_TOKENS = 16
BUNDLED_DIR = BUNDLED / "pond-recall"


def recall_config() -> LlamaConfig:
    """The shape of the model: 2.1 million parameters, five layers, grouped queries, tied embeddings."""
    return LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=5,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 2e5},
        tie_word_embeddings=True,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )


def build_model(seed: int) -> LlamaForCausalLM:
    """A fresh float32 model on the CPU; equal seeds give equal weights. The caller's random state is kept."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(recall_config())


def save_bundle(model: LlamaForCausalLM, folder: Path) -> None:
    """Write weights (safetensors), configs and tokenizer, so that the Auto classes load the folder.

    The file holds the weights rounded to bfloat16, half the bytes; the config says float32, as which they are loaded.
    """
    model.generation_config = greedy(ANSWER_TOKENS, BOS_ID, EOS_ID, PAD_ID)
    with no_bars():
        model.save_pretrained(folder)
    weights = folder / "model.safetensors"
    save_file({name: w.to(torch.bfloat16) for name, w in load_file(weights).items()}, weights, {"format": "pt"})
    build_tokenizer(MAX_POSITIONS).save_pretrained(folder)
