"""A folder with a Llama's config.json and safetensors files, as one GGUF file in bfloat16: gguf_model.py FROM TO.

There is no tokenizer: the prompts of `millpond bench engines` are ids.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy
from gguf import GGMLQuantizationType, GGUFWriter
from numpy.typing import NDArray

PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTER = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}


def read(path: Path) -> dict[str, NDArray[numpy.uint16]]:
    """The tensors of a safetensors file in bfloat16, as their bits."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        entries = json.loads(file.read(size))
    entries.pop("__metadata__", None)
    assert all(entry["dtype"] == "BF16" for entry in entries.values()), "bfloat16 only"
    bits = numpy.memmap(path, numpy.uint8, "r", 8 + size)
    return {
        name: bits[slice(*entry["data_offsets"])].view(numpy.uint16).reshape(entry["shape"])
        for name, entry in entries.items()
    }


def renamed(name: str) -> str:
    """A tensor's name in GGUF."""
    if name in OUTER:
        return OUTER[name]
    _, _, layer, part = name.removesuffix(".weight").split(".", 3)
    return f"blk.{layer}.{PARTS[part]}.weight"


def interleaved(bits: NDArray[numpy.uint16], heads: int) -> NDArray[numpy.uint16]:
    """Rows of a projection of queries or keys with the two halves of a head's pairs next to each other."""
    rows, columns = bits.shape
    return bits.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_settings(writer: Any, config: dict[str, Any]) -> None:
    """The model's shape, and the sign that there is no tokenizer."""
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")


def main(source: Path, out: Path) -> None:
    """Write the file."""
    config = json.loads((source / "config.json").read_text())
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    writer = GGUFWriter(out, "llama")
    write_settings(writer, config)
    tensors = {name: bits for file in sorted(source.glob("*.safetensors")) for name, bits in read(file).items()}
    for name, bits in tensors.items():
        part = name.split(".")[-2]
        if part in heads:
            bits = interleaved(bits, heads[part])
        if bits.ndim == 1:  # norms are in float32 there
            writer.add_tensor(renamed(name), (bits.astype(numpy.uint32) << 16).view(numpy.float32))
        else:
            raw = numpy.ascontiguousarray(bits).view(numpy.uint8)
            writer.add_tensor(renamed(name), raw, raw_dtype=GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
