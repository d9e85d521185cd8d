"""kvpress answers: one JSON request per line in, one JSON reply per line out. The other side of `millpond eval-peer`.

Runs in an environment of its own (benchmarks/peers/kvpress_env.sh) and therefore imports nothing of Millpond. A request
holds tokens: what is read and compressed (`opening`), and questions, each answered from a copy of the compressed cache.
By itself it is a filter: kvpress_eval.py --model FOLDER < requests.jsonl > replies.jsonl
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import logging
import re
import sys
import zlib
from contextlib import nullcontext
from functools import lru_cache
from importlib.metadata import version
from typing import Any

import kvpress
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

PEER = f"kvpress {version('kvpress')}"
PRESSES = (
    "SnapKVPress",
    "ObservedAttentionPress",
    "StreamingLLMPress",
    "TOVAPress",
    "RandomPress",
    "KnormPress",
    "ExpectedAttentionPress",
    "PyramidKVPress",
    "KeyDiffPress",
    "LagKVPress",
    "CompactorPress",
    "KVzipPress",
    "KVzapPress",
)
WRAPPERS = ("AdaKVPress", "CriticalKVPress", "ChunkKVPress", "MergingPress")  # of another: AdaKVPress(SnapKVPress)
MASKS = {"AdaKVPress", "KVzipPress"}  # hide entries from attention, and go on holding them
NEEDS_EAGER = {"ObservedAttentionPress"}
DTYPES = {"auto": "auto", "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


@dataclasses.dataclass(frozen=True)
class Press:
    """A press by its name: `Name`, `Wrapper(Name)`, with `:option=value` behind it; `full` is none."""

    name: str
    inner: str
    options: dict[str, str]

    @classmethod
    def parse(cls, text: str) -> Press:
        names, *pairs = text.split(":")
        found = re.fullmatch(r"(\w+)(?:\((\w+)\))?", names)
        if found is None:
            raise ValueError(f"{names!r} is not the name of a press")
        name, inner = found[1], found[2] or ""
        known = inner in PRESSES if name in WRAPPERS else name in ("full", *PRESSES) and not inner
        if not known or inner in NEEDS_EAGER:
            wrapped = f"{', '.join(WRAPPERS)} (one of them but {', '.join(NEEDS_EAGER)}, in brackets)"
            raise ValueError(f"unknown press {names!r}; known: full, {', '.join(PRESSES)}, {wrapped}")
        press = cls(name, inner, dict(pair.split("=", 1) for pair in pairs))
        press.build(0.5)
        return press

    def build(self, ratio: float) -> Any:
        """The press, or None for `full`; the outer one takes the options that it knows."""
        left = dict(self.options)
        if self.name == "full":
            made = None
        elif self.inner:
            inner = getattr(kvpress, self.inner)
            outer = getattr(kvpress, self.name)
            own = take(outer, left)
            made = outer(inner(compression_ratio=ratio, **take(inner, left)), **own)
        else:
            kind = getattr(kvpress, self.name)
            made = kind(compression_ratio=ratio, **take(kind, left))
        if left:
            raise ValueError(f"{self.name} knows no option {', '.join(left)}")
        return made


def take(kind: Any, left: dict[str, str]) -> dict[str, Any]:
    """The options that `kind` knows, out of `left`, as the types of their defaults."""
    taken = {}
    for field in dataclasses.fields(kind):
        if field.name in left and field.name not in ("compression_ratio", "press"):
            text = left.pop(field.name)
            if isinstance(field.default, bool):
                taken[field.name] = {"true": True, "1": True, "false": False, "0": False}[text.lower()]
            else:
                taken[field.name] = float(text) if isinstance(field.default, float) else int(text)
    return taken


class Peer:
    """The model, loaded once for each way to attend."""

    def __init__(self, folder: str, dtype: str, device: str) -> None:
        self.device = device
        self._folder, self._dtype = folder, DTYPES[dtype]
        self._models: dict[str, Any] = {}

    def model(self, attention: str) -> Any:
        if attention not in self._models:
            model = AutoModelForCausalLM.from_pretrained(
                self._folder, dtype=self._dtype, attn_implementation=attention
            ).to(self.device)
            model.train(False)
            self._models[attention] = model
        return self._models[attention]

    @lru_cache  # noqa: B019  # one object for the whole run
    def tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(self._folder)

    @torch.inference_mode()
    def reply(self, request: dict[str, Any]) -> dict[str, Any]:
        """Read, compress, and answer each question from a copy."""
        press = Press.parse(request["press"])
        model = self.model("eager" if press.name in NEEDS_EAGER else "sdpa")
        opening = request["opening"]
        keep = entries(model, request, len(opening))
        made = press.build(1 - (keep + 0.5) / len(opening)) if keep is not None and keep < len(opening) else None
        torch.manual_seed(zlib.crc32(request["id"].encode()))
        kv = DynamicCache(config=model.config)
        layers = [layer.self_attn for layer in model.model.layers]
        try:
            with nullcontext() if made is None else made(model):
                logits = self._read(model, kv, opening, 0)
            held = measure(model, kv, len(opening))
            if made is not None and press.name in MASKS:
                held["pretended_share"] = seen_share(layers, kv)
            last = len(request["questions"]) - 1
            answers = []
            for place, question in enumerate(request["questions"]):
                own = kv if place == last else copy.deepcopy(kv)
                try:
                    tokens = self._decode(model, own, logits, len(opening), question, set(request["eos"]))
                    answers.append({"tokens": tokens})
                except Exception as error:  # one question of several
                    answers.append({"error": reason(error)})
        finally:
            for layer in layers:
                layer.masked_key_indices = None  # a masking press leaves its indices behind
        return {"id": request["id"], "peer": PEER, "answers": answers, **held}

    def _read(self, model: Any, kv: DynamicCache, tokens: list[int], seen: int) -> Any:
        """Logits after `tokens`, which stand at the positions from `seen` on, whatever the cache still holds."""
        positions = torch.arange(seen, seen + len(tokens), device=self.device)[None]
        ids = torch.tensor([tokens], device=self.device)
        return model(input_ids=ids, past_key_values=kv, position_ids=positions, logits_to_keep=1).logits[0, -1]

    def _decode(
        self, model: Any, kv: DynamicCache, logits: Any, seen: int, question: dict[str, Any], eos: set[int]
    ) -> list[int]:
        """Greedy tokens up to the end of the text, a stop text, or `most`."""
        said: list[int] = []
        following = list(question["tokens"])
        # transformers makes one mask for all layers, which cannot be right where layers differ in length
        uneven = len({layer.keys.shape[2] for layer in kv.layers}) > 1
        while len(said) < question["most"]:
            step = 1 if uneven else max(len(following), 1)
            for begin in range(0, len(following), step):
                logits = self._read(model, kv, following[begin : begin + step], seen + begin)
            seen += len(following)
            said.append(int(logits.float().argmax()))
            following = said[-1:]
            if said[-1] in eos or (question["stop"] and self._stopped(said, question["stop"])):
                break
        return said

    def _stopped(self, said: list[int], stops: list[str]) -> bool:
        text = self.tokenizer().decode(said, skip_special_tokens=True)
        return any(stop in text for stop in stops if stop)


def entries(model: Any, request: dict[str, Any], length: int) -> int | None:
    """How many entries each head keeps; None for all. A budget in bytes is of the whole sequence."""
    if request.get("bytes") is not None:
        return max(1, min(length, request["bytes"] // token_bytes(model)))
    return request.get("keep")


def token_bytes(model: Any) -> int:
    """Bytes of keys and values of one token."""
    config = model.config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * config.num_key_value_heads * width * model.dtype.itemsize


def measure(model: Any, kv: DynamicCache, length: int) -> dict[str, Any]:
    """What the buffers of the cache hold."""
    tensors = [tensor for layer in kv.layers for tensor in (layer.keys, layer.values)]
    buffers = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    stored = sum(layer.keys.shape[2] for layer in kv.layers)
    return {
        "kept_share": stored / (len(kv.layers) * length),
        "kv_bytes": sum(buffers.values()),
        "full_kv_bytes": length * token_bytes(model),
    }


def seen_share(layers: list[Any], kv: DynamicCache) -> float:
    """The share of entries that a masking press lets attention see."""
    shares = []
    for layer, own in zip(layers, kv.layers, strict=True):
        hidden = layer.masked_key_indices
        shares.append(1 - (0 if hidden is None else len(hidden[0])) / (own.keys.shape[1] * own.keys.shape[2]))
    return sum(shares) / len(shares)


def reason(error: Exception) -> str:
    """One line."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def hello(presses: list[str]) -> dict[str, Any]:
    """The versions of this side, and errors in the requested presses."""
    errors = {}
    for text in presses:
        try:
            Press.parse(text)
        except Exception as error:
            errors[text] = str(error).splitlines()[0]
    software = f"torch {torch.__version__}, transformers {transformers.__version__}, {PEER}"
    return {"peer": PEER, "software": software, "errors": errors}


def main() -> None:
    """Serve until standard input ends; only replies go to standard output."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="a folder, or a hub id")
    parser.add_argument("--dtype", choices=DTYPES, default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int)
    chosen = parser.parse_args()
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("kvpress").setLevel(logging.ERROR)
    out, sys.stdout = sys.stdout, sys.stderr
    peer = Peer(chosen.model, chosen.dtype, chosen.device)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = hello(request["hello"]) if "hello" in request else peer.reply(request)
        except Exception as error:  # a counted failure on the other side
            reply = {"id": request["id"], "peer": PEER, "error": reason(error)}
        out.write(json.dumps(reply) + "\n")
        out.flush()


if __name__ == "__main__":
    main()
