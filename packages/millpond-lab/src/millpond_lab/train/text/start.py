"""Initialization of a `pond-text` run from the model of an earlier one."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

from millpond.errors import DataError
from millpond.hf.document import fingerprint
from millpond_lab.train.common.progress_bars import no_bars
from millpond_lab.train.text.tokenizer import TOKENIZER_FILE

_SHAPE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rope_parameters",
)
CARD_FILE, TRAINING = "MODEL_CARD.md", "## Training\n"


def begin_with(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> tuple[str, str]:
    """Give `model` the weights of the one saved in `folder`.

    Returns:
        What its card says of its training, and the fingerprint of the weights.

    Raises:
        DataError: `folder` holds no such model, or one of another shape or vocabulary.
    """
    try:
        with no_bars():
            earlier = AutoModelForCausalLM.from_pretrained(folder, dtype=model.dtype, trust_remote_code=False)
        vocabulary = Tokenizer.from_file(str(folder / TOKENIZER_FILE)).get_vocab()
        if _shape(earlier) != _shape(model):
            raise ValueError(f"its shape is {_shape(earlier)}, that of the recipe {_shape(model)}")
        model.load_state_dict(earlier.state_dict())
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise DataError(f"{folder} holds no pond-text to start from: {error}") from error
    if vocabulary != tokenizer.get_vocab():
        raise DataError(
            f"{folder} has another vocabulary than these documents give; start from a model that was grown on them"
        )
    card = folder / CARD_FILE
    if not card.is_file():
        return "", fingerprint(model)
    return card.read_text(encoding="utf-8").partition(TRAINING)[2], fingerprint(model)


def _shape(model: PreTrainedModel) -> dict[str, object]:
    """The numbers of the config that a recipe decides."""
    return {name: getattr(model.config, name) for name in _SHAPE}
