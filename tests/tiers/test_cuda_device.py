"""The order of copies to a GPU, with fake streams and events: a slot is not written while kernels may read it."""

from __future__ import annotations

import pytest
import torch

from millpond.errors import OptionError
from millpond.tiers.buffers import Slot, aligned_buffer
from millpond.tiers.cuda import CudaDevice
from millpond.tiers.devices import DeviceLoader
from millpond.tiers.loader import Loader
from millpond.tiers.threads import ThreadBackend
from tests.helpers.tiers.fake_cuda import FakeCuda

CPU = torch.device("cpu")


def test_a_copy_waits_for_the_kernels_that_read_the_slot() -> None:
    cuda = FakeCuda()
    device = CudaDevice(CPU, cuda=cuda)
    loader = Loader(ThreadBackend())
    to_device, slot = DeviceLoader(loader, device, [Slot(aligned_buffer(4096))]), Slot(device.buffer(4096))
    source = torch.arange(256, dtype=torch.uint8).repeat(16)
    del cuda.log[:]
    assert torch.equal(to_device.copy(source, slot).wait().data[:4096], source)
    fence, waits, event = cuda.log.index("record main"), cuda.log.index("copies waits for main:0"), "record copies"
    assert fence < cuda.log.index("in copies") < waits < cuda.log.index(event) < cuda.log.index("synchronize")
    assert device.bytes_copied == 4096
    loader.close()
    device.close()


def test_what_is_pinned_is_let_go() -> None:
    cuda = FakeCuda()
    device = CudaDevice(CPU, 1000, cuda=cuda)
    source = aligned_buffer(4096)
    device.pin(source)
    assert cuda.pinned == {source.data_ptr()}
    device.close()
    assert not cuda.pinned
    device.close()


def test_memory_that_cannot_be_pinned() -> None:
    with pytest.raises(OptionError, match=r"4,096 bytes .*CUDA error 2"):
        CudaDevice(CPU, cuda=FakeCuda(refuse=2)).pin(aligned_buffer(4096))


def test_measuring_leaves_nothing() -> None:
    cuda = FakeCuda()
    device = CudaDevice(CPU, cuda=cuda)
    found = device.measure()
    assert found.link > 0
    assert found.memory > 0
    assert device.bytes_copied == 0
    assert not cuda.pinned
