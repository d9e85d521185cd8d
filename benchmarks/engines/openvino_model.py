"""A folder with a Llama's config.json and model.safetensors in OpenVINO's format, 16 bits: openvino_model.py FROM TO.

There is no tokenizer: the prompts of `millpond bench engines` are ids.
"""

from __future__ import annotations

import sys

from optimum.intel import OVModelForCausalLM

if __name__ == "__main__":
    source, out = sys.argv[1:]
    OVModelForCausalLM.from_pretrained(source, export=True, load_in_8bit=False, compile=False).save_pretrained(out)
