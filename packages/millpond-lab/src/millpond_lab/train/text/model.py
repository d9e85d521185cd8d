"""Shapes of `pond-text`, initial weights, and how the model is saved."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from millpond_lab.train.common.generation import greedy
from millpond_lab.train.common.progress_bars import no_bars
from millpond_lab.train.text.recipe import TextRecipe
from millpond_lab.train.text.tokenizer import BOS_ID, EOS_ID, PAD_ID, save_tokenizer

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
