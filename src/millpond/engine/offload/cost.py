"""Cost model of our sweep: time of its sweeps and bytes of its tiers, as linear expressions of the shares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

import torch

from millpond.cache.tiered.departure import MOST_PATCHES
from millpond.cache.tiered.disk_tier import N_SLOTS, SLOT_BYTES
from millpond.engine.offload.kv_size import KVSize
from millpond.engine.offload.machine import MachineConstants
from millpond.engine.offload.model_size import ModelSize
from millpond.engine.offload.plan import DEVICE, DISK, HOST, SLOTS, Schedule
from millpond.engine.offload.step_memory import StepMemory

#: Shares that are chosen: of weights and KV on each tier.
PLACES = ("weights device", "weights host", "weights disk", "kv device", "kv host", "kv disk")
#: Bytes per second of KV between a slot and its pages: checksum and copies, in the threads that read. An estimate.
CARRY_PER_S = 1e9
#: Seconds besides that KV on a disk takes in a layer for each micro-batch. An estimate from one model of 30 layers.
CARRY_S = 5e-3
#: Seconds besides the products that a micro-batch takes in a layer: calls and small operations. An estimate.
CALL_S = 150e-6
#: Prompts are read one after another; while the last tokens of one are read the next begins.
_READ_AT_A_TIME = 1


@dataclass(frozen=True, kw_only=True)
class BlockShape:
    """What a sweep runs, but for the shares.

    Attributes:
        sequences: that share a sweep. micro_batch: that pass a layer at a time. prompt_rows: prompt tokens in a sweep.
        slots: layers in memory of those that are read; 0 where none is.
    """

    sequences: int
    micro_batch: int
    prompt_rows: int
    schedule: Schedule = "zigzag"
    slots: int = SLOTS


class Term(NamedTuple):
    """Seconds of one part of a sweep, or bytes of a purpose: coefficients of `PLACES`, and a constant."""

    name: str
    shares: tuple[float, float, float, float, float, float]
    constant: float

    def at(self, values: Mapping[str, float]) -> float:
        """What it comes to with these shares."""
        weighted = zip(PLACES, self.shares, strict=True)
        return self.constant + sum(coefficient * values.get(place, 0.0) for place, coefficient in weighted)


@dataclass(frozen=True)
class CostModel:
    """Times and bytes of a model with a workload on a machine."""

    model: ModelSize
    kv: KVSize
    machine: MachineConstants

    # ------------------------------------------------------------------ times

    def prefill_sweeps(self, block: BlockShape) -> int:
        """Sweeps that read the prompts of a block."""
        return ceil(block.sequences * self.kv.prompt / block.prompt_rows)

    def decode_sweeps(self) -> int:
        """Sweeps that decode; the first new token comes from the prompt's last row."""
        return self.kv.new - 1

    def prefill(self, block: BlockShape) -> list[Term]:
        """Seconds of one sweep that reads prompts; the longest counts."""
        rows = block.sequences * self.kv.prompt / self.prefill_sweeps(block)
        return self._sweep(block, decoding=0, rows=rows)

    def decode(self, block: BlockShape) -> list[Term]:
        """Seconds of one sweep that decodes; where the schedule is diagonal prompts are read in it too."""
        rows = block.sequences * self.kv.prompt / self.kv.new if block.schedule == "diagonal" else 0.0
        return self._sweep(block, decoding=block.sequences, rows=rows)

    def _sweep(self, block: BlockShape, *, decoding: int, rows: float) -> list[Term]:
        machine, kv, weights = self.machine, self.kv, float(self.model.layer_bytes)
        entries, added = decoding * kv.step_bytes, (decoding + rows) * kv.new_bytes
        written = added + entries / MOST_PATCHES * kv.overwrites  # which waits in memory until it is worth a write
        write = written / machine.write_per_s if machine.write_per_s else 0.0
        read = Term("disk reads", (0, 0, weights / machine.read_per_s, 0, 0, entries / machine.read_per_s), 0)
        terms = [read, Term("disk writes", (0, 0, 0, 0, 0, write), 0)]
        attend = decoding * kv.step_flops / self._rate(kv.group)
        products = self._products(block, decoding, rows)
        device = machine.accelerator
        if device is None:
            both = products + rows * kv.prompt_flops / kv.prompt / self._rate(max(rows, 1))
            carried = attend + self._carry(block, decoding, entries)
            return [*terms, Term("compute", (0, 0, 0, attend, attend, carried), both)]
        hidden = 2 * (decoding + rows) * self.model.width * self._item * len(self.model.layers) / device.link_per_s
        link = weights / device.link_per_s
        there = rows * kv.prompt_flops / kv.prompt / device.flops + products
        return [
            *terms, Term("attention", (0, 0, 0, 0, attend, attend), 0), Term("link", (0, link, link, 0, 0, 0), hidden),
            Term("compute", (0, 0, 0, entries / device.memory_per_s, 0, 0), there),
        ]  # fmt: skip

    def _carry(self, block: BlockShape, decoding: int, entries: float) -> float:
        """Seconds in which KV of a disk goes to its pages and leaves them."""
        batches = ceil(decoding / min(decoding, block.micro_batch)) if decoding else 0
        return entries / CARRY_PER_S + batches * len(self.model.layers) * CARRY_S

    def _products(self, block: BlockShape, decoding: int, rows: float) -> float:
        """Seconds of all products of a sweep, and of what is called between them."""
        layers = 2 * sum(layer.parameters for layer in self.model.layers)
        head = 2 * self.model.head_parameters
        at_a_time = min(decoding, block.micro_batch)
        seconds = rows * layers / self._product_rate(rows) if rows else 0.0
        if decoding:
            seconds += decoding * layers / self._product_rate(at_a_time)
            seconds += decoding * head / self._product_rate(decoding)
        calls = (ceil(decoding / at_a_time) if decoding else 0) + (1 if rows else 0)
        return seconds + calls * len(self.model.layers) * CALL_S

    def _product_rate(self, rows: float) -> float:
        device = self.machine.accelerator
        return self._rate(rows) if device is None else device.flops

    def _rate(self, rows: float) -> float:
        return self.machine.rate("f32" if self.model.dtype is torch.float32 else "bf16", rows)

    # ------------------------------------------------------------------ bytes

    def bytes(self, block: BlockShape) -> dict[str, list[Term]]:
        """Bytes by tier, each purpose a term; what is allocated at the peak of a block."""
        model, kv = self.model, self.kv
        weights, near = float(model.layer_bytes), HOST if self.machine.accelerator is None else DEVICE
        held = float(block.sequences * (kv.mean if block.schedule == "diagonal" else kv.held))
        more, far = self._prompts_kv(block)
        free = float(self.kv.pools * self.kv.arena_bytes)
        found = {
            DEVICE: [Term("weights", (weights, 0, 0, 0, 0, 0), 0), Term("kv", (0, 0, 0, held, 0, 0), 0)],
            HOST: [Term("weights", (0, weights, 0, 0, 0, 0), 0), Term("kv", (0, 0, 0, more, held + more, 0), free)],
            DISK: [Term("weights", (0, 0, weights, 0, 0, 0), 0), Term("kv", (0, 0, 0, 0, 0, held), 0)],
        }  # fmt: skip
        beside = float(block.sequences * kv.far_held + far + N_SLOTS * SLOT_BYTES)
        found[HOST].append(Term("kv on its way", (0, 0, 0, 0, 0, beside), 0))
        found[near] += [Term(name, (0, 0, 0, 0, 0, 0), n) for name, n in self.step(block).by_purpose.items()]
        found[near].append(Term("embeddings and head", (0, 0, 0, 0, 0, 0), model.end_bytes))
        found[near].append(Term("slots", (0, 0, 0, 0, 0, 0), block.slots * model.slot_bytes))
        return found

    def step(self, block: BlockShape) -> StepMemory:
        """Bytes of the rows that pass a layer, and of logits, as the engine counts them."""
        return StepMemory.of(
            self.model, step_tokens=block.prompt_rows, running=block.sequences, micro_batch=block.micro_batch
        )

    def _prompts_kv(self, block: BlockShape) -> tuple[int, int]:
        """Bytes of prompts while they are read, beyond what they hold later: in memory, and of those on a disk."""
        kv = self.kv
        reading = min(block.sequences, ceil(block.prompt_rows / kv.prompt) + _READ_AT_A_TIME)
        return reading * (kv.most - kv.held), reading * (kv.far_most - kv.far_held)

    @property
    def _item(self) -> int:
        return int(self.model.dtype.itemsize)
