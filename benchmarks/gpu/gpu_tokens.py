"""Tokens and kept entries on the device against the CPU's: every method and codec, in generate() and in the engine."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from gpu_machine import Machine
from gpu_rows import Cell, Row
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessor, LogitsProcessorList

import millpond as mp
from millpond.codec import codec_named
from millpond.codec.presets import PRESETS
from millpond.hf.calibration.measure import calibrate
from millpond.methods import METHODS, list_methods
from millpond.models.cache_argument import cache_argument

CPU = torch.device("cpu")
#: Options of some methods here; the others run as they are with a fifth of the entries.
GIVEN: dict[str, dict[str, Any]] = {
    "full": {},
    "attention_gate": {},
    "fastgen": {},
    "minference": {},
    "dms": {"budget": "20%", "window": 32},
    "duo_attention": {"budget": "50%", "recent": 32},
    "infllm": {"budget": "20%", "sinks": 4, "block": 8},
    "simlayerkv": {"budget": "20%", "recent": 32},
    "layer_table": {"budget": "20%", "table": "3;1"},
}
TEXT = "anna kettle " + "quiet rain past meadow and old stone on river " * 30 + "boris lantern "
QUESTIONS = ("<ask> anna <is>", "<ask> boris <is>")
#: Engines with more than a method or a codec: shared prefixes, preemption, prompts that are evicted from while read.
FEATURES: dict[str, dict[str, Any]] = {
    "prefix cache": {"method": "full", "prefix_cache": True},
    "preemption": {"method": "h2o", "budget": "20%", "kv_memory": "1MiB", "overcommit": 4},
    "locret in chunks": {"method": "locret", "budget": "20%", "options": {"prefill": "chunks", "chunk": 64}},
}
PLACES: tuple[dict[str, float], ...] = (
    {"device": 1.0},
    {"device": 0.4, "host": 0.6},
    {"host": 1.0},
    {"device": 0.2, "host": 0.4, "disk": 0.4},
    {"disk": 1.0},
)
#: Methods of the comparison of codecs, with and without eviction, and their options.
CODEC_METHODS: dict[str, dict[str, Any]] = {"full": {}, "h2o": {"budget": 160, "sinks": 2}}
#: Shares that must be equal. A number between two codes may fall to either side, so a few kept entries may differ.
KEPT, KEPT_CODES = 0.98, 0.95
#: The same of tokens of engines whose caches hold codes, or whose weights are in bf16.
TOKENS_CODES, TOKENS_BF16 = 0.9, 0.98
#: The same of predictions over codes, each behind the same tokens.
TOKENS_FOLLOWED = 0.97
#: Codecs whose groups are wider than the heads of pond-recall, of 32.
WIDER_HEADS = ("flexgen4", "flexgen4_paper", "think", "think_kivi2")
#: Methods that the engine refuses.
NOT_IN_ENGINES = ("kvzip", "sirllm")


def method_cells(machine: Machine) -> list[Cell]:
    """generate() of pond-recall in float32 with every method."""
    names = ["full", "h2o"] if machine.tiny else list_methods()
    return [Cell("tokens: methods", name, partial(of_method, machine, name), 4.0) for name in names]


def codec_cells(machine: Machine) -> list[Cell]:
    """generate() of a random model in float32 over every codec, with and without eviction."""
    return [
        Cell("tokens: codecs", f"{codec}, {method}", partial(of_codec, machine, codec, method), 8.0)
        for codec, method in codecs_with_methods(["int4"] if machine.tiny else sorted(PRESETS))
    ]


def engine_cells(machine: Machine) -> list[Cell]:
    """Answers of the engine to prompts of many lengths with every method, every codec, and its features."""
    given: dict[str, dict[str, Any]] = dict(FEATURES)
    given |= {name: engine_options(name) for name in list_methods() if name not in NOT_IN_ENGINES}
    codecs = sorted(name for name, codec in PRESETS.items() if not codec.calibrated and name not in WIDER_HEADS)
    given |= {
        f"{method}, {codec}": {**engine_options(method), "codec": codec}
        for codec, method in codecs_with_methods(codecs)
    }
    if machine.tiny:
        given = {name: given[name] for name in ("h2o", "full, int4")}
    return [Cell("tokens: engine", name, partial(of_engine, machine, options), 5.0) for name, options in given.items()]


def codecs_with_methods(codecs: Sequence[str]) -> list[tuple[str, str]]:
    """Codecs with and without eviction, but for pairs that the method itself refuses."""
    policies = {method: METHODS.get(method)() for method in CODEC_METHODS}
    pairs = [(codec, method) for codec in codecs for method in CODEC_METHODS]
    return [(codec, method) for codec, method in pairs if policies[method].codec_refusal(PRESETS[codec]) is None]


def place_cells(machine: Machine) -> list[Cell]:
    """Answers of the engine with layers on the device, in the host's memory and on the disk."""
    places = [weights for weights in PLACES if machine.cuda or "device" not in weights]
    methods = ("h2o",) if machine.tiny else ("full", "h2o")
    return [
        Cell("tokens: places", f"{method}, {name_of(weights)}", partial(of_places, machine, method, weights), 5.0)
        for method in methods
        for weights in (places[:1] if machine.tiny else places)
    ]


def engine_options(method: str) -> dict[str, Any]:
    """What an engine is given for a method."""
    options = dict(GIVEN.get(method, {"budget": "20%"}))
    found: dict[str, Any] = {"method": method}
    if "budget" in options:
        found["budget"] = options.pop("budget")
    return found | ({"options": options} if options else {})


def name_of(weights: dict[str, float]) -> str:
    return " ".join(f"{tier} {share:.0%}" for tier, share in weights.items())


# ---------------------------------------------------------------------- cells


def of_method(machine: Machine, name: str) -> Row:
    """One method in generate(): equal tokens, and the share of equal kept entries."""
    model, tokenizer = pond_recall(), mp.load_tokenizer("pond-recall")
    text = TEXT[:60] if machine.tiny else TEXT
    ids = torch.cat([tokenizer(text + asked, return_tensors="pt").input_ids for asked in QUESTIONS])
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    options = GIVEN.get(name, {"budget": "20%"}) | {"tokenizer": tokenizer}
    new = 3 if machine.tiny else 24
    runs = [generated(model, device, served, (ids, mask), new, name, options) for device, served in sides(machine)]
    return compared(*runs, tokens=1.0, kept=KEPT)


def codec_inputs(tiny: bool) -> tuple[tuple[torch.Tensor, torch.Tensor], int]:
    """Ids and mask of two sequences, one of them padded, and how many tokens are generated."""
    prompt, new = (136, 2) if tiny else (200, 96)
    torch.manual_seed(1)
    ids, mask = torch.randint(2, 512, (2, prompt)), torch.ones(2, prompt, dtype=torch.long)
    mask[1, : prompt // 10] = 0
    return (ids, mask), new


def of_codec(machine: Machine, codec: str, method: str) -> Row:
    """One codec in generate(), two sequences, one of them padded; pages are sealed in the prompt and while decoding.

    The device goes on with the tokens of the CPU: one number that falls to the other side between two codes would
    change all text that follows, here as on the CPU.
    """
    model, calibration = small_llama()
    inputs, new = codec_inputs(machine.tiny)
    given: dict[str, Any] = {**CODEC_METHODS[method], "codec": codec}
    if codec_named(codec).calibrated:
        given["calibration"] = calibration
    (cpu, plain), (device, served) = sides(machine)
    first = generated(model, cpu, plain, inputs, new, method, given)
    second = generated(model, device, served, inputs, new, method, given, follow=first[0])
    return compared(first, second, tokens=TOKENS_FOLLOWED, kept=KEPT_CODES)


def of_engine(machine: Machine, options: dict[str, Any]) -> Row:
    """One engine: the share of equal tokens of nine answers."""
    tokenizer = mp.load_tokenizer("pond-recall")
    answers = []
    for device, served in sides(machine):
        model = pond_recall().to(device)
        with kernels(served), mp.LLM(model, tokenizer=tokenizer, **options) as llm:
            answers.append(asked(llm, machine))
    same = share_of_tokens(*answers)
    return {"same_tokens": same, "ok": same >= (TOKENS_CODES if "codec" in options else 1.0)}


def of_places(machine: Machine, method: str, weights: dict[str, float]) -> Row:
    """One placement of the weights, which are in bf16."""
    options: dict[str, Any] = {"method": method} | ({} if method == "full" else {"budget": "20%"})
    given: tuple[dict[str, Any], ...] = ({}, {"device": str(machine.device), "plan": mp.Plan(weights=weights)})
    answers = []
    for more in given:
        with mp.LLM("pond-recall", tokenizer=mp.load_tokenizer("pond-recall"), **options, **more) as llm:
            answers.append(asked(llm, machine))
    same = share_of_tokens(*answers)
    return {"same_tokens": same, "ok": same >= TOKENS_BF16}


# ---------------------------------------------------------------------- parts of cells


@cache
def pond_recall() -> Any:
    return mp.load_model("pond-recall").float()


@cache
def small_llama() -> tuple[Any, Any]:
    """A random model with heads of 64, and a calibration for the codecs that need one."""
    torch.manual_seed(0)
    config: Any = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    model: Any = LlamaForCausalLM(config).float()
    model.train(False)
    return model, calibrate(model, torch.randint(2, 512, (4096,)), bits=(2, 3, 4), windows=4)


def sides(machine: Machine) -> tuple[tuple[torch.device, str], ...]:
    """The CPU with the plain reference, whose products are of float32 too, and the device with its kernels."""
    return (CPU, "reference"), (machine.device, "gpu")


@contextmanager
def kernels(name: str) -> Iterator[None]:
    """Which kernels serve, for a while."""
    before = os.environ.get("MILLPOND_KERNELS")
    os.environ["MILLPOND_KERNELS"] = name
    try:
        yield
    finally:
        os.environ.pop("MILLPOND_KERNELS")
        if before is not None:
            os.environ["MILLPOND_KERNELS"] = before


Generated = tuple[torch.Tensor, list[Any]]


def generated(
    model: Any,
    device: torch.device,
    served: str,
    inputs: tuple[torch.Tensor, torch.Tensor],
    new: int,
    method: str,
    options: dict[str, Any],
    follow: torch.Tensor | None = None,
) -> Generated:
    """Greedy tokens of generate(), and the kept positions by layer, sequence and head.

    Where tokens are given to follow, (B, new), each greedy token is that behind those before.
    """
    model.to(device)
    ids, mask = (given.to(device) for given in inputs)
    leader = None if follow is None else Leader(follow.to(device), ids.shape[1])
    with kernels(served), torch.no_grad(), mp.compress(model, method, **options) as cache:
        out = model.generate(
            ids,
            attention_mask=mask,
            **cache_argument(cache),
            do_sample=False,
            max_new_tokens=new,
            min_new_tokens=new,
            disable_compile=True,
            logits_processor=LogitsProcessorList([] if leader is None else [leader]),
        )
        kept = [[cache.positions(layer, s) for s in range(len(ids))] for layer in range(len(cache.layer_caches))]
    return (out[:, ids.shape[1] :] if leader is None else torch.stack(leader.chosen, 1)).cpu(), kept


class Leader(LogitsProcessor):
    """Leads greedy generation along given tokens (B, new) behind a prompt, and notes what it would have chosen."""

    def __init__(self, tokens: torch.Tensor, prompt: int) -> None:
        self._tokens, self._prompt = tokens, prompt
        self.chosen: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.chosen.append(scores.argmax(-1))
        next_one = self._tokens[:, input_ids.shape[1] - self._prompt]
        return torch.full_like(scores, -torch.inf).scatter(1, next_one[:, None], 0.0)


def compared(one: Generated, other: Generated, tokens: float, kept: float) -> Row:
    """Whether shares of the tokens and of the kept entries are equal."""
    same_tokens, same_kept = float((one[0] == other[0]).float().mean()), share_of_kept(one[1], other[1])
    return {"same_tokens": same_tokens, "same_kept": same_kept, "ok": same_tokens >= tokens and same_kept >= kept}


def share_of_kept(kept: Sequence[Any], others: Sequence[Any]) -> float:
    """The share of the positions kept, per layer, sequence and head, that are kept in both runs."""
    pairs = [
        (set(map(int, a)), set(map(int, b)))
        for layer, layer2 in zip(kept, others, strict=True)
        for heads, heads2 in zip(layer, layer2, strict=True)
        for a, b in zip(heads, heads2, strict=True)
    ]
    return sum(len(a & b) for a, b in pairs) / max(1, sum(len(a | b) for a, b in pairs))


def asked(llm: mp.LLM, machine: Machine) -> list[list[int]]:
    """Tokens of the answers to prompts of many lengths."""
    prompts = [TEXT[: 60 * n] + QUESTIONS[0] for n in range(1, 2 if machine.tiny else 10)]
    params = mp.SamplingParams(max_tokens=3 if machine.tiny else 20, temperature=0.0, ignore_eos=True)
    return [list(out.completions[0].token_ids) for out in llm.generate(prompts, params)]


def share_of_tokens(answers: list[list[int]], others: list[list[int]]) -> float:
    same = [a == b for one, other in zip(answers, others, strict=True) for a, b in zip(one, other, strict=True)]
    return sum(same) / len(same)
