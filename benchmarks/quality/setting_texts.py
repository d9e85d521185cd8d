"""KL divergence of settings from the full cache on the same windows of several texts, and the bytes that they hold.

    setting_texts.py smollm2-135m h2o@50% snapkv@384/think --text wiki=wikitext2_test.txt --out RESULTS.json

A setting is METHOD, or METHOD:OPTION=VALUE@BUDGET/FORMAT with what it has of these. The budget `=SETTING` is as many
entries of a head as that setting has bytes, in whole pages. A model reads `--prompt` tokens of a window, once for all
settings, evicts, and then predicts the next `--scored` tokens of the text in one pass. The number is
KL(full || setting) in nats a token; bytes are of the full cache's in 16 bits. Rows are added window by window, and what
the file has is not measured again. Formats of KVQuant have the calibration of `--calibrate`, which is not judged.
"""

from __future__ import annotations

import argparse
import itertools
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
from millpond.codec.presets import PRESETS
from millpond.hf.calibration.measure import calibrate
from millpond.models.cache_argument import cache_argument
from millpond_lab.bench.common.machine import describe_machine
from millpond_lab.evals.decoding.batch import BatchReader
from millpond_lab.evals.decoding.prompt_recording import PromptRecording

PAGE = 32
CALIBRATION_WINDOWS, CALIBRATION_LENGTH = 4, 512


def parse(setting: str, held: Mapping[str, float], prompt: int) -> dict[str, Any]:
    """Arguments of `compress`; `held` is the share of the bytes that other settings hold of this window.

    Example:
        >>> parse("ada:score=h2o@50%/int8", {}, 512)
        {'method': 'ada', 'budget': '50%', 'codec': 'int8', 'score': 'h2o'}
        >>> parse("h2o@=fastgen", {"fastgen": 0.7}, 512)["budget"]
        352
        >>> parse("ada:score=snapkv/pool=avg@50%", {}, 512)["score"]
        'snapkv/pool=avg'
    """
    named, at, rest = setting.partition("@")
    if at:
        rest, _, codec = rest.partition("/")
    else:
        named, _, codec = named.partition("/")
    budget: str | int | None = None
    if rest.startswith("="):
        budget = int(held[rest[1:]] * prompt) // PAGE * PAGE
    elif rest:
        budget = rest
    method, *options = named.split(":")
    return {"method": method, "budget": budget, "codec": codec or "auto", **dict(one.split("=", 1) for one in options)}


def is_calibrated(setting: str) -> bool:
    """Whether its format takes a calibration."""
    codec = PRESETS.get(setting.rpartition("/")[2])
    return codec is not None and codec.calibrated


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
    model: Any,
    ids: Tensor,
    prompt: int,
    settings: list[str],
    before: Mapping[str, float],
    tokenizer: Any = None,
    known: Mapping[str, Any] | None = None,
) -> dict[str, tuple[float, float]]:
    """KL and share of the bytes of each setting on a window (1, L).

    Args:
        before: shares that are known already. known: of settings whose format takes a calibration, theirs.
    """
    recording = recorded(model, tuple(ids[0, :prompt].tolist()))
    full, _ = predictions(model, recording, ids[:, prompt:], method="full")
    held, found = dict(before), {}
    for setting in settings:
        given = parse(setting, held, prompt) | {"tokenizer": tokenizer}
        given["calibration"] = (known or {}).get(setting)
        other, held[setting] = predictions(model, recording, ids[:, prompt:], **given)
        found[setting] = divergence(full, other), held[setting]
    return found


def parser(about: str | None) -> argparse.ArgumentParser:
    """Arguments of programs that judge settings on windows."""
    given = parser_of_texts(about)
    given.add_argument("--calibrate", type=Path, help="a text that is not judged")
    given.add_argument("--name", help="of the model in the results; its own by default")
    given.add_argument("--out", type=Path, required=True, help="JSON file that rows are added to")
    return given


def calibrations(model: Any, ids: Tensor, wanted: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The calibration of each setting whose format takes one, from what `calibrate` is to be given for it."""
    made: dict[str, Any] = {}
    for given in wanted.values():
        if str(given) not in made:
            size = {"windows": CALIBRATION_WINDOWS, "length": CALIBRATION_LENGTH}
            made[str(given)] = calibrate(model, ids, **size, **given)
    return {setting: made[str(given)] for setting, given in wanted.items()}


def add_rows(
    args: argparse.Namespace, settings: list[str], calibrated: Mapping[str, Mapping[str, Any]] | None = None
) -> None:
    """Judge settings on the windows that `parser`'s arguments name, and add what the file lacks.

    Args:
        calibrated: what `calibrate` is given for a setting whose format takes a calibration; nothing where it is None.
    """
    torch.set_num_threads(args.threads)
    warnings.simplefilter("ignore", category=UserWarning)
    texts = {name: Path(path) for name, _, path in (given.partition("=") for given in args.text)}
    model, tokenizer = mp.load_model(args.model, "f32"), mp.load_tokenizer(args.model)
    wanted = calibrated or {setting: {} for setting in settings if is_calibrated(setting)}
    known: dict[str, Any] = {}
    if wanted:
        if args.calibrate is None:
            raise SystemExit("formats of KVQuant need a text that is not judged: --calibrate FILE")
        refuse_judged(args.calibrate, [*texts.values()])
        known = calibrations(model, tokens(tokenizer, args.calibrate), wanted)
    report = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {"models": {}}
    shape = {"prompt": args.prompt, "scored": args.scored, "windows": args.windows}
    own = report["models"].setdefault(args.name or args.model, shape | {"settings": {}})
    if {name: own[name] for name in shape} != shape:
        raise SystemExit(f"{args.out} has windows of another kind of this model: name another file")
    own["hardware"] = describe_machine().hardware
    cut = {
        name: windows(tokens(tokenizer, path), args.windows, args.prompt + args.scored) for name, path in texts.items()
    }
    for place, text in itertools.product(range(args.windows), cut):
        missing = lacking(own["settings"], settings, text, place)
        if not missing:
            continue
        before = {
            one: row[text]["bytes"][place]
            for one, row in own["settings"].items()
            if not lacking(own["settings"], [one], text, place)
        }
        found = judge(model, cut[text][place], args.prompt, missing, before, tokenizer, known)
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


def main() -> None:
    given = parser(__doc__)
    given.add_argument("settings", nargs="+", metavar="SETTING")
    args = given.parse_args()
    add_rows(args, args.settings)


if __name__ == "__main__":
    main()
