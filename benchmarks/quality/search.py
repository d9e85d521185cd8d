"""Search over eviction and number format at equal bytes: DATA=FOLDER search.py STAGE ... --out FOLDER, and it resumes.

Each window is read once with the full cache; settings are then judged on what was recorded, by the divergence of their
predictions from the full cache's (much less noisy than perplexity). Nothing is evicted during the predicted tokens:
what wins is judged again by real decoding (`budget_bytes.sh`), on other texts.
DATA holds wikitext2_valid.txt and bleak_house.txt. A text and length: `--text wikitext2_valid.txt --context 1024`.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import torch
from search_settings import Setting, judged
from search_windows import Window, windows_of

from millpond.models.load import load_model, load_tokenizer

MODEL, SEED = "smollm2-135m", 11
#: Tokens of context, tokens predicted, and windows of each text.
LENGTHS = {
    1024: (64, {"wikitext2_valid.txt": 5, "bleak_house.txt": 3}),
    4096: (256, {"wikitext2_valid.txt": 3, "bleak_house.txt": 2}),
}

_R4 = Setting(key="4", value="4", rotated=True)
_FORMATS = {
    "formats": [
        _R4,
        replace(_R4, key="t4", value="t4"),
        replace(_R4, key="s4", value="s4"),
        *(
            replace(_R4, key=k, value=v)
            for k, v in [
                ("3", "3"),
                ("t3", "t3"),
                ("t4", "t3"),
                ("t3", "t4"),
                ("4", "2"),
                ("t4", "t2"),
                ("t3", "t2"),
                ("t2", "t2"),
                ("t4", "16"),
                ("16", "t4"),
                ("t3", "16"),
                ("16", "t3"),
                ("16", "t2"),
            ]
        ),
        *(
            Setting(key=k, value=v)
            for k, v in [
                ("c4/64", "4"),
                ("c4/128", "4"),
                ("c3/64", "3"),
                ("c3/64", "t3"),
                ("c4/64", "t3"),
                ("c3/64", "4"),
                ("c3/64", "16"),
                ("c4/64", "t2"),
                ("c3/64", "t2"),
                ("t4", "t4"),
                ("t4", "t3"),
                ("16", "4"),
                ("16", "t3"),
            ]
        ),
    ]
}
_SCORES = [
    "oracle",
    "all",
    "all^max",
    "all*values",
    "squares",
    "change",
    "change^max",
    "decay",
    "newest32",
    "newest128",
    "all&newest128",
    "all&newest32",
    "all&change",
    "squares&newest128",
]
_EVICTION = {
    "eviction": [
        *(Setting(keep=keep, score=score) for keep in (0.7, 0.33) for score in _SCORES),
        *(Setting(keep=keep, recent=recent) for keep in (0.7, 0.33) for recent in (0.1, 0.25, 0.75)),
    ]
}
_T43, _T4, _T3 = (replace(_R4, key=k, value=v) for k, v in [("t4", "t3"), ("t4", "t4"), ("t3", "t3")])
_T32 = replace(_R4, key="t3", value="t2")
#: Entries of 1,024 that fill whole pages of 32, at a fifth, a tenth and a twentieth of the full cache's bytes.
_TOGETHER = {
    "fifth": [
        replace(_R4, keep=704 / 1024),
        replace(_T43, keep=800 / 1024),
        replace(_T3, keep=928 / 1024),
        replace(_T4, keep=704 / 1024),
        replace(_T43, keep=800 / 1024, score="all&newest32"),
        replace(_T43, keep=800 / 1024, score="decay"),
        Setting(key="c4/64", value="4", keep=704 / 1024),
        replace(_R4, keep=0.5, low="2"),
    ],
    "tenth": [
        replace(_R4, keep=352 / 1024),
        replace(_T43, keep=416 / 1024),
        replace(_T3, keep=480 / 1024),
        replace(_T32, keep=544 / 1024),
        replace(_T43, keep=416 / 1024, score="decay"),
    ],
    "twentieth": [
        replace(_R4, keep=160 / 1024),
        replace(_T43, keep=192 / 1024),
        replace(_T3, keep=224 / 1024),
        replace(_T32, keep=256 / 1024),
        replace(_T43, keep=192 / 1024, score="decay"),
    ],
}
STAGES = {**_FORMATS, **_EVICTION, **_TOGETHER}


def windows(args: argparse.Namespace, context: int) -> tuple[torch.nn.Module, list[Window]]:
    """The model, and the windows of one length; read once, then from the folder."""
    model = load_model(MODEL, dtype="f32")
    following, texts = LENGTHS[context]
    found: list[Window] = []
    for name, count in texts.items():
        path = args.out / f"{name}.{context}.pt"
        if not path.exists():
            own = windows_of(model, load_tokenizer(MODEL), str(args.data / name), context, following, count, SEED)
            torch.save(own, path)
        found += torch.load(path, weights_only=False)[:count]
    return model, found


def projections_of(model: torch.nn.Module) -> list[torch.Tensor]:
    """Per layer (Hq, D, hidden): what a head's output is multiplied with."""
    heads = model.config.num_attention_heads
    return [
        layer.self_attn.o_proj.weight.detach().T.reshape(heads, -1, layer.self_attn.o_proj.weight.shape[0])
        for layer in model.model.layers
    ]


def main() -> None:
    """Judge the settings of some stages that have not been judged before."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stages", nargs="+", choices=list(STAGES))
    parser.add_argument("--context", type=int, default=1024, choices=list(LENGTHS))
    parser.add_argument("--out", type=Path, required=True, help="folder of windows and rows; large")
    args = parser.parse_args()
    args.data = Path(os.environ.get("DATA", "."))
    torch.set_num_threads(1)
    rows_at = args.out / f"rows-{args.context}.jsonl"
    done = {json.loads(line)["name"] for line in rows_at.read_text().splitlines()} if rows_at.exists() else set()
    model, found = windows(args, args.context)
    projections, layers = projections_of(model), len(found[0].layers)
    dim = found[0].layers[0].keys.shape[2]
    for stage in args.stages:
        for setting in STAGES[stage]:
            if str(setting) in done:
                continue
            each = [judged(model, setting, window, projections) for window in found]
            tokens = sum(count for *_, count in each)
            kl, more = (sum(one[i] for one in each) / tokens for i in (0, 1))
            row = {
                "stage": stage,
                "name": str(setting),
                "bytes": setting.bytes(args.context, layers, dim),
                "kl": kl,
                "more": more,
                "windows": len(each),
                "setting": asdict(setting),
            }
            with rows_at.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{stage:9} {row['bytes']:6.1%} KL {kl:.4f} nats {more:+.4f} {setting}", flush=True)


if __name__ == "__main__":
    main()
