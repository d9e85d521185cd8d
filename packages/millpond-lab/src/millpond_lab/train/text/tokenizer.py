"""Tokenizer of `pond-text`: byte-level BPE trained on the training documents; `<bos>` opens every text.

Digits stand alone, so that a number is read and written figure by figure.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

BOS, EOS, PAD = "<bos>", "<eos>", "<pad>"
BOS_ID, EOS_ID, PAD_ID = 0, 1, 2
TOKENIZER_FILE = "tokenizer.json"


def grow_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A tokenizer of at most `vocab_size` tokens for `texts`; equal texts give equal tokenizers."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, BOS_ID)]
    )
    return tokenizer


def plain_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of a piece of running text, without `<bos>`."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def save_tokenizer(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    """Write the files that `AutoTokenizer` reads."""
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
    )
    fast.save_pretrained(folder)
