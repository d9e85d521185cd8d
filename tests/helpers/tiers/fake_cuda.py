"""Streams and events as those of torch.cuda, on a CPU: they do at once what they are given, and note the order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any


class FakeEvent:
    """An event of a fake stream; `after` is what the stream had been given when it was recorded."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self.name = ""

    def record(self, stream: FakeStream) -> None:
        self.name = f"{stream.name}:{len(self._cuda.log)}"
        self._cuda.log.append(f"record {stream.name}")

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self._cuda.log.append("synchronize")


class FakeStream:
    """A stream, which notes what it waits for."""

    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self._cuda, self.name = cuda, name

    def wait_event(self, event: FakeEvent) -> None:
        self._cuda.log.append(f"{self.name} waits for {event.name}")

    def synchronize(self) -> None:
        self._cuda.log.append(f"synchronize {self.name}")


class FakeCuda:
    """What `CudaDevice` uses of `torch.cuda`.

    Attributes:
        log: what was asked of it. refuse: error code of pinning.
    """

    def __init__(self, refuse: int = 0) -> None:
        self.log: list[str] = []
        self.refuse = refuse
        self.pinned: set[int] = set()
        self._main = FakeStream(self, "main")

    def Stream(self, where: Any) -> FakeStream:
        return FakeStream(self, "copies")

    def Event(self) -> FakeEvent:
        return FakeEvent(self)

    def current_stream(self, where: Any) -> FakeStream:
        return self._main

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self.log.append(f"in {stream.name}")
        yield

    def synchronize(self, where: Any) -> None:
        self.log.append("synchronize device")

    def cudart(self) -> Any:
        def register(address: int, nbytes: int, flags: int) -> int:
            if not self.refuse:
                self.pinned.add(address)
            return self.refuse

        return SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=self.pinned.discard)
