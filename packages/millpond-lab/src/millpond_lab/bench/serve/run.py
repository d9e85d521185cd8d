"""A run of `millpond bench serve`: requests, their schedule, and the results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from millpond.errors import OptionError
from millpond_lab.bench.serve.client import LoadClient, RequestOutcome
from millpond_lab.bench.serve.load_loop import closed_loop, open_loop, poisson
from millpond_lab.bench.serve.requests import LoadRequest
from millpond_lab.bench.serve.server_metrics import Gauges
from millpond_lab.bench.serve.statistics import summarise


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """How a list of asks is sent.

    Attributes:
        url, model, api_key, timeout_s: of the server; without a model, the first that it names.
        rate: open loop, Poisson arrivals per second. users: closed loop. Neither: open loop at the trace's own times,
            `speed` times as fast.
        chat: as one message of a chat, not as a completion.
        vocab_size: made-up tokens are below it. ignore_eos: ask for answers of the trace's length.
        extra: more fields of each body. levels: service levels in seconds.
    """

    url: str
    model: str | None = None
    api_key: str | None = None
    timeout_s: float = 600.0
    rate: float | None = None
    users: int | None = None
    speed: float = 1.0
    chat: bool = False
    vocab_size: int = 256
    ignore_eos: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)
    levels: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rate is not None and self.users is not None:
            raise OptionError("a rate is an open loop, users are a closed one; give one of them")

    def body(self, ask: LoadRequest, model: str) -> dict[str, Any]:
        """What is posted for an ask."""
        prompt = ask.prompt if isinstance(ask.prompt, str) else ask.prompt.tokens(self.vocab_size, self.seed)
        asked = {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        ends = {"ignore_eos": True} if self.ignore_eos else {}
        return {
            "model": model,
            **asked,
            "max_tokens": ask.output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **ends,
            **self.extra,
        }


async def run(
    plan: LoadPlan, asks: Sequence[LoadRequest], progress: Callable[[int, int], None] | None = None
) -> dict[str, Any]:
    """Send all asks; returns the summary, the server's own numbers and each request's times.

    Raises:
        OptionError: made-up tokens in a chat. DataError: the server cannot be reached at all, or names no model.
    """
    if plan.chat and any(not isinstance(ask.prompt, str) for ask in asks):
        raise OptionError("a chat takes text, and this load has token ids; leave --chat out, or take a load of texts")
    async with LoadClient(plan.url, plan.api_key, plan.timeout_s) as client:
        model = plan.model or await client.model()
        path, done = "/v1/chat/completions" if plan.chat else "/v1/completions", 0

        async def send(ask: LoadRequest, planned_s: float) -> RequestOutcome:
            nonlocal done
            outcome = await client.send(path, plan.body(ask, model), planned_s)
            done += 1
            if progress is not None:
                progress(done, len(asks))
            return outcome

        async with Gauges(client) as gauges:
            client.start_clock()
            if plan.users is not None:
                outcomes = await closed_loop(asks, plan.users, send, client.now)
            else:
                outcomes = await open_loop(asks, _times(plan, asks), send, client.now)
    return {
        "model": model,
        "load": _load(plan),
        "summary": summarise(outcomes, plan.levels),
        "server": {"peaks": gauges.peaks, "gained": gauges.gained},
        "requests": [asdict(o) for o in outcomes],
    }


def _times(plan: LoadPlan, asks: Sequence[LoadRequest]) -> list[float]:
    if plan.rate is not None:
        return poisson(len(asks), plan.rate, plan.seed)
    return [ask.at_s / plan.speed for ask in asks]


def _load(plan: LoadPlan) -> str:
    """How the asks were sent, in words."""
    if plan.users is not None:
        return f"closed loop, {plan.users} users"
    if plan.rate is not None:
        return f"open loop, Poisson arrivals, {plan.rate:g} per second"
    return "open loop, the trace's own times" + ("" if plan.speed == 1 else f", {plan.speed:g} times as fast")
