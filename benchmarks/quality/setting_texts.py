"""KL divergence of settings from the full cache on the same windows of several texts, and the bytes that they hold.

    setting_texts.py smollm2-135m h2o@50% snapkv@384/think --text wiki=wikitext2_test.txt --out RESULTS.json

A setting is METHOD, or METHOD:OPTION=VALUE@BUDGET/FORMAT with what it has of these. The budget `=SETTING` is as many
entries of a head as that setting has bytes, in whole pages. A model reads `--prompt` tokens of a window, once for all
settings, evicts, and then predicts the next `--scored` tokens of the text in one pass. The number is
KL(full || setting) in nats a token; bytes are of the full cache's in 16 bits. Rows are added window by window, and what
the file has is not measured again. Formats of KVQuant have the calibration of `--calibrate`, which is not judged.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from codec_texts import divergence, parser_of_texts, refuse_judged, tokens, windows
from torch import Tensor

import millpond as mp
from millpond.hf.calibration.measure import calibrate
from millpond.models.cache_argument import cache_argument
from millpond_lab.bench.common.machine import describe_machine
from millpond_lab.evals.decoding.batch import BatchReader
from millpond_lab.evals.decoding.prompt_recording import PromptRecording

PAGE = 32
CALIBRATION_WINDOWS, CALIBRATION_LENGTH = 8, 512


def parse(setting: str, held: Mapping[str, float], prompt: int) -> dict[str, Any]:
    """Arguments of `compress`; `held` is the share of the bytes that other settings hold of this window.

    Example:
        >>> parse("ada:score=h2o@50%/int8", {}, 512)
        {'method': 'ada', 'budget': '50%', 'codec': 'int8', 'score': 'h2o'}
        >>> parse("h2o@=fastgen", {"fastgen": 0.7}, 512)["budget"]
        352
    """
    named, _, rest = setting.partition("@")
    budget: str | int | None = None
    codec = "auto"
    if "/" in setting:
        setting, _, codec = setting.rpartition("/")
        named, _, rest = setting.partition("@")
    if rest.startswith("="):
        budget = int(held[rest[1:]] * prompt) // PAGE * PAGE
    elif rest:
        budget = rest
    method, *options = named.split(":")
    return {"method": method, "budget": budget, "codec": codec, **dict(one.split("=", 1) for one in options)}


def recorded(model: Any, opening: tuple[int, ...]) -> PromptRecording:
    """The first pass of a prompt."""
    recording = PromptRecording((opening,))
    with mp.compress(model, "full") as cache, recording.of(model, cache, False):
        recording.take(BatchReader(model, cache, [opening]))
    return recording


def predictions(model: Any, recording: PromptRecording, rest: Tensor, **setting: Any) -> tuple[Tensor, float]:
    """Log probabilities (scored, V) of the tokens (1, scored) behind a prompt, and the share of the bytes held."""
    with mp.compress(model, page_slots=PAGE, **setting) as cache:
        reader = BatchReader(model, cache, recording.openings, recording)
        for layer_cache in cache.layer_caches:
            layer_cache.run_plans()
        held = reader.held()[0]
        share = held.bf16_kv_bytes / (held.full_kv_bytes / cache.dtype.itemsize * 2)
        logits = model(rest, **cache_argument(cache)).logits
    return logits[0].float().log_softmax(-1), share


def lacking(found: Mapping[str, Any], settings: list[str], text: str, place: int) -> list[str]:
    """The settings that have no row of a text's window at this place."""
    return [one for one in settings if len(found.get(one, {}).get(text, {}).get("kl", ())) <= place]


@torch.inference_mode()
def judge(
    model: Any, ids: Tensor, prompt: int, settings: list[str], before: Mapping[str, float], **options: Any
) -> dict[str, tuple[float, float]]:
    """KL and share of the bytes of each setting on a window (1, L); `before` has shares that are known already."""
    recording = recorded(model, tuple(ids[0, :prompt].tolist()))
    full, _ = predictions(model, recording, ids[:, prompt:], method="full")
    held, found = dict(before), {}
    for setting in settings:
        given = parse(setting, held, prompt)
        other, held[setting] = predictions(model, recording, ids[:, prompt:], **given, **options)
        found[setting] = divergence(full, other), held[setting]
    return found


def main() -> None:
    parser = parser_of_texts(__doc__)
    parser.add_argument("settings", nargs="+", metavar="SETTING")
    parser.add_argument("--calibrate", type=Path, help="a text that is not judged")
    parser.add_argument("--name", help="of the model in the results; its own by default")
    parser.add_argument("--out", type=Path, required=True, help="JSON file that rows are added to")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    warnings.simplefilter("ignore", category=UserWarning)
    texts = {name: Path(path) for name, _, path in (given.partition("=") for given in args.text)}
    model, tokenizer = mp.load_model(args.model, "f32"), mp.load_tokenizer(args.model)
    known = None
    if any("kvquant" in setting for setting in args.settings):
        if args.calibrate is None:
            raise SystemExit("formats of KVQuant need a text that is not judged: --calibrate FILE")
        refuse_judged(args.calibrate, [*texts.values()])
        ids = tokens(tokenizer, args.calibrate)
        known = calibrate(model, ids, windows=CALIBRATION_WINDOWS, length=CALIBRATION_LENGTH)
    report = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {"models": {}}
    shape = {"prompt": args.prompt, "scored": args.scored, "windows": args.windows}
    own = report["models"].setdefault(args.name or args.model, shape | {"settings": {}})
    if {name: own[name] for name in shape} != shape:
        raise SystemExit(f"{args.out} has windows of another kind of this model: name another file")
    own["hardware"] = describe_machine().hardware
    cut = {
        name: windows(tokens(tokenizer, path), args.windows, args.prompt + args.scored) for name, path in texts.items()
    }
    for place in range(args.windows):
        for text, each in cut.items():
            wanted = lacking(own["settings"], args.settings, text, place)
            if not wanted:
                continue
            before = {
                one: row[text]["bytes"][place]
                for one, row in own["settings"].items()
                if not lacking(own["settings"], [one], text, place)
            }
            found = judge(model, each[place], args.prompt, wanted, before, calibration=known, tokenizer=tokenizer)
            for setting, (kl, share) in found.items():
                row = own["settings"].setdefault(setting, {}).setdefault(text, {"kl": [], "bytes": []})
                row["kl"].append(float(f"{kl:.4g}"))
                row["bytes"].append(round(share, 4))
            write(args.out, report)
            print(f"{text} {place + 1} of {args.windows}", flush=True)


def write(path: Path, report: dict[str, Any]) -> None:
    """Lists of numbers on one line each, and never a half-written file."""
    text = re.sub(r"\[[^][{}\"]*\]", lambda found: " ".join(found[0].split()), json.dumps(report, indent=1))
    part = path.with_suffix(".part")
    part.write_text(text.replace("[ ", "[").replace(" ]", "]") + "\n", encoding="utf-8")
    os.replace(part, path)


if __name__ == "__main__":
    main()
