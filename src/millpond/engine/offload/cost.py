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


class BlockCourse(NamedTuple):
    """Sweeps of a block whose sequences are alike, and what one of them runs on average.

    Attributes:
        prefill: sweeps that read prompts; sequences whose prompts have ended decode in them. decode: sweeps after them.
        prompt_rows, pieces, ends: of a sweep that reads prompts: tokens, pieces of different prompts, and prompts that
            end. meanwhile: sequences that decode in it. decoding: in a sweep after them.
        again: tokens that earlier sweeps have read of the prompts of a sweep; from a disk their KV comes back.
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
def block_course(sequences: int, prompt: int, new: int, step_tokens: int) -> BlockCourse:
    """The sweeps of `sequences` prompts of `prompt` tokens, each with `new` tokens of answer, all there at once.

    Args:
        step_tokens: rows of a step while prompts are read. Those that decode are among them, but an eighth is left for
            prompts: see `Scheduler`.
    """
    few, total = max(step_tokens // READING_SHARE, 1), sequences * prompt
    ends: deque[int] = deque()  # the sweep in which a sequence decodes no more
    sweep = read = pieces = meanwhile = again = 0
    while read < total:
        while ends and ends[0] <= sweep:
            ends.popleft()
        first = read // prompt
        again += read % prompt
        read = min(read + max(step_tokens - len(ends), few), (first + MAX_PIECES) * prompt, total)
        pieces += (read - 1) // prompt - first + 1
        meanwhile += len(ends)
        ends.extend([sweep + new] * (read // prompt - first))
        sweep += 1
    rest = sum(end - sweep for end in ends)
    decode = new - 1
    return BlockCourse(
        prefill=sweep,
        decode=decode,
        prompt_rows=total / sweep,
        pieces=pieces / sweep,
        ends=sequences / sweep,
        meanwhile=meanwhile / sweep,
        decoding=rest / decode if decode else 0.0,
        again=again / sweep,
    )


#: Pages hold positions and scores besides keys and values, and are not full: more bytes than the entries alone.
_BESIDE_KV = 1.5


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Most bytes that a step takes, computed from the shapes of the layers.

    Attributes:
        by_purpose: "activations" and "logits". token_bytes: of a token's keys and values in all layers.
    """

    by_purpose: Mapping[str, int]
    token_bytes: int

    @classmethod
    def of(cls, model: ModelSize, *, step_tokens: int, running: int, micro_batch: int | None = None) -> StepMemory:
        """
        A step has at most `step_tokens` rows, or all that decode and a few of prompts. Activations are those of the
        feed-forward, which `LayerSize.row_bytes` counts, and the blocks of weights that are widened.

        Args:
            step_tokens: tokens of a step while prompts are read. running: sequences that decode. micro_batch: those of
                them that pass a layer at a time; None: all.
        """
        some = max(step_tokens // READING_SHARE, 1)
        passing = max(step_tokens, min(running, micro_batch or running) + some)
        rows, item = max(step_tokens, running + some), model.dtype.itemsize
        activations = passing * max(layer.row_bytes for layer in model.layers) + model.widening_bytes
        logits = min(running + MAX_PIECES, rows) * model.vocabulary * (item + 4)
        kv = sum(shape.n_kv_heads * (shape.key_dim + shape.value_dim) for shape in model.shapes)
        return cls({"activations": activations, "logits": logits}, kv * item)

    @property
    def nbytes(self) -> int:
        """Of all purposes."""
        return sum(self.by_purpose.values())

    def kv_bytes(self, n_tokens: int) -> int:
        """Bytes of the pages of a sequence of `n_tokens` tokens, none evicted."""
        return int(n_tokens * self.token_bytes * _BESIDE_KV)


#: Shares that are chosen: of weights and KV on each tier.
PLACES = ("weights device", "weights host", "weights disk", "kv device", "kv host", "kv disk")
#: Bytes per second of KV between a slot and its pages: checksum and copies, in the threads that read. An estimate.
CARRY_PER_S = 1e9
#: Seconds of a direct read of a row of the embeddings, which the calling thread waits for. An estimate.
ROW_READ_S = 1e-4
#: Prompts are read one after another; while the last tokens of one are read the next begins.
_READ_AT_A_TIME = 1


@dataclass(frozen=True, kw_only=True)
class BlockShape:
    """What a sweep runs, but for the shares.

    Attributes:
        sequences: that share a sweep. micro_batch: that pass a layer at a time. prompt_rows: prompt tokens in a sweep.
        slots: layers in memory of those that are read; 0 where none is. ends: where embeddings and head lie.
    """

    sequences: int
    micro_batch: int
    prompt_rows: int
    schedule: Schedule = "zigzag"
    slots: int = SLOTS
    ends: Ends = "host"


class Term(NamedTuple):
    """Seconds of one part of a sweep, or bytes of a purpose: coefficients of `PLACES`, and a constant.

    Attributes:
        with_disk: a constant more where any KV lies on a disk.
    """

    name: str
    shares: tuple[float, float, float, float, float, float]
    constant: float
    with_disk: float = 0.0

    def at(self, values: Mapping[str, float]) -> float:
        """What it comes to with these shares."""
        weighted = zip(PLACES, self.shares, strict=True)
        constant = self.constant + self.with_disk * (values.get("kv disk", 0.0) > 0)
        return constant + sum(coefficient * values.get(place, 0.0) for place, coefficient in weighted)


@dataclass(frozen=True)
class CostModel:
    """Times and bytes of a model with a workload on a machine."""

    model: ModelSize
    kv: KVSize
    machine: MachineConstants

    # ------------------------------------------------------------------ times

    def course(self, block: BlockShape) -> BlockCourse:
        """The sweeps of a block; where the schedule is diagonal all of them read prompts and decode."""
        prompt, new, sequences = self.kv.prompt, self.kv.new, block.sequences
        if block.schedule == "diagonal":
            rows = sequences * prompt / new
            ends = sequences / new
            again = prompt * max(1 - ends, 0.0) / 2  # of one prompt in equal pieces
            # the first and the last sequences run with fewer others for an answer's length, of several fillings
            return BlockCourse(0, new + -(-new // FILLINGS), rows, max(ends, 1.0), ends, 0.0, float(sequences), again)
        return block_course(sequences, prompt, new, block.prompt_rows)

    def prefill(self, block: BlockShape) -> list[Term]:
        """Seconds of one sweep that reads prompts, while those before decode; the longest counts."""
        course = self.course(block)
        return self._sweep(block, course.meanwhile, course, reading=True)

    def decode(self, block: BlockShape) -> list[Term]:
        """Seconds of one sweep that decodes; where the schedule is diagonal prompts are read in it too."""
        course = self.course(block)
        return self._sweep(block, course.decoding, course, reading=block.schedule == "diagonal")

    def _sweep(self, block: BlockShape, decoding: float, course: BlockCourse, *, reading: bool) -> list[Term]:
        """A sweep of sequences that decode, and of a course's prompts if some are read."""
        machine, kv, weights, n_layers = self.machine, self.kv, float(self.model.layer_bytes), len(self.model.layers)
        rows = course.prompt_rows if reading else 0.0
        ended = course.ends if reading else 0.0
        entries, added = decoding * kv.step_bytes, (decoding + rows) * kv.new_bytes
        settled = ended * kv.settles  # prompts that are planned, which reads them once more
        again = settled * kv.prompt_bytes
        moved = entries + again + (course.again * kv.prompt_bytes / kv.prompt if reading else 0.0)
        written = added + entries / MAX_PATCHES * kv.overwrites  # which waits in memory until it is worth a write
        written += settled * kv.kept_bytes
        write = written / machine.write_per_s if machine.write_per_s else 0.0
        attend = decoding * kv.step_flops / self._plain_rate(kv.group)
        batches = ceil(decoding / min(block.micro_batch, block.sequences))
        products = (decoding + rows) * 2 * self._parameters / self._product_rate((decoding + rows) / max(batches, 1))
        head = (decoding + ended) * 2 * self.model.head_parameters / self._product_rate(decoding + ended)
        prompts = rows * kv.prompt_flops / kv.prompt
        pieces = course.pieces if reading else 0.0

        def of_layer(calls: CallTimes, planned: float) -> float:
            decoded = batches * calls.layer_s + decoding * calls.sequence_s
            return decoded + pieces * calls.piece_s + planned * calls.prompt_s

        far = block.ends == DISK
        head_read = self.model.far_ends.head_bytes / machine.read_per_s if far else 0.0
        outside = head + machine.calls.step_s + (decoding + rows) * ROW_READ_S * far
        read = weights / machine.read_per_s
        idle = machine.calls.step_s if far else outside
        ahead = idle - min(block.slots, n_layers) * read / n_layers  # slots are full before all of it has passed
        terms = [
            Term("disk reads", (0, 0, read, 0, 0, moved / machine.read_per_s), max(ahead, 0.0) + head_read),
            Term("disk writes", (0, 0, 0, 0, 0, write), 0),
        ]
        device = machine.accelerator
        beside = n_layers * of_layer(machine.calls, ended * kv.evicts) + outside
        if device is None:
            busy = self._reading_cpu * machine.read_cpu_s
            carried = attend + moved * busy + (moved + written) / CARRY_PER_S
            carried += again / machine.read_per_s  # a plan waits for its layer, and nothing else is computed meanwhile
            carried += n_layers * of_layer(machine.disk_calls, settled)
            here = products + beside + prompts / machine.attention
            return [*terms, Term("compute", (0, 0, weights * busy, attend, attend, carried), here)]
        hidden = 2 * (decoding + rows) * self.model.width * self._item * n_layers / device.link_per_s
        link = weights / device.link_per_s
        there = prompts / device.flops + products + beside
        return [
            *terms,
            Term("attention", (0, 0, 0, 0, attend, attend), 0),
            Term("link", (0, link, link, 0, 0, 0), hidden),
            Term("compute", (0, 0, 0, entries / device.memory_per_s, 0, 0), there),
        ]

    @property
    def _parameters(self) -> int:
        """Of all layers."""
        return sum(layer.parameters for layer in self.model.layers)

    @property
    def _reading_cpu(self) -> float:
        """Share of what reading takes of a core that is lost to computing: none where a core is left."""
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
        """Bytes by tier, each purpose a term; what is allocated at the peak of a block."""
        model, kv = self.model, self.kv
        weights, near = float(model.layer_bytes), HOST if self.machine.accelerator is None else DEVICE
        held = float(block.sequences * (kv.mean if block.schedule == "diagonal" else kv.held))
        more, far, window = self._prompts_kv(block)
        free = float(self.kv.pools * self.kv.arena_bytes)
        found = {
            DEVICE: [Term("weights", (weights, 0, 0, 0, 0, 0), 0), Term("kv", (0, 0, 0, held, 0, 0), 0)],
            HOST: [Term("weights", (0, weights, 0, 0, 0, 0), 0), Term("kv", (0, 0, 0, more, held + more, 0), free)],
            DISK: [Term("weights", (0, 0, weights, 0, 0, 0), 0), Term("kv", (0, 0, 0, 0, 0, held), 0)],
        }
        layers_far = float(block.sequences * (kv.far_held - kv.window_held) + far)
        windows = float(block.sequences * kv.window_held + window + N_SLOTS * SLOT_BYTES)
        found[HOST].append(Term("kv on its way", (0, 0, 0, 0, 0, layers_far), 0, with_disk=windows))
        found[near] += [Term(name, (0, 0, 0, 0, 0, 0), n) for name, n in self.step(block).by_purpose.items()]
        far_ends, slots = model.far_ends, block.slots * model.slot_bytes
        nowhere = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        if block.ends == DISK:
            found[DISK].append(Term("embeddings and head", nowhere, far_ends.saved_bytes))
            found[near].append(Term("embeddings and head", nowhere, far_ends.held_bytes))
            slots += far_ends.row_room_bytes
        else:
            found[near].append(Term("embeddings and head", nowhere, model.end_bytes))
        found[near].append(Term("slots", nowhere, slots))
        return found

    def step(self, block: BlockShape) -> StepMemory:
        """Bytes of the rows that pass a layer, and of logits, as the engine counts them."""
        return StepMemory.of(
            self.model, step_tokens=block.prompt_rows, running=block.sequences, micro_batch=block.micro_batch
        )

    def _prompts_kv(self, block: BlockShape) -> tuple[int, int, int]:
        """Bytes of prompts while they are read, beyond what they hold later: in memory, and of those on a disk, by its
        layers and however few they are."""
        kv = self.kv
        reading = min(block.sequences, ceil(block.prompt_rows / kv.prompt) + _READ_AT_A_TIME)
        window = kv.window_most - kv.window_held
        return reading * (kv.most - kv.held), reading * (kv.far_most - kv.far_held - window), reading * window

    @property
    def _item(self) -> int:
        return int(self.model.dtype.itemsize)
