"""Settings of eviction and number format applied to a recorded window: bytes held, and what the model then predicts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from search_windows import Window, mixed, over, run
from torch import Tensor
from transformers import PreTrainedModel

from millpond.codec.groups import ROWS, TABLES, Coder, integers
from millpond.codec.nuq import as_table, kmeans
from millpond.codec.rotate import rotate
from millpond.kernels.packed.layout import PackedLayout, Side

SINKS = 4


@cache
def gaussian_table(bits: int, dim: int = 64) -> tuple[float, ...]:
    """Numbers of least squared error for `dim` Gaussian numbers that were brought to [-1, 1] by their own range."""
    x = torch.randn(8192, dim, generator=torch.Generator().manual_seed(7))
    half, middle = (x.amax(1) - x.amin(1)) / 2, (x.amax(1) + x.amin(1)) / 2
    y = (x - middle[:, None]) / half[:, None]
    return as_table(kmeans(y.flatten(), half.square()[:, None].expand_as(y).flatten(), 1 << bits))


def side(name: str) -> Side:
    """How a side is stored: "4" integers per token, "s4" without zeros, "t3" a table for Gaussian numbers, "c3/64" per
    channel."""
    if name == "16":
        return ROWS
    if name.startswith("t"):
        return Side(TABLES[int(name[1:])], table=gaussian_table(int(name[1:])))
    if name.startswith("s"):
        return integers(int(name[1:]), symmetric=True)
    if name.startswith("c"):
        bits, group = name[1:].split("/")
        return integers(int(bits), int(group), by_channel=True)
    bits, _, group = name.partition("/")
    return integers(int(bits), int(group or 0))


@dataclass(frozen=True)
class Setting:
    """What is kept, and how it is stored.

    Attributes:
        keep: share of the entries that stay, on average over the layers.
        score: what is kept besides the newest and the first four. recent: share of the budget that is the newest.
        key, value: formats, see `side`. rotated: a Hadamard rotation before them.
        layers: weights of the layers' budgets; empty: all alike.
        low: format of the entries that are not kept, for tiers; empty: they are dropped.
        residual: newest entries in 16 bits. plain_slots: of a page of those.
    """

    keep: float = 1.0
    score: str = "all"
    recent: float = 0.5
    key: str = "16"
    value: str = "16"
    rotated: bool = False
    layers: tuple[float, ...] = ()
    low: str = ""
    residual: int = 0
    plain_slots: int = 32

    def __str__(self) -> str:
        kept = "" if self.keep == 1 else f"{self.score} {self.keep:.1%} recent {self.recent:g} "
        bits = f"{'r ' if self.rotated else ''}{self.key}+{self.value}" + (f" low {self.low}" if self.low else "")
        rest = f" residual {self.residual}" if self.residual else ""
        return f"{kept}{bits}{rest} pages {self.plain_slots}" + (" layers" if self.layers else "")

    def budgets(self, n: int, n_layers: int) -> list[int]:
        """Entries per KV head of each layer."""
        if not self.layers:
            return [round(self.keep * n)] * n_layers
        mean = sum(self.layers) / n_layers
        return [min(n, max(SINKS + 1, round(self.keep * n * w / mean))) for w in self.layers]

    def slots(self) -> int:
        """Entries per page of codes."""
        return max(32, *(s.group if s.by_channel else 0 for s in (side(self.key), side(self.value))))

    def bytes(self, n: int, n_layers: int, dim: int) -> float:
        """Bytes held, as a share of a 16-bit cache of all entries without pages."""
        total = 0.0
        for kept in self.budgets(n, n_layers):
            packed = self._packed(kept)
            total += packed // self.slots() * self._page(dim) if packed else 0
            total += -(-(kept - packed) // self.plain_slots) * self.plain_slots * dim * 4
            if self.low:
                low = side(self.low)
                total += -(-(n - kept) // 32) * PackedLayout(32, dim, dim, low, low).page_bytes
        return total / (n_layers * n * dim * 4)

    def _page(self, dim: int) -> int:
        return PackedLayout(self.slots(), dim, dim, side(self.key), side(self.value)).page_bytes

    def _packed(self, kept: int) -> int:
        if self.key == self.value == "16":
            return 0
        return max(0, kept - self.residual) // self.slots() * self.slots()

    def store(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Entries (H, M, D) in the order of the text, as they are read back, float32."""
        n = self._packed(keys.shape[1])
        return tuple(self._stored(x, n, name) for x, name in ((keys, self.key), (values, self.value)))  # type: ignore[return-value]

    def _stored(self, x: Tensor, n: int, name: str) -> Tensor:
        if name == "16" or not n:
            return x
        return torch.cat([coded(x[:, :n], name, self.slots(), self.rotated), x[:, n:]], 1)


def coded(x: Tensor, name: str, slots: int, rotated: bool) -> Tensor:
    """Numbers x (H, n, D) as codes and back, float32."""
    coder = Coder(side(name))
    pages = (rotate(x) if rotated else x).reshape(-1, slots, x.shape[2])
    read = coder.decode(coder.encode(pages)).view_as(x)
    return rotate(read) if rotated else read


def score_of(setting: Setting, window: Window, index: int, projections: list[Tensor]) -> Tensor:
    """(H, N): higher is kept. "a&b" adds shares, "a^max" takes the largest query head of a group and not the mean, and
    "a*values" weighs by the norm of value times output projection."""
    layer = window.layers[index]
    name, _, how = setting.score.partition("*")
    heads = len(layer.keys)
    parts = [part.partition(":") for part in name.split("&")]
    total = torch.zeros(heads, window.n)
    for what, _, weight in parts:
        s = layer.sums[what.removesuffix("^max").removesuffix("^mean")]
        if how == "values":
            v = layer.values.float().repeat_interleave(len(s) // heads, 0)
            s = s * (v @ projections[index]).norm(dim=-1)
        elif what == "change":
            s = s.sqrt()
        s = s.view(heads, -1, window.n)
        s = s.amax(1) if what.endswith("^max") else s.mean(1)
        total += float(weight or 1) * s / s.sum(1, keepdim=True)
    return total


def kept_of(setting: Setting, window: Window, index: int, budget: int, projections: list[Tensor]) -> Tensor:
    """(H, budget): the entries of each head that stay, in the order of the text."""
    n = window.n
    value = score_of(setting, window, index, projections)
    newest = min(int(setting.recent * budget), budget - SINKS)
    value[:, n - newest :] = torch.inf
    value[:, :SINKS] = torch.inf
    return value.topk(budget, 1).indices.sort(1).values


@torch.no_grad()
def judged(
    model: PreTrainedModel, setting: Setting, window: Window, projections: list[Tensor]
) -> tuple[float, float, int]:
    """What a setting costs in one window: sums of KL(full || setting) and of nats more than full, and tokens."""
    n_layers = len(window.layers)
    held: list[tuple[Tensor, Tensor]] = []
    for index, (layer, budget) in enumerate(zip(window.layers, setting.budgets(window.n, n_layers), strict=True)):
        k, v = layer.keys.float(), layer.values.float()
        if budget < window.n:
            kept = kept_of(setting, window, index, budget, projections)[:, :, None].expand(-1, -1, k.shape[2])
            own = setting.store(k.gather(1, kept), v.gather(1, kept))
            if setting.low:
                own = tuple(
                    coded(x, setting.low, 32, setting.rotated).scatter(1, kept, y)
                    for x, y in zip((k, v), own, strict=True)
                )
            held.append(own)  # type: ignore[arg-type]
        else:
            held.append(setting.store(k, v))

    def attend(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = held[index]
        a = over(q, torch.cat([keys, k], 1), keys.shape[1])
        return mixed(a, torch.cat([values, v], 1))

    found = run(model, window.ids[:-1], window.n, attend)
    assert found is not None
    p = window.logprobs.float()
    kl = (p.exp() * (p - found)).sum()
    nll = -found.gather(1, window.ids[1:, None])[:, 0]
    return float(kl), float((nll - window.nll).sum()), len(window.ids)
