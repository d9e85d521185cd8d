"""Tiny GGUF files with random weights, of several architectures and number types."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize

WIDTH, HEADS, KV_HEADS, INNER, LAYERS, VOCAB = 256, 2, 1, 512, 2, 300
HEAD = WIDTH // HEADS
#: One message after the other.
TEMPLATE = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}<assistant>"
#: Types of which the package gguf makes no blocks: their bytes are drawn instead.
DRAWN = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", *DRAWN)
ARCHITECTURES = ("llama", "qwen2", "qwen3", "phi3")


def matrix(shape: tuple[int, int], kind: str, rng: np.random.Generator) -> tuple[Any, np.ndarray]:
    """Rows as they lie in the file, and the numbers that they stand for (float32)."""
    named = GGMLQuantizationType[kind]
    if kind in DRAWN:
        block, n_bytes = GGML_QUANT_SIZES[named]
        # without these bits no scale, a float16 among the bytes, is larger than 1
        raw = rng.integers(0, 256, (shape[0], shape[1] // block * n_bytes), dtype=np.uint8) & 0x2B
        return raw, dequantize(raw, named)
    raw = quantize((0.05 * rng.standard_normal(shape)).astype(np.float32), named)
    return raw, dequantize(raw, named)


def write_gguf(
    path: Path,
    architecture: str = "llama",
    kind: str = "F32",
    *,
    tokenizer: bool = True,
    seed: int = 0,
    leave_out: str = "",
    kinds: Mapping[str, str] | None = None,
    **metadata: int,
) -> dict[str, np.ndarray]:
    """Write a model of two layers; returns its matrices, by their names in the file.

    Args:
        kind: of the matrices; norms are in float32. kinds: of others, by how a name, or its end behind a
            dot, begins.
        leave_out: name of a tensor that is not written. metadata: numbers that replace those of the architecture.
    """
    rng = np.random.default_rng(seed)
    writer = GGUFWriter(str(path), architecture)
    writer.add_name("tiny")
    numbers = {
        "context_length": 512,
        "embedding_length": WIDTH,
        "block_count": LAYERS,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD,
        "attention.value_length": HEAD,
        "rope.dimension_count": HEAD,
        "vocab_size": VOCAB,
    } | metadata
    for key, value in numbers.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32(f"{architecture}.rope.freq_base", 10_000.0)
    if tokenizer:
        add_tokenizer(writer)
    outer = (VOCAB, WIDTH)
    shapes: dict[str, tuple[int, ...]] = {"token_embd": outer, "output": outer, "output_norm": (WIDTH,)}
    for layer in range(LAYERS):
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in _layer(architecture).items()}
    matrices = {}
    for name, shape in shapes.items():
        full = name if name.endswith(".bias") else f"{name}.weight"
        if full == leave_out:
            continue
        if len(shape) == 1:
            writer.add_tensor(full, (1 + 0.1 * rng.standard_normal(shape)).astype(np.float32))
        else:
            own = next((other for part, other in (kinds or {}).items() if f".{part}" in f".{full}"), kind)
            raw, matrices[full] = matrix((shape[0], shape[1]), own, rng)
            writer.add_tensor(full, raw, raw_dtype=GGMLQuantizationType[own])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return matrices


def _layer(architecture: str) -> dict[str, tuple[int, ...]]:
    kv = KV_HEADS * HEAD
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm": (WIDTH,),
        "ffn_norm": (WIDTH,),
        "attn_output": (WIDTH, WIDTH),
        "ffn_down": (WIDTH, INNER),
    }
    if architecture == "phi3":
        return shapes | {"attn_qkv": (WIDTH + 2 * kv, WIDTH), "ffn_up": (2 * INNER, WIDTH)}
    shapes |= {
        "attn_q": (WIDTH, WIDTH),
        "attn_k": (kv, WIDTH),
        "attn_v": (kv, WIDTH),
        "ffn_gate": (INNER, WIDTH),
        "ffn_up": (INNER, WIDTH),
    }
    if architecture == "qwen2":
        shapes |= {"attn_q.bias": (WIDTH,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
    if architecture == "qwen3":
        shapes |= {"attn_q_norm": (HEAD,), "attn_k_norm": (HEAD,)}
    return shapes


def add_tokenizer(writer: GGUFWriter, kind: str = "gpt2") -> None:
    """A vocabulary of bytes and a few pieces.

    Args:
        kind: "gpt2" (byte pairs), or one of those of SentencePiece: "llama" and "gemma4" (pairs by score), "t5"
            (unigram).
    """
    if kind == "gpt2":
        _byte_pairs(writer)
    else:
        _sentencepiece(writer, kind)


def _sentencepiece(writer: GGUFWriter, kind: str) -> None:
    words = ["\u2581t", "he", "\u2581the", "in", "er", "an", "ai", "\u2581r", "\u2581rain", "ain"]
    letters = ["\u2581", *"abcdefghimnorstuwy,.", "\u00fc"]
    pieces = [*words, *letters]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *pieces]
    left = VOCAB - len(tokens)
    writer.add_tokenizer_model(kind)
    writer.add_token_list([*tokens, *(f"<extra_{i}>" for i in range(left))])
    writer.add_token_scores([0.0] * 259 + [-1.0 - i for i in range(len(pieces))] + [-1000.0] * left)
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * len(pieces) + [3] * left)
    if kind == "gemma4":
        writer.add_token_merges(["\u2581 t", "h e", "\u2581t he", "i n", "e r", "a n", "a i", "\u2581 r", "a in"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)


def _byte_pairs(writer: GGUFWriter) -> None:
    """As GPT-2 spells them."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    spelled = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
    pairs = ["t h", "th e", "\u0120 the", "i n", "e r", "a n"]
    tokens = [spelled[b] for b in range(256)] + [pair.replace(" ", "") for pair in pairs]
    tokens += [f"<|extra_{i}|>" for i in range(VOCAB - len(tokens) - 1)] + ["<|end|>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (256 + len(pairs)) + [3] * (VOCAB - 256 - len(pairs)))
    writer.add_token_merges(pairs)
    writer.add_bos_token_id(VOCAB - 1)
    writer.add_eos_token_id(VOCAB - 1)
    writer.add_pad_token_id(VOCAB - 1)
    writer.add_chat_template(TEMPLATE)
