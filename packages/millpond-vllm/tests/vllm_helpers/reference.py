"""Plain reference of eviction on blocks: a Llama that keeps the entries of each layer and KV head in tensors.

Nothing of the package is used but the positions of events: scores are written from the methods' equations.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaForCausalLM

from millpond_vllm.event_times import NEVER, EventTimes


@dataclass
class Layer:
    """Entries of one layer: (H, n, D), their positions and what they have gathered (H, n)."""

    keys: Tensor
    values: Tensor
    positions: Tensor
    sums: Tensor
    queries: Tensor  # (Hq, w, D): the last ones


class Reference:
    """One request of a small Llama in float32."""

    def __init__(self, path: str, method: str, times: EventTimes, *, window: int = 32, pool: int = 21, sinks: int = 0):
        self.model = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.method, self.times, self.window, self.pool, self.sinks = method, times, window, pool, sinks
        config = self.model.config
        self.group = config.num_attention_heads // config.num_key_value_heads
        self.dim = config.head_dim
        heads = config.num_key_value_heads
        empty = torch.zeros(heads, 0, self.dim)
        self.layers = [
            Layer(empty, empty, torch.zeros(heads, 0, dtype=torch.long), torch.zeros(heads, 0), empty.repeat(2, 1, 1))
            for _ in range(config.num_hidden_layers)
        ]

    @torch.no_grad()
    def generate(self, prompt: list[int], new: int) -> list[int]:
        """Return the tokens of greedy decoding."""
        at, tokens = 0, list(prompt)
        logits = None
        while len(tokens) < len(prompt) + new:
            end = min(len(tokens), max(self.times.next(at), at + 1))
            logits = self._pass(torch.tensor(tokens[at:end]), at)
            if end == len(tokens):
                tokens.append(int(logits[-1].argmax()))
            if end < len(prompt) + new and self.times.next(at) == end:
                for layer in self.layers:
                    self._evict(layer, end)
            at = end
        return tokens[len(prompt) :]

    def _pass(self, ids: Tensor, first: int) -> Tensor:
        """Compute some tokens from position `first` on; return their logits."""
        body = self.model.model
        x = body.embed_tokens(ids)
        at = torch.arange(first, first + len(ids))
        cos, sin = body.rotary_emb(x[None], at[None])
        for block, layer in zip(body.layers, self.layers, strict=True):
            attention = block.self_attn
            h = block.input_layernorm(x)
            q, k, v = (
                project(h).view(len(ids), -1, self.dim).transpose(0, 1)
                for project in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            q, k = _rotated(q, cos[0], sin[0]), _rotated(k, cos[0], sin[0])
            x = x + attention.o_proj(self._attend(layer, q, k, v, at))
            x = x + block.mlp(block.post_attention_layernorm(x))
        return self.model.lm_head(body.norm(x))

    def _attend(self, layer: Layer, q: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
        layer.keys, layer.values = torch.cat([layer.keys, k], 1), torch.cat([layer.values, v], 1)
        layer.positions = torch.cat([layer.positions, at.expand(len(k), -1)], 1)
        layer.sums = F.pad(layer.sums, (0, len(at)))
        layer.queries = torch.cat([layer.queries, q], 1)[:, -self.window :]
        p = self._attention(layer, q, at)
        layer.sums += p.mean(1).sum(1)
        out = p @ layer.values[:, None]
        return out.reshape(-1, len(at), self.dim).transpose(0, 1).flatten(1)

    def _attention(self, layer: Layer, q: Tensor, at: Tensor) -> Tensor:
        """Return (H, group, queries, entries): attention of queries (Hq, n, D) at positions (n,)."""
        q = q.view(len(layer.keys), self.group, *q.shape[1:])
        logits = q @ layer.keys[:, None].transpose(2, 3) / math.sqrt(self.dim)
        hidden = layer.positions[:, None, None, :] > at[None, None, :, None]
        return logits.masked_fill(hidden, -math.inf).softmax(-1)

    def _evict(self, layer: Layer, computed: int) -> None:
        """Keep the best entries of the blocks that have left the newest tokens."""
        border = self.times.left(computed) * self.times.block
        score = self._score(layer, computed)
        score = score.masked_fill(layer.positions < self.sinks, math.inf)
        score = score.masked_fill(layer.positions >= border, -math.inf)
        best = score.argsort(dim=1, stable=True)[:, -self.times.packed * self.times.block :]  # of equal ones the newest
        keep = torch.zeros_like(score, dtype=torch.bool).scatter_(1, best, True) | (layer.positions >= border)
        n = int(keep[0].sum())
        index = keep.nonzero()[:, 1].view(len(keep), n)
        columns = index[..., None].expand(-1, -1, self.dim)
        layer.keys, layer.values = layer.keys.gather(1, columns), layer.values.gather(1, columns)
        layer.positions, layer.sums = layer.positions.gather(1, index), layer.sums.gather(1, index)

    def _score(self, layer: Layer, computed: int) -> Tensor:
        if self.method == "streaming":
            return layer.positions.float()
        if self.method == "h2o":
            return layer.sums
        if self.method == "keydiff":
            unit = F.normalize(layer.keys, dim=2)
            return -F.cosine_similarity(layer.keys, unit.mean(1, keepdim=True), dim=2)
        width = min(self.window, layer.queries.shape[1])
        at = torch.arange(computed - width, computed)
        p = self._attention(layer, layer.queries[:, -width:], at)
        if self.method == "tova":
            last = p.mean(1)[:, -1]
            return last.mean(0, keepdim=True).expand_as(last)
        assert self.method == "snapkv", self.method
        mean = p.mean(1).sum(1) / self.window
        before = layer.positions < computed - self.window
        pooled = F.max_pool1d(torch.where(before, mean, -math.inf)[None], self.pool, 1, self.pool // 2)[0]
        return torch.where(before, pooled, mean)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], -1)
    return x * cos + turned * sin


def never(times: EventTimes) -> bool:
    """Whether a request keeps everything."""
    return times.first() >= NEVER
