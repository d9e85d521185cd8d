"""The KL of evicting settings a second time: by masks over the attention of plain transformers, without a cache.

    masked_kl.py smollm2-135m h2o@512 SETTING ... --rows setting-texts.json --text wiki=FILE --out RESULTS.json

Windows and settings are those of `setting_texts.py`, whose rows say how many entries a budget `=SETTING` is. What a
setting keeps is chosen here again, from the prompt's attention weights: for `h2o` by its definition, for `fastgen` by
its plan over these weights, of all queries. In one pass over the window the scored tokens then see, in each KV head,
what is kept and each other. Rows are added window by window. `streaming` keeps the first four entries and the newest.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import torch
from attention_mass import by_layer
from codec_texts import divergence, tokens, windows
from fastgen_persistence import plan
from setting_texts import lacking, parse, write
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from millpond.hf.tokenizer_source import TokenizerSource
from millpond.methods import METHODS
from millpond.models.load import load_tokenizer, resolve
from millpond.policy.head_rules import HeadRulesPolicy

SINKS, RECENT = 4, 0.5


def heavy(weights: Tensor, group: int, entries: int) -> Tensor:
    """(Hkv, P) bool: what H2O keeps of a prompt with weights (H, P, P): sinks, the newest half, and the heaviest."""
    sums = weights.sum(1).unflatten(0, (-1, group)).mean(1)
    place = torch.arange(sums.shape[-1])
    always = (place < SINKS) | (place >= len(place) - int(RECENT * entries))
    best = sums.masked_fill(always, float("inf")).topk(entries).indices
    return torch.zeros_like(sums, dtype=torch.bool).scatter_(1, best, value=True)


def newest(weights: Tensor, group: int, entries: int) -> Tensor:
    """(Hkv, P) bool: what StreamingLLM keeps of a prompt with weights (H, P, P): sinks, and the newest."""
    heads, _, length = weights.shape
    place = torch.arange(length)
    return ((place < SINKS) | (place >= length - (entries - SINKS))).repeat(heads // group, 1)


#: By method: what it keeps with so many entries.
BY_ENTRIES = {"h2o": heavy, "streaming": newest}


def seen(kept: Tensor, group: int, length: int) -> Tensor:
    """(1, H, L, L) float, to be added to logits: causal, and behind the prompt only what is `kept` (Hkv, P) of it."""
    prompt = kept.shape[-1]
    allowed = torch.ones(length, length, dtype=torch.bool).tril().repeat(len(kept), 1, 1)
    allowed[:, prompt:, :prompt] &= kept[:, None]
    zeros = torch.zeros(allowed.shape).masked_fill(~allowed, float("-inf"))
    return zeros.repeat_interleave(group, 0)[None]


def predictions(model: Any, ids: Tensor, prompt: int, kept: list[Tensor] | None = None) -> Tensor:
    """Log probabilities (scored, V) behind a prompt of which each layer sees what is `kept`; None: all of it."""
    group = model.config.num_attention_heads // model.config.num_key_value_heads

    def masked(layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        assert kept is not None
        return args, kwargs | {"attention_mask": seen(kept[layer.layer_idx], group, ids.shape[1])}

    attentions = [layer.self_attn for layer in model.model.layers] if kept is not None else []
    hooks = [each.register_forward_pre_hook(masked, with_kwargs=True) for each in attentions]
    try:
        logits = model(ids, use_cache=False, logits_to_keep=ids.shape[1] - prompt).logits
    finally:
        for hook in hooks:
            hook.remove()
    found: Tensor = logits[0].float().log_softmax(-1)
    return found


def chosen(weights: Tensor, ids: Tensor, group: int, settings: list[dict[str, Any]], source: Any) -> list[Tensor]:
    """(Hkv, P) bool for each setting: what it keeps of a layer's prompt with weights (H, P, P)."""
    kept = []
    for setting in settings:
        if setting["method"] in BY_ENTRIES:
            kept.append(BY_ENTRIES[setting["method"]](weights, group, int(setting["budget"])))
            continue
        policy = METHODS.get("fastgen")(threshold=float(setting["threshold"]))
        assert isinstance(policy, HeadRulesPolicy)
        kept.append(plan(weights, ids, group, policy.with_tokens(source)).keep)
    return kept


@torch.inference_mode()
def judge(
    model: Any, ids: Tensor, prompt: int, settings: list[dict[str, Any]], source: Any
) -> list[tuple[float, float]]:
    """KL, and the share of the entries that is kept, of each setting on a window (1, L)."""
    group = model.config.num_attention_heads // model.config.num_key_value_heads
    opening = ids[:, :prompt]
    layers = by_layer(model, opening, lambda weights: chosen(weights, opening[0], group, settings, source))
    full = predictions(model, ids, prompt)
    found = []
    for kept in zip(*layers, strict=True):
        share = float(torch.stack(kept).float().mean())
        found.append((divergence(full, predictions(model, ids, prompt, [*kept])), share))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument(
        "settings", nargs="+", metavar="SETTING", help="h2o or streaming@ENTRIES or @=SETTING, or fastgen:threshold=T"
    )
    parser.add_argument("--name", help="of the model in the results; its own by default")
    parser.add_argument("--rows", type=Path, required=True, help="of setting_texts.py")
    parser.add_argument("--text", action="append", required=True, metavar="NAME=FILE")
    parser.add_argument("--windows", type=int, default=2, help="of each text, the first of those with rows")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True, help="JSON file that rows are added to")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    name = args.name or args.model
    rows = json.loads(args.rows.read_text(encoding="utf-8"))["models"][name]
    prompt = rows["prompt"]
    folder, tokenizer = resolve(args.model, "f32"), load_tokenizer(args.model)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    report = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {"models": {}}
    own = report["models"].setdefault(name, {"settings": {}})
    source = TokenizerSource(tokenizer)
    cut = {
        text: windows(tokens(tokenizer, Path(path)), rows["windows"], prompt + rows["scored"])
        for text, _, path in (given.partition("=") for given in args.text)
    }
    for place, text in itertools.product(range(args.windows), cut):
        wanted = lacking(own["settings"], args.settings, text, place)
        if not wanted:
            continue
        held = {one: row[text]["bytes"][place] for one, row in rows["settings"].items() if text in row}
        found = judge(model, cut[text][place], prompt, [parse(one, held, prompt) for one in wanted], source)
        for setting, (kl, share) in zip(wanted, found, strict=True):
            row = own["settings"].setdefault(setting, {}).setdefault(text, {"kl": [], "kept": []})
            row["kl"].append(float(f"{kl:.4g}"))
            row["kept"].append(round(share, 4))
        write(args.out, report)
        print(f"{text} {place + 1} of {args.windows}", flush=True)


if __name__ == "__main__":
    main()
