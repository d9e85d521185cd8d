"""Cost model of a sweep: its time, the steps of a block, and the bytes of each tier, linear in the shares."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import NamedTuple

import torch

from millpond.cache.tiered.disk_tier import N_SLOTS, SLOT_BYTES
from millpond.cache.tiered.write_back import MAX_PATCHES
from millpond.engine.diagonal_schedule import FILLINGS
from millpond.engine.offload.kv_size import KVSize
from millpond.engine.offload.machine import CallTimes, MachineConstants
from millpond.engine.offload.model_size import ModelSize
from millpond.engine.offload.plan import DEVICE, DISK, HOST, SLOTS, Ends, Schedule
from millpond.engine.scheduler import MAX_PIECES, READING_SHARE
from millpond.models.weights.streamed import N_THROUGH, THROUGH_BYTES


class BlockSweeps(NamedTuple):
    """Sweeps of a block whose sequences are alike, and what one of them runs on average.

    Attributes:
        prefill: Sweeps that read prompts; sequences whose prompts have ended decode in them.
        decode: Sweeps after them.
        prompt_rows: Tokens of a sweep that reads prompts.
        pieces: Pieces of different prompts in it.
        ends: Prompts that end in it.
        meanwhile: Sequences that decode in it.
        decoding: Sequences that decode in a sweep after them.
        again: Tokens that earlier sweeps have read of the prompts of a sweep; from a disk their KV is read again.
    """

    prefill: int
    decode: int
    prompt_rows: float
    pieces: float
    ends: float
    meanwhile: float
    decoding: float
    again: float


@lru_cache(maxsize=4096)
def block_sweeps(sequences: int, prompt: int, new: int, step_tokens: int) -> BlockSweeps:
    """Return the sweeps of `sequences` prompts, all waiting at once.

    Args:
        sequences: Number of prompts.
        prompt: Tokens of each prompt.
        new: Tokens of each answer.
        step_tokens: Rows of a step while prompts are read. Those that decode are among them, but an eighth is left for
            prompts: see `Scheduler`.
    """
    min_prompt_tokens, total = max(step_tokens // READING_SHARE, 1), sequences * prompt
    ends: deque[int] = deque()  # the sweep in which a sequence decodes no more
    sweep = read = pieces = meanwhile = again = 0
    while read < total:
        while ends and ends[0] <= sweep:
            ends.popleft()
        first = read // prompt
        again += read % prompt
        read = min(read + max(step_tokens - len(ends), min_prompt_tokens), (first + MAX_PIECES) * prompt, total)
        pieces += (read - 1) // prompt - first + 1
        meanwhile += len(ends)
        ends.extend([sweep + new] * (read // prompt - first))
        sweep += 1
    decode_steps = sum(end - sweep for end in ends)
    decode = new - 1
    return BlockSweeps(
        prefill=sweep,
        decode=decode,
        prompt_rows=total / sweep,
        pieces=pieces / sweep,
        ends=sequences / sweep,
        meanwhile=meanwhile / sweep,
        decoding=decode_steps / decode if decode else 0.0,
        again=again / sweep,
    )


#: Factor of the bytes of pages over those of entries: positions and scores besides keys and values, and free slots.
_PAGE_OVERHEAD = 1.5


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Most bytes that a step takes, computed from the shapes of the layers.

    Attributes:
        by_purpose: Bytes of "activations" and "logits".
        token_bytes: Bytes of a token's keys and values in all layers.
    """

    by_purpose: Mapping[str, int]
    token_bytes: int

    @classmethod
    def of(cls, model: ModelSize, *, step_tokens: int, running: int, micro_batch: int | None = None) -> StepMemory:
        """Compute the bytes of a step.

        A step has at most `step_tokens` rows, or all that decode and a few of prompts. Activations are those of the
        feed-forward, which `LayerSize.row_bytes` counts, and the blocks of weights that are widened.

        Args:
            model: Sizes of the model.
            step_tokens: Tokens of a step while prompts are read.
            running: Sequences that decode.
            micro_batch: Those of them that pass a layer at a time; None: all.
        """
        min_prompt_tokens = max(step_tokens // READING_SHARE, 1)
        passing = max(step_tokens, min(running, micro_batch or running) + min_prompt_tokens)
        rows, element_bytes = max(step_tokens, running + min_prompt_tokens), model.dtype.itemsize
        activations = passing * max(layer.row_bytes for layer in model.layers) + model.widening_bytes
        logits = min(running + MAX_PIECES, rows) * model.vocabulary * (element_bytes + 4)
        kv = sum(shape.n_kv_heads * (shape.key_dim + shape.value_dim) for shape in model.shapes)
        return cls({"activations": activations, "logits": logits}, kv * element_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes of all purposes."""
        return sum(self.by_purpose.values())

    def kv_bytes(self, n_tokens: int) -> int:
        """Return the bytes of the pages of a sequence of `n_tokens` tokens, none evicted."""
        return int(n_tokens * self.token_bytes * _PAGE_OVERHEAD)


#: Shares that a plan chooses: of weights and KV on each tier.
PLACES = ("weights device", "weights host", "weights disk", "kv device", "kv host", "kv disk")
#: Bytes per second of KV between a slot and its pages: checksum and copies, in the threads that read. An estimate.
CARRY_PER_S = 1e9
#: Seconds of a direct read of a row of the embeddings, which the calling thread waits for. An estimate.
ROW_READ_S = 1e-4
#: Prompts are read one after another; while the last tokens of one are read the next begins.
_READ_AT_A_TIME = 1


@dataclass(frozen=True, kw_only=True)
class BlockShape:
    """Shape of a sweep, without the shares.

    Attributes:
        sequences: Sequences that share a sweep.
        micro_batch: Sequences that pass a layer at a time.
        prompt_rows: Prompt tokens in a sweep.
        schedule: Order of micro-batches and layers, see `Plan`.
        slots: Layers in memory of those that are read; 0 where none is.
        ends: Tier of embeddings and head.
    """

    sequences: int
    micro_batch: int
    prompt_rows: int
    schedule: Schedule = "zigzag"
    slots: int = SLOTS
    ends: Ends = "host"


class Term(NamedTuple):
    """Seconds of one part of a sweep, or bytes of a purpose, linear in the shares.

    Attributes:
        name: Name of the part or purpose.
        shares: Coefficients of `PLACES`.
        constant: Constant.
        with_disk: A further constant where any KV is on a disk.
    """

    name: str
    shares: tuple[float, float, float, float, float, float]
    constant: float
    with_disk: float = 0.0

    def at(self, shares: Mapping[str, float]) -> float:
        """Return the term with these shares."""
        weighted = zip(PLACES, self.shares, strict=True)
        constant = self.constant + self.with_disk * (shares.get("kv disk", 0.0) > 0)
        return constant + sum(coefficient * shares.get(place, 0.0) for place, coefficient in weighted)


@dataclass(frozen=True)
class CostModel:
    """Times and bytes of a model with a workload on a machine.

    Attributes:
        model: Sizes of the model.
        kv: Sizes of the cache of a sequence.
        machine: Constants of the machine.
    """

    model: ModelSize
    kv: KVSize
    machine: MachineConstants

    # ------------------------------------------------------------------ times

    def sweeps(self, block: BlockShape) -> BlockSweeps:
        """Return the sweeps of a block.

        A diagonal schedule reads prompts and decodes in all of them.
        """
        prompt, new, sequences = self.kv.prompt, self.kv.new, block.sequences
        if block.schedule == "diagonal":
            rows = sequences * prompt / new
            ends = sequences / new
            again = prompt * max(1 - ends, 0.0) / 2  # of one prompt in equal pieces
            # the first and the last sequences run with fewer others for an answer's length, of several fillings
            return BlockSweeps(0, new + -(-new // FILLINGS), rows, max(ends, 1.0), ends, 0.0, float(sequences), again)
        return block_sweeps(sequences, prompt, new, block.prompt_rows)

    def prefill(self, block: BlockShape) -> list[Term]:
        """Return the seconds of one sweep that reads prompts; the longest term counts.

        Sequences that were read before decode in it.
        """
        sweeps = self.sweeps(block)
        return self._sweep(block, sweeps.meanwhile, sweeps, reading=True)

    def decode(self, block: BlockShape) -> list[Term]:
        """Return the seconds of one sweep that decodes.

        A diagonal schedule reads prompts in it too.
        """
        sweeps = self.sweeps(block)
        return self._sweep(block, sweeps.decoding, sweeps, reading=block.schedule == "diagonal")

    def _sweep(self, block: BlockShape, decoding: float, sweeps: BlockSweeps, *, reading: bool) -> list[Term]:
        """Return the terms of a sweep of decoding sequences, and of prompts if some are read."""
        machine, kv, weights, n_layers = self.machine, self.kv, float(self.model.layer_bytes), len(self.model.layers)
        rows = sweeps.prompt_rows if reading else 0.0
        ended = sweeps.ends if reading else 0.0
        entries, added = decoding * kv.step_bytes, (decoding + rows) * kv.new_bytes
        planned_prompts = ended * kv.settles  # prompts that are planned, which reads them once more
        reread = planned_prompts * kv.prompt_bytes
        moved = entries + reread + (sweeps.again * kv.prompt_bytes / kv.prompt if reading else 0.0)
        written = added + entries / MAX_PATCHES * kv.overwrites  # which waits in memory until it is worth a write
        written += planned_prompts * kv.kept_bytes
        write = written / machine.write_per_s if machine.write_per_s else 0.0
        attend = decoding * kv.step_flops / self._plain_rate(kv.group)
        batches = ceil(decoding / min(block.micro_batch, block.sequences))
        products = (decoding + rows) * 2 * self._parameters / self._product_rate((decoding + rows) / max(batches, 1))
        head = (decoding + ended) * 2 * self.model.head_parameters / self._product_rate(decoding + ended)
        prompts = rows * kv.prompt_flops / kv.prompt
        pieces = sweeps.pieces if reading else 0.0

        def layer_seconds(calls: CallTimes, planned: float) -> float:
            decoded = batches * calls.layer_s + decoding * calls.sequence_s
            return decoded + pieces * calls.piece_s + planned * calls.prompt_s

        ends_on_disk = block.ends == DISK
        head_read = self.model.ends_on_disk.head_bytes / machine.read_per_s if ends_on_disk else 0.0
        outside = head + machine.calls.step_s + (decoding + rows) * ROW_READ_S * ends_on_disk
        read = weights / machine.read_per_s
        idle = machine.calls.step_s if ends_on_disk else outside
        waiting_s = idle - min(block.slots, n_layers) * read / n_layers  # slots are full before all of it has passed
        terms = [
            Term("disk reads", (0, 0, read, 0, 0, moved / machine.read_per_s), max(waiting_s, 0.0) + head_read),
            Term("disk writes", (0, 0, 0, 0, 0, write), 0),
        ]
        device = machine.accelerator
        besides_s = n_layers * layer_seconds(machine.calls, ended * kv.evicts) + outside
        if device is None:
            busy = self._reading_cpu * machine.read_cpu_s
            carried = attend + moved * busy + (moved + written) / CARRY_PER_S
            carried += reread / machine.read_per_s  # a plan waits for its layer, and nothing else is computed meanwhile
            carried += n_layers * layer_seconds(machine.disk_calls, planned_prompts)
            host_s = products + besides_s + prompts / machine.attention
            return [*terms, Term("compute", (0, 0, weights * busy, attend, attend, carried), host_s)]
        link = weights / device.link_per_s
        past = max(1.0 - rows / kv.prompt, 0.0)  # the share of a prompt's pairs whose keys were read in a sweep before
        crossing = (decoding + rows) * self._crossing_bytes / device.link_per_s
        on_host = crossing + attend + past * prompts / machine.attention
        on_disk = on_host + moved * self._reading_cpu * machine.read_cpu_s + (moved + written) / CARRY_PER_S
        on_disk += reread / machine.read_per_s + n_layers * layer_seconds(machine.disk_calls, planned_prompts)
        device_s = prompts / device.flops + max(products, weights / device.memory_per_s) + besides_s
        return [
            *terms,
            Term("link", (0, link, link, 0, 0, 0), 0),
            # a layer waits for its attention, wherever that is: both sides take turns
            Term("compute", (0, 0, 0, entries / device.memory_per_s, on_host, on_disk), device_s),
        ]

    @property
    def _crossing_bytes(self) -> int:
        """Bytes of a token's queries, keys and values that go down, and of outputs that come up, of all layers."""
        return self._item * sum(
            (shape.n_queries + shape.n_kv_heads) * (shape.key_dim + shape.value_dim) for shape in self.model.shapes
        )

    @property
    def _parameters(self) -> int:
        """Numbers of the matrices of all layers."""
        return sum(layer.parameters for layer in self.model.layers)

    @property
    def _reading_cpu(self) -> float:
        """Share of a core's reading time that computing loses: none where a core is left."""
        return 1 / self.machine.threads if self.machine.threads >= self.machine.cores else 0.0

    def _product_rate(self, rows: float) -> float:
        device = self.machine.accelerator
        if device is not None:
            return device.flops
        return self.machine.rate(self.model.weights or self._dtype, max(rows, 1))

    def _plain_rate(self, rows: float) -> float:
        return self.machine.rate(self._dtype, max(rows, 1))

    @property
    def _dtype(self) -> str:
        return "f32" if self.model.dtype is torch.float32 else "bf16"

    # ------------------------------------------------------------------ bytes

    def bytes(self, block: BlockShape) -> dict[str, list[Term]]:
        """Return the bytes by tier, each purpose a term; those allocated at the peak of a block."""
        model, kv = self.model, self.kv
        weights, compute_tier = float(model.layer_bytes), HOST if self.machine.accelerator is None else DEVICE
        held = float(block.sequences * (kv.mean if block.schedule == "diagonal" else kv.held))
        prompts_kv, disk_prompts_kv, prompts_window = self._prompts_kv(block)
        arena_slack = float(self.kv.pools * self.kv.arena_bytes)
        by_tier = {
            DEVICE: [
                Term("weights", (weights, 0, 0, 0, 0, 0), 0),
                Term("kv", (0, 0, 0, held + prompts_kv, 0, 0), arena_slack * (compute_tier == DEVICE)),
            ],
            HOST: [
                Term("weights", (0, weights, 0, 0, 0, 0), 0),
                Term("kv", (0, 0, 0, 0, held + prompts_kv, 0), arena_slack),
            ],
            DISK: [Term("weights", (0, 0, weights, 0, 0, 0), 0), Term("kv", (0, 0, 0, 0, 0, held), 0)],
        }
        disk_layers = float(block.sequences * (kv.far_held - kv.window_held) + disk_prompts_kv)
        windows = float(block.sequences * kv.window_held + prompts_window + N_SLOTS * SLOT_BYTES)
        by_tier[HOST].append(Term("kv on its way", (0, 0, 0, 0, 0, disk_layers), 0, with_disk=windows))
        by_tier[compute_tier] += [Term(name, (0, 0, 0, 0, 0, 0), n) for name, n in self.step(block).by_purpose.items()]
        ends_on_disk, slots = model.ends_on_disk, block.slots * model.slot_bytes
        no_shares = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        if block.ends == DISK:
            by_tier[DISK].append(Term("embeddings and head", no_shares, ends_on_disk.saved_bytes))
            by_tier[compute_tier].append(Term("embeddings and head", no_shares, ends_on_disk.held_bytes))
            slots += ends_on_disk.row_room_bytes
        else:
            by_tier[compute_tier].append(Term("embeddings and head", no_shares, model.end_bytes))
        by_tier[compute_tier].append(Term("slots", no_shares, slots))
        if compute_tier == DEVICE:  # as it is taken in `open_on_device`
            by_tier[HOST].append(Term("attention", no_shares, self.step(block).nbytes))
            by_tier[HOST].append(Term("slots", no_shares, N_THROUGH * THROUGH_BYTES))
        return by_tier

    def step(self, block: BlockShape) -> StepMemory:
        """Return the bytes of the rows that pass a layer, and of logits, as in the engine."""
        return StepMemory.of(
            self.model, step_tokens=block.prompt_rows, running=block.sequences, micro_batch=block.micro_batch
        )

    def _prompts_kv(self, block: BlockShape) -> tuple[int, int, int]:
        """Return bytes of prompts that are being read, beyond what they hold later.

        First in memory; then of those on a disk, by its layers, and however few these are.
        """
        kv = self.kv
        reading = min(block.sequences, ceil(block.prompt_rows / kv.prompt) + _READ_AT_A_TIME)
        window = kv.window_most - kv.window_held
        return reading * (kv.most - kv.held), reading * (kv.far_most - kv.far_held - window), reading * window

    @property
    def _item(self) -> int:
        return int(self.model.dtype.itemsize)
