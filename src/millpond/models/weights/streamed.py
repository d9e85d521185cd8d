"""Layers whose weights are read from their files while the layers before them are computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from millpond.models.lean.block import Block
from millpond.models.lean.fuse import in_place
from millpond.models.lean.layers import block_of
from millpond.models.weights.layout import Layout
from millpond.models.weights.skeleton import Skeleton, with_parameters
from millpond.tiers.aligned import aligned_buffer, aligned_up
from millpond.tiers.backends.simulated import SimulatedDevice
from millpond.tiers.backends.threads import ThreadBackend
from millpond.tiers.device_loader import Arrival, DeviceLoader
from millpond.tiers.files import DirectFile
from millpond.tiers.ledger import Ledger
from millpond.tiers.loader import REQUEST_BYTES, Backend, Extent, Loader, Ticket
from millpond.tiers.slots import Slot

#: Slots of the host that weights pass on their way from a disk to a device.
_N_THROUGH = 2


class WeightSizes:
    """Bytes that the weights of a model take in memory, as they are read.

    Attributes:
        ends: layout of what lies outside the layers, all of which stays. layers: that of each layer.
    """

    def __init__(self, skeleton: Skeleton) -> None:
        self.ends = Layout.of(skeleton.ends)
        self.layers = tuple(Layout.of(tensors) for tensors in skeleton.by_layer)

    @property
    def slot_bytes(self) -> int:
        """Of a slot, which holds any of the layers."""
        return max(aligned_up(layout.nbytes) for layout in self.layers)

    def kept_bytes(self, kept: Iterable[int]) -> int:
        """Of the ends and of layers that stay in memory."""
        return aligned_up(self.ends.nbytes) + sum(aligned_up(self.layers[index].nbytes) for index in kept)


class StreamedLayers:
    """The layers of a model as blocks, in their order, each only while its weights are in memory.

    Args:
        kept: layers that stay in the host's memory. n_slots: layers in memory at a time of those that come.
        ledger: what all buffers are taken of, from the tier "host", and of a device from "device".
        device: where layers are computed; None: where the host's memory is. With a device the slots are there, layers
            that are kept are copied to them, and those `on_device` stay there, with what lies outside the layers.
        backend: who reads; None: one thread. overlap: read the layers ahead while one is computed.
        open_file: opens a file of weights.

    Attributes:
        model: its parameters outside the layers are in memory, those of the layers on "meta".
        bytes_read: of files, since it was made.

    Raises:
        BudgetError: the ledger has too few bytes. DataError: a file cannot be read.
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
        device: SimulatedDevice | None = None,
        on_device: Iterable[int] = (),
    ) -> None:
        self.model: PreTrainedModel = skeleton.model
        self.bytes_read = 0
        self._modules, self._layouts = skeleton.layers, sizes.layers
        kept, on_device = sorted(kept), sorted(on_device)
        stays = kept if device is None else on_device
        self._streamed = [index for index in range(len(sizes.layers)) if index not in stays]
        n_slots = min(n_slots, len(self._streamed))
        near = "host" if device is None else device.tier.name
        self._holdings = [ledger.take(near, "weights", sizes.kept_bytes(stays))]
        if n_slots:
            self._holdings.append(ledger.take(near, "slots", n_slots * sizes.slot_bytes))
        if device is not None:
            host = sizes.kept_bytes(kept) - sizes.kept_bytes(())
            self._holdings.append(ledger.take("host", "weights", host))
            self._holdings.append(ledger.take("host", "slots", _N_THROUGH * REQUEST_BYTES))
        self._files: dict[Path, Any] = {}
        self._open_file, self._overlap = open_file, overlap
        self._loader = Loader(backend or ThreadBackend())
        self._free = [Slot(aligned_buffer(sizes.slot_bytes)) for _ in range(n_slots)]
        self._pending: deque[tuple[int, Ticket | Arrival]] = deque()
        self._in_use: Slot | None = None
        self._blocks: dict[tuple[int, int], tuple[Block, dict[str, nn.Parameter]]] = {}
        self._kept: dict[int, Slot] = {}
        self._sources: dict[int, Slot] = {}
        self._device, self._to_device = device, None
        if device is not None:
            through = [Slot(aligned_buffer(REQUEST_BYTES)) for _ in range(_N_THROUGH)]
            self._to_device = DeviceLoader(self._loader, device, through)
        try:
            self._read_ends(skeleton, sizes.ends)
            for index in stays:
                self._kept[index] = self._read_now(self._layouts[index])
            for index in kept if device is not None else ():
                self._sources[index] = self._read_now(self._layouts[index], self._loader)
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[Block]:
        """Each block in turn; its weights are in memory until the iterator is advanced."""
        for index in range(len(self)):
            with self._here(index) as (block, _):
                yield block

    @contextmanager
    def in_modules(self) -> Iterator[None]:
        """Weights are put into the modules of a layer when it is called, and taken out after it."""
        within: list[Any] = []

        def before(index: int) -> Callable[..., None]:
            def enter(module: nn.Module, *_: Any) -> None:
                here = self._here(index)
                parameters = here.__enter__()[1]
                inside = with_parameters(module, parameters)
                inside.__enter__()
                within[:] = [inside, here]

            return enter

        def leave(*_: Any) -> None:
            while within:
                within.pop(0).__exit__(None, None, None)

        hooks = [module.register_forward_pre_hook(before(index)) for index, module in enumerate(self._modules)]
        hooks += [module.register_forward_hook(leave) for module in self._modules]
        try:
            yield
        finally:
            leave()
            for hook in hooks:
                hook.remove()

    def close(self) -> None:
        """End the reads, close the files and give the memory back; a second call changes nothing."""
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
    def _here(self, index: int) -> Iterator[tuple[Block, dict[str, nn.Parameter]]]:
        """A layer with its weights in memory."""
        self._release(self._in_use)  # of a sweep that an error ended
        slot = self._kept.get(index)
        if slot is not None:
            yield self._block(index, slot)
            return
        slot = self._in_use = self._wait_for(index)
        self._read_ahead(index)
        try:
            yield self._block(index, slot)
        finally:
            self._release(slot)
            self._read_ahead(index)

    def _block(self, index: int, slot: Slot) -> tuple[Block, dict[str, nn.Parameter]]:
        """A layer whose weights lie in a slot, and these as parameters of its module."""
        key = index, id(slot)
        if key not in self._blocks:
            parameters, module = self._layouts[index].parameters(slot.data), self._modules[index]
            with with_parameters(module, parameters):
                self._blocks[key] = block_of(module, in_place), parameters
        return self._blocks[key]

    def _wait_for(self, index: int) -> Slot:
        """The slot with a layer's weights.

        Raises:
            DataError: they could not be read.
        """
        if not self._pending or self._pending[0][0] != index:  # the sweep before did not come to its end
            while self._pending:
                _, ticket = self._pending.pop()
                ticket.cancel()
                self._free.append(ticket.slot)
            self._submit(index)
        _, ticket = self._pending.popleft()
        try:
            return ticket.wait()
        except BaseException:
            self._free.append(ticket.slot)
            raise

    def _release(self, slot: Slot | None) -> None:
        if slot is not None and slot is self._in_use:
            slot.release()
            self._free.append(slot)
            self._in_use = None

    def _read_ahead(self, index: int) -> None:
        """Fill the free slots with the layers that come after those on their way, or after `index`."""
        while self._overlap and self._free:
            last = self._pending[-1][0] if self._pending else index
            self._submit(self._streamed[(self._streamed.index(last) + 1) % len(self._streamed)])

    def _submit(self, index: int) -> None:
        layout, slot = self._layouts[index], self._free.pop(0)
        if self._to_device is not None and index in self._sources:
            self._pending.append((index, self._to_device.copy(self._sources[index].data, slot)))
            return
        self._pending.append((index, (self._to_device or self._loader).read(self._extents(layout), slot)))
        self.bytes_read += sum(run.nbytes for run in layout.runs)

    # ------------------------------------------------------------------ what stays

    def _read_ends(self, skeleton: Skeleton, layout: Layout) -> None:
        for name, parameter in layout.parameters(self._read_now(layout).data).items():
            owner, _, field = name.rpartition(".")
            skeleton.model.get_submodule(owner)._parameters[field] = parameter
        if skeleton.tied:
            embeddings: Any = skeleton.model.get_input_embeddings()
            model: Any = skeleton.model
            model.get_output_embeddings().weight = embeddings.weight

    def _read_now(self, layout: Layout, loader: Loader | None = None) -> Slot:
        """What stays, read to where layers are computed, or by another loader."""
        slot = Slot(aligned_buffer(layout.nbytes))
        self.bytes_read += sum(run.nbytes for run in layout.runs)
        return (loader or self._to_device or self._loader).read(self._extents(layout), slot).wait()

    def _extents(self, layout: Layout) -> list[Extent]:
        return [Extent(self._file(run.path), run.offset, run.nbytes, run.needed, run.place) for run in layout.runs]

    def _file(self, path: Path) -> Any:
        if path not in self._files:
            self._files[path] = self._open_file(path)
        return self._files[path]
