"""An installed millpond in use without any extra: a script for the environment that a wheel was installed into."""

from __future__ import annotations

from pathlib import Path

import millpond as mp
from millpond.kernels import native

CHECKOUT = Path(__file__).parents[2]


def main() -> None:
    """
    Raises:
        AssertionError: the package is that of the checkout, its kernels do not run, or a compressed cache forgets.
    """
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
    print(f"millpond {mp.__version__} runs with the kernels for {native.isa()}")


if __name__ == "__main__":
    main()
