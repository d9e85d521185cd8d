"""Weights for kvpress's KVzapPress, made of the retaining heads of pond-recall.

    kvzap_weights.py --out FOLDER      then, in FOLDER: millpond eval-peer --method KVzapPress ...

KVzapPress loads a network by the name of the model, `nvidia/KVzap-mlp-NAME`, and a folder of this name under the
working directory will do. Its networks score the normed input h of each layer: W2 GELU(W1 h + b1) + b2. Those of
retaining heads score [q; k; v] before RoPE, linear maps of h where projections have no biases, by SiLU; so W1 is
multiplied with the projections. SiLU(z) is 1.702 GELU(z / 1.702), with the sigmoid that approximates GELU, and GELU
proper is near it: the scores of both are compared on a text, and how many of the best tenth are the same is printed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from millpond.hf.retaining_heads import heads_of_package
from millpond.models.load import load_model
from millpond.policy.trained.networks import LayerHeads
from millpond_lab.train.retain.features import TextReader
from millpond_lab.train.retain.texts import RecallTexts
from millpond_lab.train.retain.train import overlap

MODEL = "pond-recall"
#: GELU(x) is about x sigmoid(1.702 x).
SHARPER = 1.702


def folded(heads: LayerHeads, attention: Any) -> dict[str, Tensor]:
    """The network of one layer in KVzap's form, by the names of its parts."""
    heads = heads.to(torch.device("cpu"))
    projections = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]).float()
    return {
        "0.weight": heads.w1 @ projections / SHARPER,
        "0.bias": heads.b1 / SHARPER,
        "2.weight": heads.w2 * SHARPER,
        "2.bias": heads.b2,
    }


def agreement(model: Any, layers: list[dict[str, Tensor]], heads: list[LayerHeads]) -> float:
    """Of the best tenth of a text by the heads, how many are it by the networks in KVzap's form: a mean over heads."""
    row = RecallTexts().draw("retain-check", 0, 0)
    inputs: list[Tensor] = []
    hooks = [
        layer.self_attn.register_forward_pre_hook(
            lambda _, args, given: inputs.append(given["hidden_states"][0].float()), with_kwargs=True
        )
        for layer in model.model.layers
    ]
    model(row.ids[None, : row.begin])
    for hook in hooks:
        hook.remove()
    found = []
    texts = TextReader(model).read(row.ids, row.begin)
    for h, layer, own, text in zip(inputs, layers, heads, texts, strict=True):
        hidden = F.gelu(F.linear(h, layer["0.weight"], layer["0.bias"]))
        scores = F.linear(hidden, layer["2.weight"], layer["2.bias"]).T
        found.append(overlap(scores, own.to(torch.device("cpu")).raw(text.features.float()).T))
    return float(torch.stack(found).mean())


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    model: Any = load_model(MODEL)
    heads = list(heads_of_package(model).layers)
    pairs = zip(heads, model.model.layers, strict=True)
    layers = [folded(own, layer.self_attn) for own, layer in pairs]
    folder = args.out / "nvidia" / f"KVzap-mlp-{MODEL}"
    folder.mkdir(parents=True, exist_ok=True)
    hidden, inputs = layers[0]["0.weight"].shape
    config = {
        "model_type": "kvzap",
        "architectures": ["KVzapModel"],
        "dtype": "float32",
        "input_dim": inputs,
        "hidden_dim": hidden,
        "output_dim": len(layers[0]["2.bias"]),
        "n_modules": len(layers),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    named = {f"layers.{i}.{name}": part.contiguous() for i, layer in enumerate(layers) for name, part in layer.items()}
    save_file(named, folder / "model.safetensors", {"format": "pt"})
    print(f"{folder}: {agreement(model, layers, heads):.3f} of the best tenth of a text are those of the heads")


if __name__ == "__main__":
    main()
