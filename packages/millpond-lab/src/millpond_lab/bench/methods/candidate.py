"""A method in `bench methods`: its options, the bound on its cost, and the measured cost."""

from __future__ import annotations

import inspect
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from millpond.errors import OptionError
from millpond.hf.calibration.load import model_mark
from millpond.hf.model_profile import ModelProfile, named
from millpond.methods import METHODS
from millpond.policy.policy import Policy
from millpond.policy.scores.over_hidden import OverHidden
from millpond.policy.token_classes import TokenClasses
from millpond.policy.trained.gelu_score import NARROWER, GeluScore
from millpond.policy.trained.hidden_networks import HiddenNetwork, HiddenNetworks
from millpond.policy.trained.linear_score import LinearScore
from millpond.policy.trained.networks import (
    QUANTILE_STEPS,
    Gates,
    LayerGate,
    LayerHeads,
    RetainingHeads,
    default_shape,
    default_width,
)
from millpond.policy.trained.sink_gate import SinkGate

#: Kinds of random networks by those of methods.
RANDOM_KINDS = {"kvzap-linear": "linear", "kvzap-mlp": "mlp", "fastkvzip": "sink-gate"}


def random_heads(
    model: PreTrainedModel, sizes: Sequence[tuple[int, int]] | None = None, seed: int = 0
) -> RetainingHeads:
    """Heads of a model, as wide as trained ones: the same at each call.

    sizes: of each layer, the numbers that a token gives and the KV heads; None: as the configuration says.
    """
    profile = ModelProfile.of(model)
    sizes, width = _shapes(profile, sizes)
    draw = torch.Generator().manual_seed(seed)

    def layer(inputs: int, n_scored: int) -> LayerHeads:
        w1, w2 = (torch.randn(*shape, generator=draw) for shape in ((width, inputs), (n_scored, width)))
        quantiles = torch.linspace(-3, 3, QUANTILE_STEPS + 1).repeat(n_scored, 1)
        return LayerHeads(w1 / inputs**0.5, torch.zeros(width), w2 / width**0.5, torch.zeros(n_scored), quantiles)

    return RetainingHeads([layer(*size) for size in sizes], model_mark(model), profile.name)


def random_gates(model: PreTrainedModel, sizes: Sequence[tuple[int, int]] | None = None, seed: int = 0) -> Gates:
    """Gates of a model, as wide as trained ones, that flag about half of the tokens; arguments as of `random_heads`."""
    profile = ModelProfile.of(model)
    sizes, hidden = _shapes(profile, sizes)
    n_heads, width = default_shape(int(profile.config.hidden_size))
    draw = torch.Generator().manual_seed(seed)

    def layer(inputs: int, n_gated: int) -> LayerGate:
        shapes = (
            (n_heads * width, inputs),
            (width, inputs),
            (width, inputs),
            (hidden, inputs + n_heads * width),
            (n_gated, hidden),
        )
        wq, wk, wv, w1, w2 = (torch.randn(*shape, generator=draw) / shape[1] ** 0.5 for shape in shapes)
        return LayerGate(wq, wk, wv, w1, torch.zeros(hidden), 2 * w2, torch.zeros(n_gated))

    return Gates([layer(*size) for size in sizes], model_mark(model), profile.name)


def random_networks(
    model: PreTrainedModel, kind: str, sizes: Sequence[tuple[int, int]] | None = None, seed: int = 0
) -> HiddenNetworks:
    """Networks over hidden states of a model: linear, mlp or sink-gate.

    sizes: of each layer, the numbers of a hidden state and the KV heads; None: as the configuration says.
    """
    profile = ModelProfile.of(model)
    hidden = int(profile.config.hidden_size)
    sizes = sizes or [(hidden, n_scored) for _, n_scored in _shapes(profile, None)[0]]
    draw = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        numbers: Tensor = torch.randn(*shape, generator=draw) / shape[-1] ** 0.5
        return numbers

    def layer(inputs: int, n: int) -> HiddenNetwork:
        if kind == "linear":
            return LinearScore(drawn(n, inputs), torch.zeros(n))
        if kind == "mlp":
            middle = max(1, inputs // NARROWER)
            return GeluScore(2 * drawn(middle, inputs), torch.zeros(middle), 2 * drawn(n, middle), torch.zeros(n))
        group, width, n_sinks = max(1, profile.n_heads // n), 16, 16
        large = drawn(n * group * width, inputs), torch.zeros(n * group * width), drawn(n * width, inputs)
        return SinkGate(*large, torch.ones(width), torch.ones(width), drawn(n, n_sinks, width), torch.zeros(n, group))

    return HiddenNetworks([layer(*size) for size in sizes], model_mark(model), profile.name)


def _shapes(profile: ModelProfile, sizes: Sequence[tuple[int, int]] | None) -> tuple[Sequence[tuple[int, int]], int]:
    """Numbers that a token gives and KV heads of each layer, where `sizes` does not say; and the networks' width."""
    config = profile.config
    n_heads = profile.n_heads or 1
    n_kv_heads = int(named(config, "num_key_value_heads") or n_heads)
    head_dim = int(named(config, "head_dim") or config.hidden_size // n_heads)
    width = default_width(int(config.hidden_size))
    return sizes or [((n_heads + 2 * n_kv_heads) * head_dim, n_kv_heads)] * profile.n_layers, width


PLAN_BOUND = 0.05  #: most of a prefill that may be planning


@dataclass(frozen=True)
class MethodTiming:
    """One run of one method.

    Attributes:
        prefill_s: to the first token, and to the end of the prompt's plan where that comes later.
        plan_s: those of them that went into the plan.
        decode_ms: of a step, the median; a share of what is done every few steps is in it.
        kv_bytes: held at the end.
        passes: of the model before the first token.
        ratio: of its turns to those of the anchor right before and behind, the median; None where it took no part.
    """

    prefill_s: float
    plan_s: float
    decode_ms: float
    kv_bytes: int
    passes: int
    ratio: float | None = None


@dataclass
class MethodCandidate:
    """A method that takes part, and its readings.

    Attributes:
        given: what it needs in addition to a prompt, and was given.
        again: it is the anchor once more: what differs is noise.
    """

    name: str
    setting: str
    policy: Policy
    given: str = ""
    again: bool = False
    readings: list[MethodTiming] = field(default_factory=list)
    failure: str = ""

    @classmethod
    def of(cls, name: str, options: dict[str, str], vocab: int) -> MethodCandidate:
        """The method called `name`, with what it needs to run on a random model.

        Raises:
            OptionError: no such method or option, a value that does not fit, or an option that must be given.
        """
        entry = METHODS.get(name)
        required = [o.name for o in entry.options.values() if o.default is inspect.Parameter.empty]
        missing = [option for option in required if option not in options]
        if missing:
            raise OptionError(f"{name} has no default for {', '.join(missing)}; name it, as {name}:{missing[0]}=...")
        source = _RandomTokens(vocab)
        policy = entry(**options).with_tokens(source)
        return cls(name, ":".join(f"{k}={v}" for k, v in options.items()), policy, source.given)

    def take_random_heads(self, model: PreTrainedModel) -> None:
        """Score entries by random networks, where the method has trained ones and this model has none."""

        def heads(trained: RetainingHeads | None) -> RetainingHeads:
            self.given = "retaining heads are random"
            return random_heads(model)

        def gates(trained: Gates | None) -> Gates:
            self.given = "gates are random"
            return random_gates(model)

        def networks(score: OverHidden) -> HiddenNetworks:
            self.given = "networks are random"
            return random_networks(model, RANDOM_KINDS[next(iter(score.kinds)).name])

        self.policy = self.policy.with_heads(heads).with_gates(gates).with_networks(networks)

    @property
    def kind(self) -> tuple[str, float | None]:
        """What the method does while it decodes, and how many times the anchor's step one of its may take."""
        policy = self.policy
        if self.again:
            return "noise: the same once more", None
        if policy.keeps_all:
            return "keeps everything", None
        if policy.plans_each_step:
            at = f"every {policy.plan_every} steps" if policy.plan_every > 1 else ""
            if policy.merge is not None:
                return f"merges {at}".rstrip(), 1.3
            return f"plans {at or 'at each step'}", 1.15
        return ("evicts", 1.15) if policy.every_step else ("grows", 1.05)

    def median(self, of: Callable[[MethodTiming], float]) -> float | None:
        """The median of a number over the repetitions."""
        return statistics.median(map(of, self.readings)) if self.readings else None

    @property
    def ratios(self) -> list[float]:
        """Of a decoding step to one of the anchor, one for each repetition."""
        return [r.ratio for r in self.readings if r.ratio is not None]

    def as_dict(self, anchor: MethodCandidate) -> dict[str, Any]:
        """For JSON: medians, ratios to the anchor, bounds and whether they hold, and every reading."""
        kind, bound = self.kind
        prefill, decode = self.median(lambda r: r.prefill_s), self.median(lambda r: r.decode_ms)
        share = self.median(lambda r: r.plan_s / r.prefill_s)
        ratios = self.ratios
        ratio = statistics.median(ratios) if ratios else None
        return {
            "name": self.name,
            "setting": self.setting,
            "given": self.given,
            "kind": kind,
            "again": self.again,
            "prefill_s": prefill,
            "prefill_ratio": _ratio(prefill, anchor.median(lambda r: r.prefill_s)),
            "plan_share": share,
            "plan_holds": _within(share, PLAN_BOUND),
            "decode_ms": decode,
            "decode_ratio": ratio,
            "decode_ratio_range": [min(ratios), max(ratios)] if ratios else None,
            "decode_bound": bound,
            "decode_holds": _within(ratio, bound),
            "kv_bytes": self.median(lambda r: r.kv_bytes),
            "extra_passes": max((r.passes - 1 for r in self.readings), default=None),
            "repeats_prompt": self.policy.needs.prompt_repeat is not None,
            "readings": [asdict(reading) for reading in self.readings],
            **({"failure": self.failure} if self.failure else {}),
        }


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


def _within(value: float | None, bound: float | None) -> bool | None:
    return None if value is None or bound is None else value <= bound


class _RandomTokens:
    """Tokens of a random model (see `millpond.policy.needs.TokenSource`); `given`: what was requested."""

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab
        self.given = ""

    def classes(self, given: TokenClasses) -> TokenClasses:
        if given.known:
            return given
        marks = self._vocab // 16
        self.given = f"1 id is special, {marks} of {self._vocab} are punctuation"
        return TokenClasses(
            frozenset({0}) if given.special is None else given.special,
            frozenset(range(1, 1 + marks)) if given.punctuation is None else given.punctuation,
        )

    def spell(self, text: str) -> tuple[int, ...]:
        self.given = "5 ids ask for the repetition"
        return 1, 2, 3, 4, 5
