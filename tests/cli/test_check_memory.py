"""Memory of a check: the host's, and an NPU's with a torch that has none."""

from __future__ import annotations

import sys
from types import ModuleType

import numpy as np
import pytest

import rd2h.cli.check.memory
from rd2h.cli.check.content import Bytes, content
from rd2h.cli.check.engine import starter
from rd2h.cli.check.failures import Side
from rd2h.cli.check.memory import HostMemory, Memory, NpuMemory, Tensor, allocator
from rd2h.cli.check.options import EngineName, MemoryName
from rd2h.devices import DeviceUnavailableError
from rd2h.engines import EngineBinding


class FakeTensor:
    """Bytes that the host may not touch unless they are a copy; writes are queued, as on an NPU."""

    def __init__(self, torch: FakeTorch, data: Bytes, *, on_device: bool) -> None:
        self._torch = torch
        self._data = data
        self._on_device = on_device

    def data_ptr(self) -> int:
        return int(self._data.ctypes.data)

    def fill_(self, value: int, /) -> object:
        assert self._on_device
        self._torch.queue.append((self._data, np.full(len(self._data), value, np.uint8)))
        return self

    def copy_(self, source: Tensor, /) -> object:
        assert self._on_device
        data = source.numpy()
        assert len(data) == len(self._data)
        self._torch.queue.append((self._data, data.copy()))
        return self

    def cpu(self) -> Tensor:
        self._torch.npu.synchronize()
        return FakeTensor(self._torch, self._data.copy(), on_device=False)

    def numpy(self) -> Bytes:
        if self._on_device:
            raise TypeError("can't convert npu device type tensor to numpy")
        return self._data

    def __getitem__(self, part: slice, /) -> Tensor:
        return FakeTensor(self._torch, self._data[part], on_device=self._on_device)


class FakeNpu:
    def __init__(self, torch: FakeTorch) -> None:
        self._torch = torch

    def synchronize(self) -> None:
        for target, data in self._torch.queue:
            target[:] = data
        self._torch.queue.clear()


class FakeTorch:
    """As much of torch as is used; a device of 1 MiB."""

    uint8: object = "torch.uint8"

    def __init__(self) -> None:
        self.queue: list[tuple[Bytes, Bytes]] = []
        self.npu = FakeNpu(self)

    def empty(self, size: int, /, *, dtype: object, device: str) -> Tensor:
        assert (dtype, device) == (self.uint8, "npu:3")
        if size > 1 << 20:
            raise RuntimeError("NPU out of memory")
        self.data = np.zeros(size, np.uint8)
        return FakeTensor(self, self.data, on_device=True)

    def from_numpy(self, data: Bytes, /) -> Tensor:
        return FakeTensor(self, data, on_device=False)


@pytest.fixture(params=list(MemoryName))
def memory(request: pytest.FixtureRequest) -> Memory:
    if request.param is MemoryName.NPU:
        return NpuMemory(FakeTorch(), 3, 10_000)
    return HostMemory(10_000)


def test_what_is_written_is_there(memory: Memory) -> None:
    assert memory.region.length == 10_000
    memory.fill(7, 9000)
    memory.write(100, content(1, 0, 50))
    found = memory.fetch(9001)
    assert len(found) == 9001
    assert (found[:100] == 7).all()
    assert (found[100:150] == content(1, 0, 50)).all()
    assert (found[150:9000] == 7).all()
    assert found[9000] == 0
    memory.release()


def test_host_memory_is_looked_at_without_a_copy_and_not_written() -> None:
    memory = HostMemory(4096)
    view = memory.fetch(4096)
    memory.fill(9, 4096)
    assert (view == 9).all()
    assert int(view.ctypes.data) == memory.region.address
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1


def test_npu_memory_is_written_when_the_call_returns() -> None:
    torch = FakeTorch()
    memory = NpuMemory(torch, 3, 100)
    memory.fill(5, 100)
    assert (torch.data == 5).all()  # what an engine would read, without another word
    memory.write(10, content(1, 0, 8))
    assert (torch.data[10:18] == content(1, 0, 8)).all()
    assert memory.region.address == int(torch.data.ctypes.data)


def test_memory_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MemoryError, match="npu:3 gives no 2,000,000 bytes: NPU out of memory"):
        NpuMemory(FakeTorch(), 3, 2_000_000)
    with pytest.raises(MemoryError, match="1,152,921,504,606,846,976 bytes are wanted, and"):
        HostMemory(1 << 60)
    monkeypatch.setattr(rd2h.cli.check.memory, "available_memory", lambda: 1 << 62)
    with pytest.raises(MemoryError, match="cannot be mapped"):
        HostMemory(1 << 60)


def test_released_npu_memory_is_not_used() -> None:
    memory = NpuMemory(FakeTorch(), 3, 100)
    memory.release()
    with pytest.raises(MemoryError, match="was released"):
        memory.fetch(1)


class FakeDevice:
    def __init__(self, entered: list[int], index: int) -> None:
        self._entered = entered
        self._index = index

    def enter_thread(self) -> None:
        self._entered.append(self._index)


def test_the_allocator_sets_the_device_first(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(allocator(MemoryName.HOST, 3)(10), HostMemory)
    entered: list[int] = []

    def device_for(platform: str, index: int) -> FakeDevice:
        assert platform == "npu"
        return FakeDevice(entered, index)

    torch = ModuleType("torch")
    fake = FakeTorch()
    for name in ("uint8", "npu", "empty", "from_numpy"):
        setattr(torch, name, getattr(fake, name))
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(rd2h.cli.check.memory, "device_for", device_for)
    assert isinstance(allocator(MemoryName.NPU, 3)(10), NpuMemory)
    assert entered == [3]


def test_npu_memory_without_an_npu() -> None:
    with pytest.raises(DeviceUnavailableError, match="torch-npu"):
        allocator(MemoryName.NPU, 0)(10)


# ------------------------------------------------------------------------------- the engine


def test_memfabric_is_told_role_device_and_address(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, float, EngineBinding | None]] = []
    entered: list[int] = []

    def create_engine(
        name: str, *, timeout: float, binding: EngineBinding | None = None, **rest: object
    ) -> object:
        asked.append((name, timeout, binding))
        for enter in rest.values():
            assert callable(enter)
            enter()
        return "engine"

    monkeypatch.setattr(rd2h.cli.check.engine, "create_engine", create_engine)
    monkeypatch.setattr(
        rd2h.cli.check.engine, "device_for", lambda _, index: FakeDevice(entered, index)
    )
    for side in Side:
        starter(side, 5, 12)(EngineName.MEMFABRIC, "10.0.0.1")
    starter(Side.PREFILL, 5, 12)(EngineName.HOST, "10.0.0.1")
    assert asked == [
        ("memfabric", 12, EngineBinding("Prefill", 5, "10.0.0.1")),
        ("memfabric", 12, EngineBinding("Decode", 5, "10.0.0.1")),
        ("host", 12, None),
    ]
    assert entered == [5, 5]
