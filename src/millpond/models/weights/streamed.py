"""Layers whose weights are read from their files while the layers before them are computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from millpond.errors import DataError, unknown
from millpond.kernels.linear import BLOCK
from millpond.kernels.quantized_weight import QuantizedWeight, Weight
from millpond.models.lean.block import Block
from millpond.models.lean.decoder import EmbeddingSource, EndMatrix, HeadSource
from millpond.models.lean.fuse import in_place, take_codes
from millpond.models.lean.layers import block_of
from millpond.models.weights.layout import FileRun
from millpond.models.weights.on_disk import EndsOnDisk, RowRange, TiledHead, TokenRows
from millpond.models.weights.sizes import PartLayout, WeightSizes
from millpond.models.weights.skeleton import Skeleton, with_parameters
from millpond.tiers.buffers import Slot, aligned_buffer
from millpond.tiers.devices import Arrival, Device, DeviceLoader
from millpond.tiers.files import DirectFile
from millpond.tiers.free_memory import GivingBack
from millpond.tiers.ledger import Ledger
from millpond.tiers.loader import Backend, Extent, Loader, Ticket
from millpond.tiers.threads import ThreadBackend


@contextmanager
def computing_with(matrices: Iterable[tuple[Any, EndMatrix]]) -> Iterator[None]:
    """Let linear layers and embeddings compute with the numbers of these matrices, by torch.

    Args:
        matrices: Modules, each with its matrix.
    """
    changed: list[Any] = []
    try:
        for module, matrix in matrices:
            forward: Callable[..., Tensor] = _embedding if isinstance(module, nn.Embedding) else _linear
            changed.append(module)
            module.forward = partial(forward, module, matrix)
        yield
    finally:
        for module in changed:
            del module.forward


def _linear(module: nn.Linear, matrix: QuantizedWeight | HeadSource, x: Tensor) -> Tensor:
    if isinstance(matrix, QuantizedWeight):
        return _multiply(x, matrix, module.bias)
    return matrix.product(x.flatten(0, -2), module.bias, _multiply).view(*x.shape[:-1], -1)


def _embedding(module: nn.Embedding, matrix: QuantizedWeight | EmbeddingSource, ids: Tensor) -> Tensor:
    return matrix.take(ids.flatten()).view(*ids.shape, -1)


def _multiply(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """Return the output of a linear layer by torch; of codes in float32, some rows at a time."""
    if isinstance(weight, Tensor):
        return functional.linear(x, weight, bias)
    step, wide = max(1, BLOCK // weight.shape[1]), x.float()
    matrices = (weight.rows(begin, begin + step).widen(torch.float32) for begin in range(0, len(weight), step))
    outputs = torch.cat([functional.linear(wide, matrix) for matrix in matrices], -1)
    return (outputs if bias is None else outputs + bias).to(x.dtype)


#: When packed parts are compared with their checksums.
Verify = Literal["first", "always"]
#: Slots of the host that weights pass on their way from a disk to a device, and bytes of each.
N_THROUGH, THROUGH_BYTES = 2, 4 << 20


class StreamedLayers:
    """Layers of a model as blocks, in order, each only while its weights are in memory.

    Args:
        skeleton: Model without its weights.
        sizes: Layouts of the buffers of ends and layers.
        ledger: Ledger that all buffers are taken of, from the tier "host", and of a device from "device".
        kept: Layers that stay in the host's memory.
        n_slots: Streamed layers that are in memory at a time.
        backend: Backend that reads; None for one thread.
        overlap: Read the layers ahead while one is computed.
        open_file: Opens a file of weights.
        verify: Compare packed parts with their checksums when they are read for the "first" time, or "always".
        device: Device that computes the layers; None for the host. With a device the slots are there, layers that are
            kept are copied to them, and those `on_device` stay there, with what is outside the layers.
        on_device: Layers among the kept ones that stay on the device.
        ends_on_disk: The head is read in tiles after the layers of a sweep, and of embeddings the rows that are looked
            up; else both stay in memory.
        pack: Fills the buffer of what stays in memory if that is in no file: the ends and all layers.

    Attributes:
        model: Model whose parameters outside the layers are in memory, those of the layers on "meta".
        bytes_read: Bytes read from files so far.
        row_bytes_read: Bytes of these for embeddings that were looked up.
        nbytes: Bytes of weights in memory, with the slots.
        resident: Whether all layers stay in memory.
        head: Last matrix in codes or read from a file; None if it is a parameter of the model.
        tokens: Embeddings, likewise.

    Raises:
        BudgetError: the ledger has too few bytes.
        DataError: a file cannot be read. OptionError: no such `verify`.
    """

    def __init__(
        self,
        skeleton: Skeleton,
        sizes: WeightSizes,
        ledger: Ledger,
        *,
        kept: Iterable[int] = (),
        n_slots: int = 2,
        backend: Backend | None = None,
        overlap: bool = True,
        open_file: Callable[[Path], Any] = DirectFile,
        verify: Verify = "first",
        device: Device | None = None,
        on_device: Iterable[int] = (),
        ends_on_disk: bool = False,
        pack: Callable[[PartLayout, Tensor], None] | None = None,
    ) -> None:
        check_verify(verify)
        self.model: PreTrainedModel = skeleton.model
        self.bytes_read = self.row_bytes_read = 0
        self.head: QuantizedWeight | HeadSource | None = None
        self.tokens: QuantizedWeight | EmbeddingSource | None = None
        self._pack = pack
        self._always, self._verified = verify == "always", set[int]()
        self._ends: list[tuple[Any, EndMatrix]] = []  # modules outside the layers, with their matrices
        self._modules, self._layouts = skeleton.layers, sizes.layers
        far = sizes.ends_on_disk if ends_on_disk else None
        self._tiles = sizes.tiles if ends_on_disk else ()
        kept, on_device = sorted(kept), sorted(on_device)
        stays = kept if device is None else on_device
        self._streamed = [index for index in range(len(sizes.layers)) if index not in stays]
        self.resident = not self._streamed
        self._streamed += range(len(sizes.layers), len(sizes.layers) + len(self._tiles))  # tiles are read as layers are
        n_slots = min(n_slots, len(self._streamed))
        near = "host" if device is None else device.tier.name
        self._holdings = [ledger.take(near, "weights", sizes.kept_bytes(stays, ends_on_disk=ends_on_disk))]
        if far is not None:
            self._holdings.append(ledger.take("host", "slots", far.row_room_bytes))
        if n_slots:
            self._holdings.append(ledger.take(near, "slots", n_slots * sizes.slot_bytes))
        if device is not None:
            host = sizes.kept_bytes(kept) - sizes.kept_bytes(())
            self._holdings.append(ledger.take("host", "weights", host))
            self._holdings.append(ledger.take("host", "slots", N_THROUGH * THROUGH_BYTES))
        self.nbytes = sum(holding.nbytes for holding in self._holdings)
        self._files: dict[Path, Any] = {}
        self._open_file, self._overlap = open_file, overlap
        self._loader, self._freed = Loader(backend or ThreadBackend()), GivingBack()
        self._device, self._to_device = device, None
        self._free = [Slot(self._near(sizes.slot_bytes)) for _ in range(n_slots)]
        self._pending: deque[tuple[int, Ticket | Arrival]] = deque()
        self._in_use: Slot | None = None
        self._blocks: dict[tuple[int, int], _Layer] = {}
        self._kept: dict[int, Slot] = {}
        self._sources: dict[int, Slot] = {}
        if device is not None:
            _move_buffers(self.model, device)
            self._through = [Slot(aligned_buffer(THROUGH_BYTES)) for _ in range(N_THROUGH)]
            for slot in self._through:
                device.pin(slot.data)
            self._to_device = DeviceLoader(self._loader, device, self._through)
        try:
            if far is None:
                self._read_ends(skeleton, sizes.ends)
            else:
                self._open_ends(skeleton, far)
            for index in stays:
                self._kept[index] = self._read_now(self._layouts[index])
            if device is not None:
                for index in kept:
                    self._sources[index] = self._read_now(self._layouts[index], self._loader)
                    device.pin(self._sources[index].data)
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[Block]:
        """Return each block in turn; its weights are in memory until the iterator is advanced."""
        for index in range(len(self)):
            with self._here(index) as layer:
                yield layer.block

    @contextmanager
    def in_modules(self) -> Iterator[None]:
        """Put weights into the modules of a layer when it is called, and take them out after it.

        Matrices in codes are widened some rows at a time.
        """
        within: list[ExitStack] = []

        def before(index: int) -> Callable[..., None]:
            def enter(module: nn.Module, *_: Any) -> None:
                within.append(ExitStack())
                layer = within[-1].enter_context(self._here(index))
                within[-1].enter_context(with_parameters(module, layer.parameters))
                matrices = [(module.get_submodule(name), weight) for name, weight in layer.matrices]
                within[-1].enter_context(computing_with(matrices))

            return enter

        def leave(*_: Any) -> None:
            while within:
                within.pop().close()

        hooks = [module.register_forward_pre_hook(before(index)) for index, module in enumerate(self._modules)]
        hooks += [module.register_forward_hook(leave) for module in self._modules]
        try:
            with computing_with(self._ends):
                yield
        finally:
            leave()
            for hook in hooks:
                hook.remove()

    def close(self) -> None:
        """End the reads, close the files and release the memory; a second call changes nothing."""
        self._loader.close()
        for file in self._files.values():
            file.close()
        self._files.clear()
        self._pending.clear()
        self._blocks.clear()
        self._kept.clear()
        self._sources.clear()
        self._free.clear()
        if self._device is not None:
            self._device.close()
        for holding in self._holdings:
            holding.release()

    # ------------------------------------------------------------------ one layer

    @contextmanager
    def _here(self, index: int) -> Iterator[_Layer]:
        """Yield a layer with its weights in memory."""
        self._release(self._in_use)  # of a sweep that an error ended
        slot = self._kept.get(index)
        if slot is not None:
            yield self._block(index, slot)
            return
        with self._read(index) as slot:
            yield self._block(index, slot)

    def _head_tiles(self) -> Iterator[tuple[RowRange, Weight]]:
        """Yield each tile of the head; its rows are in memory until the iterator is advanced."""
        for index, tile in enumerate(self._tiles, len(self)):
            self._release(self._in_use)
            with self._read(index) as slot:
                yield tile, tile.weight(slot.data)

    @contextmanager
    def _read(self, index: int) -> Iterator[Slot]:
        """Yield the slot of number `index` of a sweep; what comes after it is read meanwhile."""
        slot = self._in_use = self._wait_for(index)
        self._read_ahead(index)
        try:
            yield slot
        finally:
            self._release(slot)
            self._read_ahead(index)

    def _block(self, index: int, slot: Slot) -> _Layer:
        """Return a layer whose weights are in a slot."""
        key = index, id(slot)
        if key not in self._blocks:
            self._blocks[key] = _layer_in(self._modules[index], self._layouts[index], slot.data)
        return self._blocks[key]

    def _wait_for(self, index: int) -> Slot:
        """Return the slot with a layer's weights.

        A read ahead that failed, maybe long ago, is repeated.

        Raises:
            DataError: they could not be read.
        """
        if index == self._streamed[0]:
            self._freed.between_sweeps()
        ahead = bool(self._pending) and self._pending[0][0] == index
        if not ahead:  # nothing was read ahead, or the sweep before did not come to its end
            while self._pending:
                _, ticket = self._pending.pop()
                ticket.cancel()
                self._free.append(ticket.slot)
            self._submit(index)
        _, ticket = self._pending.popleft()
        try:
            slot = ticket.wait()
        except BaseException as error:
            self._free.append(ticket.slot)
            if ahead and isinstance(error, DataError):
                return self._wait_for(index)
            raise
        self._verified.add(index)
        return slot

    def _release(self, slot: Slot | None) -> None:
        if slot is not None and slot is self._in_use:
            slot.release()
            self._free.append(slot)
            self._in_use = None

    def _read_ahead(self, index: int) -> None:
        """Fill the free slots with the layers after those on their way, or after `index`."""
        while self._overlap and self._free:
            last = self._pending[-1][0] if self._pending else index
            self._submit(self._streamed[(self._streamed.index(last) + 1) % len(self._streamed)])

    def _submit(self, index: int) -> None:
        slot = self._free.pop(0)
        if self._to_device is not None and index in self._sources:
            self._pending.append((index, self._to_device.copy(self._sources[index].data, slot)))
            return
        check = self._always or index not in self._verified
        n = len(self)
        runs = self._layouts[index].runs if index < n else self._tiles[index - n].runs
        self._pending.append((index, (self._to_device or self._loader).read(self._extents(runs, check), slot)))
        self.bytes_read += sum(run.nbytes for run in runs)

    # ------------------------------------------------------------------ what stays

    def _read_ends(self, skeleton: Skeleton, layout: PartLayout) -> None:
        data, model = self._read_now(layout).data, cast(Any, skeleton.model)
        self._set_parameters(layout, data)
        embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
        weights = dict(model.named_parameters(remove_duplicate=False))
        for name, codes in (entry for matrix in layout.codes(data) for entry in matrix.apart()):
            shape_only = _shape_only(codes)
            if skeleton.tied or head.weight is weights[name]:
                self.head, head.weight = codes, shape_only
                self._ends.append((head, codes))
            if skeleton.tied or embeddings.weight is weights[name]:
                self.tokens, embeddings.weight = codes, shape_only
                self._ends.append((embeddings, codes))
        if skeleton.tied:
            head.weight = embeddings.weight

    def _open_ends(self, skeleton: Skeleton, far: EndsOnDisk) -> None:
        """Read what stays of the ends, and make embeddings and head readers of their files."""
        slot = self._free[0] if self._to_device is None else self._through[0]
        if far.whole is not None:
            self.bytes_read += far.check(self._file(far.whole.path), slot.data)
        self._set_parameters(far.rest, self._read_now(far.rest).data)
        model: Any = skeleton.model
        embeddings, last = model.get_input_embeddings(), model.get_output_embeddings()
        tokens = TokenRows(far.tokens, self._file(far.tokens.path), self._count_rows)
        head = TiledHead(far.head, self._head_tiles)
        embeddings.weight = _shape_only(tokens)
        last.weight = embeddings.weight if skeleton.tied else _shape_only(head)
        self.tokens, self.head = tokens, head
        self._ends += [(embeddings, tokens), (last, head)]

    def _count_rows(self, nbytes: int) -> None:
        self.row_bytes_read += nbytes
        self.bytes_read += nbytes

    def _set_parameters(self, layout: PartLayout, data: Tensor) -> None:
        """Set the parameters outside the layers to views of a buffer."""
        for name, parameter in layout.parameters(data).items():
            owner, _, field = name.rpartition(".")
            self.model.get_submodule(owner)._parameters[field] = parameter

    def _read_now(self, layout: PartLayout, loader: Loader | None = None) -> Slot:
        """Return what stays, read to the device that computes, or by another loader."""
        slot = Slot(self._near(layout.nbytes) if loader is None else aligned_buffer(layout.nbytes))
        if self._pack is not None:
            self._pack(layout, slot.data)
            return slot
        self.bytes_read += sum(run.nbytes for run in layout.runs)
        return (loader or self._to_device or self._loader).read(self._extents(layout.runs), slot).wait()

    def _near(self, nbytes: int) -> Tensor:
        """Return memory of the device that computes the layers."""
        return aligned_buffer(nbytes) if self._device is None else self._device.buffer(nbytes)

    def _extents(self, runs: Iterable[FileRun], check: bool = True) -> list[Extent]:
        return [
            Extent(self._file(run.path), run.offset, run.nbytes, run.needed, run.place, run.checksum if check else None)
            for run in runs
        ]

    def _file(self, path: Path) -> Any:
        if path not in self._files:
            self._files[path] = self._open_file(path)
        return self._files[path]


def _move_buffers(model: nn.Module, device: Device) -> None:
    """Move what the modules hold besides parameters to the device that computes."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device.where)


def check_verify(verify: str) -> None:
    """Check that `verify` is a way to compare checksums.

    Raises:
        OptionError: no such `verify`.
    """
    if verify not in get_args(Verify):
        raise unknown("verify", str(verify), get_args(Verify))


def _shape_only(matrix: QuantizedWeight | TokenRows | TiledHead) -> nn.Parameter:
    """Return the shape and dtype of a matrix that is not a parameter, without memory."""
    return nn.Parameter(torch.zeros(1, 1, dtype=matrix.dtype).expand(matrix.shape), requires_grad=False)


class _Layer(NamedTuple):
    """Layer with its weights in a slot: as a block, and as parameters of its module, by name."""

    block: Block
    parameters: dict[str, nn.Parameter]
    matrices: list[tuple[str, QuantizedWeight]]  # names of linear layers


def _layer_in(module: nn.Module, layout: PartLayout, data: Tensor) -> _Layer:
    parameters, codes = layout.parameters(data), layout.codes(data)
    weights = dict(module.named_parameters())
    of_weights = {id(weights[name]): weight for matrix in codes for name, weight in matrix.apart()}
    take = take_codes(of_weights) if codes else in_place
    with with_parameters(module, parameters):
        block = block_of(module, take)
    matrices = [(name.removesuffix(".weight"), weight) for matrix in codes for name, weight in matrix.apart()]
    return _Layer(block, parameters, matrices)
