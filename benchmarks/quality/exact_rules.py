"""KL of a text stored in the codec `transform`, by the rule that says which of its tokens are exact.

Windows and KL are those of `storage_codec.py`; codes have no header of the text, so that rules differ in nothing else.
All rules of a window read the 64 tokens behind it as one batch of transformers' own cache. Rules:

* `all`: the 1 % that all queries of the text attend to most.
* `unit`: three of each 256 tokens, by every 16th query of these from 32 tokens on.
* `some`: the 1 % that every 16th query attends to most, 256 at most (documents); `few`: every 64th, 64 at most.
* `half`: the same, but for the second half of the text, where none is exact: as if it were an answer.
* `threshold`: above the file's threshold, by every 16th query of the 256 tokens.
* `block`: above the threshold, by the queries of blocks of 32 tokens.

    python benchmarks/quality/exact_rules.py smollm2-135m --text wiki=wikitext2_test.txt --text novel=emma.txt \\
        --windows 3 --rows benchmarks/results/exact-rules.jsonl
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from codec_texts import divergence, parser_of_texts
from storage_codec import MOST_CHARACTERS, begin_of
from torch import Tensor
from transformers import DynamicCache

import millpond as mp
from millpond.cache.coded.entries import decoded, projected
from millpond.codec.transform.coding import encode
from millpond.codec.transform.exact_tokens import (
    FAR,
    NEWEST,
    QUERY_STEP,
    SINKS,
    attention_per_query,
    most_attended,
    most_attended_of_units,
)
from millpond.codec.transform.page import PageAddress
from millpond.codec.transform.prompt_header import plain_headers
from millpond.hf.calibration.load import rotations_before_rope
from millpond.hf.calibration.texts import tokens_of
from millpond.hf.model_support import supported, unwrapped
from millpond.hf.text_storage import transform_of
from millpond.kernels.args import AttentionShape

BITS = 1.5


def rules(q: Tensor, k: Tensor, shape: AttentionShape, threshold: float) -> dict[str, Tensor]:
    """Which of the tokens are exact, (n,) bool, in a layer with queries (Hq, n, D) and keys (Hkv, n, D)."""
    n, every = k.shape[1], torch.arange(k.shape[1])
    some = torch.arange(QUERY_STEP - 1, n, QUERY_STEP)
    few = some[3::4][:64]
    coded = (every >= SINKS) & (every < n - NEWEST)
    of_unit = attention_per_query(q[:, some], some, k, shape, least=FAR) * coded
    found = {
        "all": most_attended(attention_per_query(q, every, k, shape, n) * coded),
        "unit": most_attended_of_units(of_unit),
        "some": most_attended(attention_per_query(q[:, some], some, k, shape, n) * coded),
        "few": most_attended(attention_per_query(q[:, few], few, k, shape, n) * coded),
        "half": most_attended_of_units(of_unit) & (every < n // 2),
        "threshold": attention_per_query(q[:, some], some, k, shape) > threshold,
        "block": attention_per_query(q[:, some], some, k, shape, 32) > threshold,
    }
    return {name: mask | ~coded for name, mask in found.items()}


@torch.no_grad()
def measured(model: Any, transform: Any, prompt: Tensor, rest: Tensor) -> dict[str, dict[str, float]]:
    """KL of each rule on a window, and the share of its coded tokens that are exact."""
    rotations, headers = rotations_before_rope(supported(unwrapped(model))), plain_headers(transform.layers, BITS)
    cache, shares = DynamicCache(), dict[str, float]()

    def add(number: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, shape: AttentionShape) -> None:
        keys, values, layer, address = k[0].float(), v[0].float(), transform.layers[number], PageAddress(0, number)
        z = projected(layer, keys, values, 0, rotations[number])
        pages, shapes = encode(layer, headers[number], z, address), transform.model.shapes[number]
        back = decoded(layer, headers[number], pages, address, shapes, 0, rotations[number])
        sides = [[keys], [values]]
        for name, exact in rules(q[0], keys, shape, float(transform.thresholds[number])).items():
            for side, own, other in zip(sides, (keys, values), back, strict=True):
                side.append(torch.where(exact[:, None], own, other))
            share = float(exact[SINKS:-NEWEST].float().mean()) / len(transform.layers)
            shares[name] = shares.get(name, 0) + share
        cache.update(*(torch.stack(side).to(k.dtype) for side in sides), number)

    with mp.compress(model, "full") as read:
        read.watch(add)
        model(prompt, cache=read, logits_to_keep=1)
    logits = model(rest.expand(1 + len(shares), -1), past_key_values=cache).logits
    full, *others = logits.float().log_softmax(-1)
    return {
        name: {"kl": divergence(full, other), "exact": share}
        for (name, share), other in zip(shares.items(), others, strict=True)
    }


def main() -> None:
    parser = parser_of_texts(__doc__, windows=2)
    parser.add_argument("--calibration", help="transform file; the one of millpond-models by default")
    parser.add_argument("--rows", type=Path, required=True, help="file of rows, which new ones are added to")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, tokenizer = mp.load_model(args.model, "f32"), mp.load_tokenizer(args.model)
    transform = transform_of(model, args.calibration)
    length = args.prompt + args.scored
    texts = {}
    for name, _, path in (given.partition("=") for given in args.text):
        texts[name] = tokens_of(tokenizer, Path(path).read_text(encoding="utf-8", errors="replace")[:MOST_CHARACTERS])
    for number in range(args.windows):
        for name, tokens in texts.items():
            begin = begin_of(number, len(tokens), length)
            prompt, rest = tokens[begin : begin + length][None].split([args.prompt, args.scored], 1)
            for rule, numbers in measured(model, transform, prompt, rest).items():
                row = {
                    "model": args.model,
                    "text": name,
                    "begin": begin,
                    "prompt": args.prompt,
                    "rule": rule,
                    **numbers,
                }
                with args.rows.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
                print(name, number, rule, f"KL {row['kl']:.4f}, {row['exact']:.2%} exact", flush=True)


if __name__ == "__main__":
    main()
