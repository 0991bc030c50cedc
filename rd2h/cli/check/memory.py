"""Memory that an engine can read or write: of the host, or of an NPU.

The NPU's side of torch is written against the small protocols here, so that a fake can stand in
where there is no device; nothing imports torch before NPU memory is asked for.
"""

from __future__ import annotations

import importlib
import mmap
from collections.abc import Callable
from typing import Protocol, TypeAlias, cast

import numpy as np

from rd2h.cli.check.content import Bytes
from rd2h.cli.check.options import MemoryName
from rd2h.cli.process import available_memory
from rd2h.devices import device_for
from rd2h.engines import MemoryRegion

__all__ = [
    "Allocate",
    "HostMemory",
    "Memory",
    "NpuMemory",
    "Tensor",
    "Torch",
    "allocator",
]


class Memory(Protocol):
    """A range of bytes that stays where it is until `release`. For one thread."""

    @property
    def region(self) -> MemoryRegion:
        """Where it is, as an engine sees it."""
        ...

    def write(self, offset: int, data: Bytes) -> None:
        """Copy bytes into it; when it returns, an engine may read them."""
        ...

    def fill(self, value: int, length: int) -> None:
        """Set the first ``length`` bytes to one value."""
        ...

    def fetch(self, length: int) -> Bytes:
        """Its first ``length`` bytes, where the host can look at them; not to be written."""
        ...

    def release(self) -> None:
        """Give it back; no engine may know it any more."""
        ...


Allocate: TypeAlias = Callable[[int], Memory]
"""Makes memory of so many bytes; raises `MemoryError` if there is not so much."""


class HostMemory:
    """An anonymous mapping, as D's host pool is.

    Args:
        size: In bytes.

    Raises:
        MemoryError: this machine, or this container, has not so much left.
    """

    def __init__(self, size: int) -> None:
        # The kernel promises more than it has, and would kill us when the bytes are written.
        free = available_memory()
        if size > free:
            raise MemoryError(f"{size:,} bytes are wanted, and {free:,} are free on this machine")
        try:
            self._bytes: Bytes = np.frombuffer(mmap.mmap(-1, size), np.uint8)
        except (OSError, OverflowError, ValueError) as error:
            raise MemoryError(f"{size:,} bytes cannot be mapped: {error}") from error
        self._region = MemoryRegion(int(self._bytes.ctypes.data), size)

    @property
    def region(self) -> MemoryRegion:
        """See `Memory`."""
        return self._region

    def write(self, offset: int, data: Bytes) -> None:
        """See `Memory`."""
        self._bytes[offset : offset + len(data)] = data

    def fill(self, value: int, length: int) -> None:
        """See `Memory`."""
        self._bytes[:length] = value

    def fetch(self, length: int) -> Bytes:
        """See `Memory`: the memory itself, without a copy."""
        view = self._bytes[:length]
        view.flags.writeable = False
        return view

    def release(self) -> None:
        """See `Memory`; the mapping goes with its last view."""
        self._bytes = np.empty(0, np.uint8)


class Tensor(Protocol):
    """The part of a torch tensor that is used here; one-dimensional, of bytes."""

    def data_ptr(self) -> int: ...  # noqa: D102
    def fill_(self, value: int, /) -> object: ...  # noqa: D102
    def copy_(self, source: Tensor, /) -> object: ...  # noqa: D102
    def cpu(self) -> Tensor: ...  # noqa: D102
    def numpy(self) -> Bytes: ...  # noqa: D102
    def __getitem__(self, part: slice, /) -> Tensor: ...


class Npu(Protocol):
    """``torch.npu``."""

    def synchronize(self) -> None: ...


class Torch(Protocol):
    """The part of torch, with torch_npu, that is used here."""

    uint8: object

    @property
    def npu(self) -> Npu: ...  # noqa: D102
    def empty(self, size: int, /, *, dtype: object, device: str) -> Tensor: ...  # noqa: D102
    def from_numpy(self, data: Bytes, /) -> Tensor: ...  # noqa: D102


class NpuMemory:
    """A tensor in the memory of an NPU.

    Args:
        torch: torch with torch_npu.
        device_id: The NPU, which is the calling thread's device.
        size: In bytes.

    Raises:
        MemoryError: the device has not so much left, or does not answer.
    """

    def __init__(self, torch: Torch, device_id: int, size: int) -> None:
        self._torch = torch
        try:
            self._tensor: Tensor | None = torch.empty(
                size, dtype=torch.uint8, device=f"npu:{device_id}"
            )
        except RuntimeError as error:
            raise MemoryError(f"npu:{device_id} gives no {size:,} bytes: {error}") from error
        self._region = MemoryRegion(self._tensor.data_ptr(), size)

    @property
    def region(self) -> MemoryRegion:
        """See `Memory`."""
        return self._region

    def write(self, offset: int, data: Bytes) -> None:
        """See `Memory`."""
        self._alive()[offset : offset + len(data)].copy_(self._torch.from_numpy(data))
        self._torch.npu.synchronize()

    def fill(self, value: int, length: int) -> None:
        """See `Memory`."""
        self._alive()[:length].fill_(value)
        self._torch.npu.synchronize()

    def fetch(self, length: int) -> Bytes:
        """See `Memory`: a copy on the host."""
        return self._alive()[:length].cpu().numpy()

    def release(self) -> None:
        """See `Memory`."""
        self._tensor = None

    def _alive(self) -> Tensor:
        if self._tensor is None:
            raise MemoryError("this memory was released")
        return self._tensor


def allocator(name: MemoryName, device_id: int) -> Allocate:
    """Say how memory is made; the function that is returned belongs to one thread.

    Args:
        name: Where.
        device_id: Of the NPU.
    """
    match name:
        case MemoryName.HOST:
            return HostMemory
        case MemoryName.NPU:
            return lambda size: _npu_memory(device_id, size)


def _npu_memory(device_id: int, size: int) -> NpuMemory:
    """Import torch_npu, set the thread's device, and allocate.

    Raises:
        DeviceUnavailableError: torch_npu, CANN or the device is not there.
        MemoryError: see `NpuMemory`.
    """
    device_for("npu", device_id).enter_thread()  # torch_npu puts ``torch.npu`` into torch
    return NpuMemory(cast("Torch", importlib.import_module("torch")), device_id, size)
