"""Source of tensors of a model's files, read past the page cache, one at a time or some of their rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from millpond.errors import DataError
from millpond.models.weights.layout import Layout, TensorPlace
from millpond.tiers.buffers import Slot, aligned_buffer, aligned_down, aligned_up
from millpond.tiers.files import DirectFile
from millpond.tiers.loader import Extent, Loader, Ticket
from millpond.tiers.threads import ThreadBackend


class TensorSource:
    """Reader of tensors, the next one while one is used; files stay open until it is left."""

    def __init__(self) -> None:
        self._files: dict[Path, DirectFile] = {}
        self._loader = Loader(ThreadBackend())

    def __enter__(self) -> TensorSource:
        return self

    def __exit__(self, *exception: object) -> None:
        self._loader.close()
        for file in self._files.values():
            file.close()

    def each(self, tensors: Mapping[str, TensorPlace]) -> Iterator[tuple[str, Tensor]]:
        """Yield name and numbers of each tensor, which stay until the iterator is advanced.

        Raises:
            DataError: a file cannot be read.
        """
        waiting: list[tuple[str, Layout, Ticket]] = []
        for name, tensor in [*tensors.items(), (None, None)]:
            if name is not None and tensor is not None:
                waiting.append((name, *self._begin(name, tensor)))
            if len(waiting) == 2 or (name is None and waiting):
                first, layout, ticket = waiting.pop(0)
                slot = ticket.wait()
                yield first, layout.parameters(slot.data)[first].data

    def row(self, tensor: TensorPlace, index: int) -> Tensor:
        """Return row `index` of a matrix.

        Raises:
            DataError: the file cannot be read.
        """
        row = tensor.nbytes // tensor.shape[0]
        begin = tensor.offset + index * row
        first = aligned_down(begin)
        data = aligned_buffer(aligned_up(begin + row) - first)
        numbers: Any = data.numpy()
        try:
            n = self._file(tensor.path).read_into(first, memoryview(numbers))
        except OSError as error:
            raise DataError(f"{tensor.path} cannot be read: {error.strerror or error}") from error
        if n < begin - first + row:
            raise DataError(f"{tensor.path} ends inside of {tensor.name!r}; the file is damaged or cut off")
        row_tensor: Tensor = data[begin - first : begin - first + row].clone().view(tensor.dtype)
        return row_tensor

    def _file(self, path: Path) -> DirectFile:
        if path not in self._files:
            self._files[path] = DirectFile(path)
        return self._files[path]

    def _begin(self, name: str, tensor: TensorPlace) -> tuple[Layout, Ticket]:
        layout = Layout.of({name: tensor})
        (run,) = layout.runs
        extent = Extent(self._file(tensor.path), run.offset, run.nbytes, run.needed, run.place)
        return layout, self._loader.read([extent], Slot(aligned_buffer(layout.nbytes)))
