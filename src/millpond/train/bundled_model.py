"""The bundled model itself: its shape, its folder, and how it is built and saved."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from millpond.train.recall_tokenizer import build_tokenizer
from millpond.train.words import BOS_ID, EOS_ID, PAD_ID, VOCABULARY

MAX_POSITIONS = 4096
BUNDLED_DIR = Path(__file__).resolve().parents[1] / "models" / "bundled" / "pond-recall"


def bundled_config() -> LlamaConfig:
    """The shape of the model: 1.67 million parameters, four layers, grouped queries, tied embeddings."""
    return LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
        tie_word_embeddings=True,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )


def build_model(seed: int) -> LlamaForCausalLM:
    """A fresh float32 model on the CPU; equal seeds give equal weights. The caller's random state is kept."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(bundled_config())


def save_bundle(model: LlamaForCausalLM, folder: Path) -> None:
    """Write weights (safetensors), configs and tokenizer, so that the Auto classes load the folder.

    An answer is one word, so `generate()` writes one token unless it is told otherwise.
    """
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=1, do_sample=False, bos_token_id=BOS_ID, eos_token_id=EOS_ID, pad_token_id=PAD_ID
    )
    with _no_bars():
        model.save_pretrained(folder)
    build_tokenizer(MAX_POSITIONS).save_pretrained(folder)


@contextmanager
def _no_bars() -> Iterator[None]:
    """Hold back the progress bars of transformers, which would tear the one of the training."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
