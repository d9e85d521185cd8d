"""An installed millpond in use without any extra: a script for the environment that a wheel was installed into."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import millpond as mp
from millpond.kernels import native

CHECKOUT = Path(__file__).parents[2]
#: Most that logits of up to 23 may be apart from the reference's, by number format of the entries.
APART = {"bf16": 0.05, "int4": 0.2}


def logits(model: Any, inputs: Any, codec: str, kernels: str) -> Tensor:
    """Of the tokens behind an answer's first, from a compressed cache with these kernels, in float32 (T, words)."""
    os.environ["MILLPOND_KERNELS"] = kernels
    with mp.compress(model, method="h2o", budget="50%", codec=codec) as cache:
        more = {"max_new_tokens": 4, "output_logits": True, "return_dict_in_generate": True}
        found = torch.cat(model.generate(**inputs, cache=cache, do_sample=False, **more).logits)[1:]
    os.environ["MILLPOND_KERNELS"] = "native"
    return found.float()


def main() -> None:
    """
    Raises:
        AssertionError: the package is that of the checkout, its kernels do not run or compute something else than the
            reference, or a compressed cache forgets.
    """
    os.environ["MILLPOND_KERNELS"] = "native"
    assert not Path(mp.__file__).is_relative_to(CHECKOUT / "src"), f"{mp.__file__} is not an installed package"
    assert native.isa() != "none", "the wheel has no kernels that run here"
    model, tokenizer = mp.load_model("pond-recall"), mp.load_tokenizer("pond-recall")
    text = "anna kettle " + "quiet rain " * 40 + "<ask> anna <is>"
    with mp.compress(model, method="h2o", budget="50%") as cache:
        out = model.generate(**tokenizer(text, return_tensors="pt"), cache=cache, max_new_tokens=2)
        assert tokenizer.decode(out[0, -1]) == "kettle"
        assert cache.stats().kv_bytes < cache.stats().full_kv_bytes
    with mp.LLM("pond-recall", method="snapkv", budget=64) as llm:
        answer = llm.generate(text, mp.SamplingParams(max_tokens=2, temperature=0))[0].completions[0].text
        assert answer.split()[-1] == "kettle", answer
    inputs = tokenizer("anna kettle " + "quiet rain " * 300 + "<ask> anna <is>", return_tensors="pt")
    for codec, most in APART.items():
        apart = (logits(model, inputs, codec, "native") - logits(model, inputs, codec, "reference")).abs().max().item()
        assert apart <= most, f"the kernels for {native.isa()} are {apart:g} apart from the reference in {codec}"
    print(f"millpond {mp.__version__} runs with the kernels for {native.isa()}")


if __name__ == "__main__":
    main()
