"""A worker's state that is fed by hand with the queries, keys and values of a small Llama: no vLLM is needed."""

from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import millpond as mp
from millpond import Policy
from millpond.hf.calibration.load import model_mark
from millpond.plugins import AttentionShape
from millpond.policy.trained.networks import LayerHeads, RetainingHeads
from millpond_vllm.cache_layout import HeadMajorLayout
from millpond_vllm.event_times import EventTimes
from millpond_vllm.messages import Eviction, Observation, StepOrders, StepPart
from millpond_vllm.rotation import HeadRotation
from millpond_vllm.worker_state import EvictingLayer, WorkerState

BLOCK, DIM, HEADS, KV_HEADS, LAYERS = 32, 32, 4, 2, 3


def small_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=HEADS * DIM,
        intermediate_size=256,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=DIM,
        max_position_embeddings=4096,
    )
    model = LlamaForCausalLM(config).eval()
    for weight in model.parameters():
        if weight.ndim == 2:  # spread, so that attention differs among entries
            torch.nn.init.normal_(weight, std=0.12)
    return model


def turned(block: int, dim: int) -> Tensor:
    """Places of a block's keys: channel by channel, as some CPU kernels have them."""
    return (torch.arange(block)[:, None] + torch.arange(dim)[None] * block).flatten()


@dataclass
class Text:
    """One request: what each layer sees of it, (T, heads, D) each, its events and its blocks."""

    request: str
    ids: list[int]
    times: EventTimes
    seen: list[tuple[Tensor, Tensor, Tensor]]
    blocks: list[int]

    def slot(self, at: int) -> int:
        return self.blocks[at // BLOCK] * BLOCK + at % BLOCK


def seen_by_layers(model: LlamaForCausalLM, ids: list[int]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Queries and keys after RoPE and values of each layer."""
    caught: list[dict[str, Tensor]] = [{} for _ in range(LAYERS)]
    hooks = [
        getattr(layer.self_attn, f"{name}_proj").register_forward_hook(
            lambda _, __, out, own=own, name=name: own.update({name: out[0]})
        )
        for layer, own in zip(model.model.layers, caught, strict=True)
        for name in "qkv"
    ]
    with torch.no_grad():
        model(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    cos, sin = model.model.rotary_emb(torch.zeros(1), torch.arange(len(ids))[None])
    result = []
    for own in caught:
        q, k, v = (own[name].view(len(ids), -1, DIM).transpose(0, 1)[None] for name in "qkv")
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        result.append(tuple(part[0].transpose(0, 1) for part in (q, k, v)))
    return result


def new_state(model: LlamaForCausalLM, policy: Policy, n_blocks: int) -> WorkerState:
    cos, sin = model.model.rotary_emb(torch.zeros(1), torch.arange(4096)[None])
    table = torch.cat([cos[0, :, : DIM // 2], sin[0, :, : DIM // 2]], 1)
    layers = []
    for index, layer in enumerate(model.model.layers):
        cache = torch.zeros(n_blocks, KV_HEADS, BLOCK, 2 * DIM)
        module = SimpleNamespace(kv_cache=cache, head_size=DIM, kv_cache_dtype="auto")
        output = layer.self_attn.o_proj.weight.detach().T.contiguous()
        shape, rotation = AttentionShape(DIM**-0.5), HeadRotation(table, halves=True)
        layers.append(
            EvictingLayer(index, module, HEADS, KV_HEADS, index, shape, partial(torch.clone, output), rotation)
        )
    values_at = torch.randperm(BLOCK * DIM, generator=torch.Generator().manual_seed(2))
    return WorkerState(policy, layers, HeadMajorLayout(turned(BLOCK, DIM), values_at, BLOCK), BLOCK)


class Feed:
    """Steps of several requests through a state, as the scheduler and the attention of vLLM would make them."""

    def __init__(self, model: LlamaForCausalLM, policy: Policy, texts: list[Text]) -> None:
        self.texts, self.policy = texts, policy
        self.fresh = max(block for text in texts for block in text.blocks) + 1
        self.state = new_state(model, policy, self.fresh + 64)
        self.at = dict.fromkeys((text.request for text in texts), 0)

    def step(self, counts: dict[str, int]) -> None:
        """Read some tokens of each named request, in the order of `texts`."""
        orders, rows, slots, starts, lengths = StepOrders(), [], [], [0], []
        reading = [text for text in self.texts if counts.get(text.request)]
        for text in reading:
            begin, n = self.at[text.request], counts[text.request]
            end = begin + n
            first = max(begin, text.times.first() - self.policy.window)
            if self.policy.window and first < end:
                places = [text.slot(at) for at in range(first, end)]
                orders.observations.append(Observation(text.request, first, places))
            if self.policy.sums_prompt:
                orders.parts.append(StepPart(text.request, begin, n, text.slot(begin)))
            rows.append(slice(begin, end))
            slots += [text.slot(at) for at in range(begin, end)]
            starts.append(starts[-1] + n)
            lengths.append(end)
            self.at[text.request] = end
        width = max(len(text.blocks) for text in reading)
        table = torch.tensor([text.blocks + [0] * (width - len(text.blocks)) for text in reading], dtype=torch.int32)
        given = SimpleNamespace(
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            query_start_loc_cpu=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            block_table_tensor=table,
            slot_mapping=torch.tensor(slots),
            num_actual_tokens=len(slots),
            max_query_len=max(counts.values()),
        )
        self.state.begin(orders)
        plan = self.state.plan_step(given, given.seq_lens)
        for index in range(LAYERS):
            parts = [[part[rows] for part in text.seen[index]] for text, rows in zip(reading, rows, strict=True)]
            queries, keys, values = (torch.cat(part) for part in zip(*parts, strict=True))
            self._write(index, given.slot_mapping, keys, values)
            if plan is not None:
                self.state.observe(index, queries, keys, values, plan)

    def _write(self, index: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        cache, layout = self.state.layers[index].cache, self.state.layout
        parts = cache.view(len(cache), KV_HEADS, 2, BLOCK * DIM)
        blocks, within = (slots // BLOCK)[:, None], slots % BLOCK
        for which, numbers, order in ((0, keys, layout.keys_at), (1, values, layout.values_at)):
            parts[blocks, :, which, order.view(BLOCK, DIM)[within]] = numbers.transpose(1, 2)

    def evict(self, request: str) -> list[list[list[int]]]:
        """Carry out the event at the end of a prompt; return the kept positions by layer and KV head."""
        [text] = [one for one in self.texts if one.request == request]
        computed, times = self.at[request], text.times
        left = times.left(computed)
        target = list(range(self.fresh, self.fresh + times.packed))
        tail = text.blocks[left : -(-computed // BLOCK)]
        event = Eviction(request, text.blocks[:left], target, tail, computed, 0, [])
        self.state.begin(StepOrders([event]))
        tail_positions = list(range(left * BLOCK, computed))
        return [[head + tail_positions for head in layer] for layer in self.state._positions[request].tolist()]


def random_heads(model: LlamaForCausalLM, n_layers: int = LAYERS, kv_heads: int = KV_HEADS) -> RetainingHeads:
    """Networks with random weights that are the model's own."""
    draw = torch.Generator().manual_seed(6)
    inputs = (HEADS + 2 * KV_HEADS) * DIM
    wide = torch.linspace(-9, 9, 257).repeat(kv_heads, 1)
    layers = [
        LayerHeads(
            torch.randn(16, inputs, generator=draw) / 8,
            torch.randn(16, generator=draw),
            torch.randn(kv_heads, 16, generator=draw) / 4,
            torch.randn(kv_heads, generator=draw),
            wide.clone(),
        )
        for _ in range(n_layers)
    ]
    return RetainingHeads(layers, model_mark(model), "LlamaForCausalLM", {"label": "log_prob"})


def kept_by_compress(model: LlamaForCausalLM, policy: Policy, text: Text) -> list[list[list[int]]]:
    """Positions that `mp.compress` keeps of a prompt, with what the blocks make of budget and newest entries."""
    n = len(text.ids)
    tail = n - text.times.left(n) * BLOCK
    policy = replace(policy, protect=replace(policy.protect, recent=tail, grace=0), every_step=False)
    with torch.no_grad(), mp.compress(model, policy, text.times.packed * BLOCK + tail) as cache:
        model(torch.tensor([text.ids]), cache=cache)
        return [cache.positions(layer) for layer in range(LAYERS)]
