"""How often the text over a codec changes by chance: what `gpu_tokens.py` compares, on a CPU with disturbed weights.

    PYTHONPATH=src python benchmarks/gpu/disturbed_codecs.py fp8 int8 rotated2_paper

Each weight is multiplied by 1 + 2e-7 z, z normal, about what another order of sums does. For each codec and method it
prints the share of equal tokens of some such models: of free texts, and of predictions behind the text of the first.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
from gpu_tokens import CODEC_METHODS, CPU, Generated, codec_inputs, generated, small_llama

from millpond.codec import codec_named

#: Relative change of a weight, and the models that are made.
CHANGE, MODELS = 2e-7, 4


def disturbed(model: Any, seed: int) -> Any:
    other, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(1 + CHANGE * torch.randn(weight.shape, generator=generator))
    return other


def main() -> None:
    model, calibration = small_llama()
    inputs, new = codec_inputs(tiny=False)
    for codec in sys.argv[1:]:
        for method, options in CODEC_METHODS.items():
            given: dict[str, Any] = {**options, "codec": codec}
            if codec_named(codec).calibrated:
                given["calibration"] = calibration

            def run(one: Any, follow: torch.Tensor | None, method: str = method, given: Any = given) -> Generated:
                return generated(one, CPU, "native", inputs, new, method, given, follow=follow)

            first = run(model, None)[0]
            for name, follow in (("free", None), ("followed", first)):
                runs = [run(disturbed(model, seed), follow)[0] for seed in range(MODELS)]
                print(codec, method, name, [round(float((one == first).float().mean()), 3) for one in runs], flush=True)


if __name__ == "__main__":
    main()
