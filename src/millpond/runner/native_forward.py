"""Native forward pass without the model's modules, and its decoding steps recorded as graphs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor
from transformers import PreTrainedModel

from millpond.errors import UnsupportedModelError
from millpond.kernels import ops
from millpond.kernels.args import AttentionShape, PrefillArgs
from millpond.kernels.cuda_graphs import record_cuda, recording
from millpond.kernels.decoder_ops import TOLERANCE, FixedOrder, NativeDense, choose
from millpond.kernels.thread_count import torch_on_one_thread
from millpond.models.lean.block import Attend
from millpond.models.lean.decode_graph import DecodeGraph
from millpond.models.lean.decoder import Decoder, GivenRows, StreamedBlocks
from millpond.models.lean.describe import describe, in_file, moving, watch
from millpond.models.lean.fuse import code_bytes, quantized, release
from millpond.models.lean.trial import attend_all, try_out
from millpond.models.lean.watch import Watch, own_forward
from millpond.runner.packed_cache import LayerAttend, SegmentedAttention

#: Passes after which weights that lie in a mapped file begin to move, a layer in each: a copy into huge pages makes a
#: pass faster by less than a hundredth of what it costs, so that who asks little is served from the file.
PASSES_IN_FILE = 64
#: Who runs through the weights of a model.
_users: weakref.WeakKeyDictionary[PreTrainedModel, weakref.WeakSet[NativeForward]] = weakref.WeakKeyDictionary()


class NativeForward:
    """Pass of packed rows through a model's weights; layers that read the same rows are fused.

    Weights that lie in a mapped file are fused and moved after `PASSES_IN_FILE` passes, unless another runs through
    them too: until then memory holds them once, and loading copies nothing.

    Args:
        model: Decoder that owns the weights.
        shapes: What the attention of each layer does, complete after a pass.
        run: A pass of the modules, run(ids, positions, attend) -> logits of all tokens.
        streamed: Layers whose weights are read while the model runs; None: all are in memory.
        bits: 4 or 8: after the trial the matrices become codes of that width, and those of the modules are emptied.
        deterministic: Each row gets the bits that it has alone, see `Decoder.fixed_order`.

    Raises:
        UnsupportedModelError: the model is of another family, or a part of it gives something else than ours; or its
            rows cannot have a fixed order.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        shapes: Mapping[int, AttentionShape],
        run: Callable[[Tensor, Tensor, LayerAttend], Tensor],
        streamed: StreamedBlocks | None = None,
        bits: int | None = None,
        deterministic: bool = False,
    ) -> None:
        if any(own_forward(module) is not None for module in model.modules()):
            raise UnsupportedModelError(f"a module of {type(model).__name__} has a forward of its own")
        mapped = streamed is None and in_file(model.parameters())
        described = describe(model, streamed, move=not mapped and bits is None)
        self._shapes: Sequence[AttentionShape] = ()
        self._decoder, self._layers = described.decoder, described.layers
        self._watch: Watch | None = described.watch
        self._name = type(model).__name__
        if not self.ready():
            raise UnsupportedModelError(f"{self._name} has hooks, or trains; remove them, or call model.eval()")
        if model.dtype not in TOLERANCE:
            raise UnsupportedModelError(f"{self._name} computes in {model.dtype}")

        def run_modules(ids: Tensor, positions: Tensor) -> Tensor:
            return run(ids, positions, attend_all)

        def found() -> Sequence[AttentionShape]:
            for index in range(len(self._layers)):
                if index not in shapes:
                    raise UnsupportedModelError(f"layer {index} of {self._name} hands no keys and values to its cache")
            self._shapes = [shapes[index] for index in range(len(self._layers))]
            return self._shapes

        try_out(self._decoder, self._layers, self._name, run_modules, found, model.device)
        if bits is not None:
            self._decoder, self._watch = quantized(self._decoder, bits), None
            release(model, self._decoder)
        if deterministic:
            self._decoder = replace(self._decoder, fixed_order=True)
            if not isinstance(self._decoder.ops(1), NativeDense):
                raise UnsupportedModelError(
                    f"deterministic=True needs the native kernels: {self._name} is in {model.dtype} on {model.device}, "
                    "they compute in float32, bfloat16 and float16 on a CPU, and not with MILLPOND_KERNELS=reference"
                )

        self._passes = 0
        self._moving: Iterator[Decoder] | None = None
        if mapped and bits is None:
            self._moving = moving(model, self._decoder, self._layers)
        self._model = weakref.ref(model)
        _users.setdefault(model, weakref.WeakSet()).add(self)
        self._graph: DecodeGraph | None = None
        resident = streamed is None or streamed.resident
        if model.device.type == "cuda" and resident and recording():
            self._graph = DecodeGraph(self._decoder.forward, record_cuda)

    @property
    def graph(self) -> DecodeGraph | None:
        """Recorded decoding steps; None: each is launched."""
        return self._graph

    @property
    def code_bytes(self) -> int:
        """Bytes of matrices in codes; 0 where none is."""
        return 0 if self._watch is not None else code_bytes(self._decoder)

    def ready(self) -> bool:
        """Whether the modules may be bypassed.

        They may if they have no hooks and their weights are those of this pass. Modules that were emptied cannot run,
        so they always are.
        """
        return self._watch is None or self._watch.unchanged()

    def forward(
        self, ids: Tensor, positions: Tensor, split: SegmentedAttention, rows: Tensor, given: GivenRows | None = None
    ) -> Tensor:
        """Return logits (n, vocabulary) of some rows of a packed pass.

        Where native kernels compute, torch's small loops between them run on this thread alone.

        Args:
            ids: Ids of the tokens, (N,).
            positions: Positions of the tokens in their texts, (N,).
            split: Attention of each segment of the rows.
            rows: Rows whose logits are needed, (n,).
            given: Rows whose embeddings are given; None: all are looked up.
        """
        self._move_on()
        natively = isinstance(self._decoder.ops(len(ids)), NativeDense | FixedOrder)
        with torch_on_one_thread() if natively else nullcontext():
            if given is not None:
                return self._in_layers(ids, positions, split, rows, given)
            return self._forward(ids, positions, split, rows)

    def _forward(self, ids: Tensor, positions: Tensor, split: SegmentedAttention, rows: Tensor) -> Tensor:
        layers = self._decoder.in_one_call(len(ids)) if len(rows) == len(ids) else None
        fused = layers is not None or (self._graph is not None and len(rows) == len(ids))
        steps = split.steps(self._shapes, changes_basis=layers is None) if fused else None
        if steps is None:
            return self._in_layers(ids, positions, split, rows)
        if layers is not None:
            logits, lse = self._decoder.step(ids, positions, layers, steps.regions())
        else:
            assert self._graph is not None, "one of the two"
            logits, lse = self._graph.step(ids, positions, steps.regions(), steps.bases())
        steps.end(lse)
        return logits

    def _in_layers(
        self, ids: Tensor, positions: Tensor, split: SegmentedAttention, rows: Tensor, given: GivenRows | None = None
    ) -> Tensor:
        """Run the layers one after another; arguments are those of `forward`."""
        give_hidden = split.give_hidden if split.reads_hidden else None
        attend = self._by_rows(split.rows)
        return self._decoder.forward(ids, positions, attend, rows, split.narrow, given, give_hidden)

    def _move_on(self) -> None:
        """Move the next part of the weights out of the file after enough passes read them there."""
        model = self._model()
        if self._moving is None or model is None or len(_users[model]) > 1:
            return
        self._passes += 1
        if self._passes <= PASSES_IN_FILE:
            return
        moved = next(self._moving, None)
        if moved is None:
            self._moving = None
        else:
            self._decoder, self._watch = moved, watch(model, self._layers)

    def keys_of_second_layer(self, ids: Tensor) -> Tensor:
        """Return the second layer's keys (n_kv_heads, n, key_dim) after RoPE, for ids (n,)."""
        keys: list[Tensor] = []
        positions = torch.arange(len(ids), device=ids.device)
        places = positions.to(torch.int32)

        def attend(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys.append(k.transpose(0, 1).clone())
            if index:
                return q.new_zeros(len(q), q.shape[1] * v.shape[-1])
            q, k, v = (t.transpose(0, 1) for t in (q, k, v))
            return ops.prefill(PrefillArgs(q, k, v, places, self._shapes[0])).out.transpose(0, 1).reshape(len(ids), -1)

        x = self._decoder.embed(ids, positions)
        rotary, dense = self._decoder.angles(x, positions), choose(x)
        for block in islice(self._decoder.blocks, 2):
            x = block.forward(x, rotary, attend, dense)
        return keys[1]

    def _by_rows(self, attend: LayerAttend) -> Attend:
        def by_rows(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(index, q, k, v, self._shapes[index]).reshape(q.shape[0], -1)

        return by_rows
