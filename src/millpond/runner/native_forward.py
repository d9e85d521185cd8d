"""Native forward pass without the model's modules, and its decoding steps recorded as graphs."""

from __future__ import annotations

import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from millpond.codec.basis import Basis
from millpond.errors import UnsupportedModelError
from millpond.kernels import ops
from millpond.kernels.args import AttentionShape, DecodeArgs, PrefillArgs, StepRegions
from millpond.kernels.cuda_graphs import GraphRecorder, StepInputs, key_of, record_cuda, recording, roomy, same_key
from millpond.kernels.decoder_ops import TOLERANCE, FixedOrder, NativeDense, choose, turned
from millpond.kernels.thread_count import torch_on_one_thread
from millpond.models.lean.block import Angles, Attend, TurningAttend
from millpond.models.lean.decoder import Decoder, GivenRows, StreamedBlocks
from millpond.models.lean.describe import describe, in_file, moving, watch
from millpond.models.lean.fuse import code_bytes, quantized, release
from millpond.models.lean.watch import Watch, own_forward
from millpond.runner.packed_cache import LayerAttend, SegmentedAttention

#: Graphs that are kept, of other numbers of sequences, widths of tables, methods or pools.
MAX_GRAPHS = 24
#: Steps back that are looked at for one that is alike: two where the number of sequences goes to and fro.
LOOK_BACK = 2

#: Runs rows through all layers: forward(ids (S,), positions (S,), attend, rows (S,)) -> logits (S, vocabulary).
Forward = Callable[[Tensor, Tensor, TurningAttend, Tensor], Tensor]


@dataclass(slots=True)
class _Graph:
    key: tuple[Any, ...]
    inputs: StepInputs
    ids: Tensor
    positions: Tensor
    replay: Callable[[], None]
    outputs: list[tuple[Tensor, Tensor]]  #: one: of the step that was recorded


class DecodeGraph:
    """Decoding steps of all layers, each sequence with one token.

    A step is recorded where one just before had about as many sequences in the same pools under the same rules. It is
    replayed for such steps from then on, whatever their sequences are: a graph has rows and page tables of `roomy`
    sizes, so that few are made while sequences come, grow and go.

    Args:
        forward: Forward pass of the decoder.
        record: Makes a graph of a step.

    Attributes:
        recorded: Number of graphs that were made.
        replayed: Number of steps that they ran.
    """

    def __init__(self, forward: Forward, record: GraphRecorder) -> None:
        self._forward, self._record = forward, record
        self._seen: deque[tuple[Any, ...] | None] = deque(maxlen=LOOK_BACK)
        self._graphs: OrderedDict[int, _Graph] = OrderedDict()
        self.recorded = self.replayed = 0

    def step(
        self, ids: Tensor, positions: Tensor, regions: Sequence[StepRegions], bases: Sequence[Basis | None]
    ) -> tuple[Tensor, Tensor]:
        """Return logits (S, vocabulary) and log-sum-exp (layers, S, n_heads) of the newest tokens.

        Args:
            ids: Ids of the tokens, (S,).
            positions: Positions of the tokens, (S,).
            regions: Entries that each layer attends to; written, as by `ops.decode`.
            bases: Basis of the entries of each layer.
        """
        key = _key_of(regions, bases)
        alike = key is not None and any(seen is not None and same_key(key, seen) for seen in self._seen)
        self._seen.append(key)
        graph = None if key is None else self._graph_of(key, regions)
        if graph is None and alike:
            assert key is not None, "alike"
            graph = self._make(key, ids, positions, regions, bases)
        if graph is None:
            return self._compute(ids, positions, regions, bases)
        n = len(ids)
        graph.inputs.take(regions)
        graph.ids[:n].copy_(ids)
        graph.positions[:n].copy_(positions)
        graph.replay()
        self.replayed += 1
        graph.inputs.give_back(regions)
        logits, lse = graph.outputs[-1]
        return logits[:n].clone(), lse[:, :n]

    @property
    def nbytes(self) -> int:
        """Bytes of what graphs read and return, besides weights, pages and memory that they share."""
        return sum(
            graph.inputs.nbytes + sum(t.nbytes for t in (graph.ids, graph.positions, *graph.outputs[-1]))
            for graph in self._graphs.values()
        )

    def _graph_of(self, key: tuple[Any, ...], regions: Sequence[StepRegions]) -> _Graph | None:
        """Return the graph that was made for such steps, the narrowest whose tables fit."""
        fitting = [
            number for number, graph in self._graphs.items() if same_key(key, graph.key) and graph.inputs.holds(regions)
        ]
        if not fitting:
            return None
        number = min(fitting, key=lambda number: self._graphs[number].inputs.width)
        self._graphs.move_to_end(number)
        return self._graphs[number]

    def _make(
        self,
        key: tuple[Any, ...],
        ids: Tensor,
        positions: Tensor,
        regions: Sequence[StepRegions],
        bases: Sequence[Basis | None],
    ) -> _Graph:
        while len(self._graphs) >= MAX_GRAPHS:
            self._graphs.popitem(last=False)
        inputs = StepInputs(regions, _rows_of(regions))
        own_ids, own_positions = (t.new_zeros(inputs.n_seq) for t in (ids, positions))
        outputs: list[tuple[Tensor, Tensor]] = []

        def work() -> None:
            outputs[:] = [self._compute(own_ids, own_positions, inputs.regions, bases)]

        graph = _Graph(key, inputs, own_ids, own_positions, self._record(work, ids.device), outputs)
        self.recorded += 1
        self._graphs[self.recorded] = graph
        return graph

    def _compute(
        self, ids: Tensor, positions: Tensor, regions: Sequence[StepRegions], bases: Sequence[Basis | None]
    ) -> tuple[Tensor, Tensor]:
        sums: list[Tensor] = []

        def attend(index: int, q: Tensor, k: Tensor, v: Tensor, angles: Angles | None) -> Tensor:
            basis, args = bases[index], DecodeArgs(q, k, v, regions[index], angles)
            if basis is not None:
                args = turned(args)
                q, k, v = (t[:, :, 0] for t in basis.stored(args.q[:, :, None], args.k_new[:, :, None], v[:, :, None]))
                args = replace(args, q=q, k_new=k, v_new=v)
            decoded = ops.decode(args)
            sums.append(decoded.lse)
            out = decoded.out if basis is None else basis.values(decoded.out)
            return out.reshape(len(q), -1)

        logits = self._forward(ids, positions, TurningAttend(attend), torch.arange(len(ids), device=ids.device))
        return logits, torch.stack(sums)


def _key_of(regions: Sequence[StepRegions], bases: Sequence[Basis | None]) -> tuple[Any, ...] | None:
    """Return what `key_of` does, with a graph's rows for the sequences, and the bases."""
    key = key_of(regions)
    if key is None:
        return None
    (_, *numbers), *fixed = key
    turned = [basis is not None and basis.hadamard for basis in bases]
    scales = (None if basis is None else basis.scales for basis in bases)
    return [_rows_of(regions), *numbers, *turned], *fixed, *scales


def _rows_of(regions: Sequence[StepRegions]) -> int:
    """Return a graph's rows for such steps: as many as now where formats know each one."""
    n = len(regions[0].q_pos)
    own = any(one.packed is not None and one.packed.knows_regions for one in regions)
    return n if own else roomy(n)


#: Where the tokens of the trial stand in their text.
_PLACES = (0, 1, 5)
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
        self._try_out(model.device, run, shapes)
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

    def _try_out(
        self,
        device: torch.device,
        run: Callable[[Tensor, Tensor, LayerAttend], Tensor],
        shapes: Mapping[int, AttentionShape],
    ) -> None:
        """Give every part what the modules gave theirs, a few tokens, and compare the outputs.

        Layers that are built alike run the same kernels, so the first of them is tried out as of many rows, too.

        Raises:
            UnsupportedModelError: something else.
        """
        decoder = self._decoder
        positions = torch.tensor(_PLACES, device=device)
        ids = torch.arange(1, 1 + len(_PLACES), device=device) * (len(decoder.tokens) - 1) // len(_PLACES)
        seen: list[tuple[Tensor, Tensor]] = []
        hooks = [layer.register_forward_hook(_noting(seen), with_kwargs=True) for layer in self._layers]
        try:
            logits = run(ids, positions, _attend)
        finally:
            for hook in hooks:
                hook.remove()
        for index in range(len(self._layers)):
            if index not in shapes:
                raise UnsupportedModelError(f"layer {index} of {self._name} hands no keys and values to its cache")
        self._shapes = [shapes[index] for index in range(len(self._layers))]
        first, last = seen[0][0], seen[-1][1]
        self._compare("the embeddings", decoder.embed(ids, positions), first, first)
        rotary, attend = decoder.angles(first, positions), self._by_rows(_attend)
        builds: set[tuple[Any, ...]] = set()
        for block, (before, behind) in zip(decoder.blocks, seen, strict=True):
            for few in (True,) if block.build in builds else (True, False):
                actual = block.forward(before.clone(), rotary, attend, choose(before, few))
                self._compare(f"layer {block.index}", actual, behind, behind - before)
            builds.add(block.build)
        self._compare("the head", decoder.logits(last), logits, logits)

    def _compare(self, part: str, actual: Tensor, expected: Tensor, size: Tensor) -> None:
        rounding = 2 * torch.finfo(actual.dtype).eps * expected.abs()  # of the sums that are stored
        if actual.shape != expected.shape or not bool(
            ((actual - expected).abs() - rounding <= TOLERANCE[actual.dtype] * size.abs().max()).all()
        ):
            raise UnsupportedModelError(f"{part} of {self._name} computes something else than its family does")


def _noting(seen: list[tuple[Tensor, Tensor]]) -> Callable[..., None]:
    """Return a hook that records the input and the output of a layer, (N, width) each."""

    def note(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        before = args[0] if args else kwargs["hidden_states"]
        behind = output[0] if isinstance(output, tuple) else output
        seen.append((before[0], behind[0]))

    return note


def _attend(index: int, q: Tensor, k: Tensor, v: Tensor, shape: AttentionShape) -> Tensor:
    """Return attention of the trial tokens over themselves."""
    positions = torch.tensor(_PLACES, dtype=torch.int32, device=q.device)
    q, k, v = (t.transpose(0, 1) for t in (q, k, v))
    return ops.prefill(PrefillArgs(q, k, v, positions, shape)).out.transpose(0, 1)
