"""Devices: which one a thread works on, and when its work is in memory. NPU, CUDA and CPU.

The compute thread records events; any other thread may wait for one. Whatever a thread does
here, its device is set first; which one was, is kept for each thread. torch is imported by the
device that needs it, when it is made: on a CPU, never.
"""

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from rd2h.prefill import DeviceEvent

if TYPE_CHECKING:
    from torch import cuda
    from torch_npu import npu

__all__ = ["CpuDevice", "CudaDevice", "Device", "DeviceUnavailableError", "NpuDevice", "device_for"]


class DeviceUnavailableError(Exception):
    """The platform is unknown, or its device or the torch for it is not on this host."""


class Device(Protocol):
    """The device of one rank."""

    def enter_thread(self) -> None:
        """Set the calling thread's device, unless this was the last one set here.

        Any thread; cheap after the first call. It cannot see that somebody else has set another
        device on this thread.
        """
        ...

    def record(self) -> DeviceEvent | None:
        """Mark the work that the calling thread has put on its current stream so far.

        Returns:
            An event that any thread may wait for, or None where work is done when the call that
            asked for it returns.
        """
        ...


class CpuDevice:
    """Work is done when it returns: no device to set, and nothing to wait for."""

    def enter_thread(self) -> None:
        """Do nothing; see `Device.enter_thread`."""

    def record(self) -> DeviceEvent | None:
        """Return None; see `Device.record`."""
        return None


class CudaDevice:
    """A device of `torch.cuda`.

    Args:
        index: Its number among those that this process may use.

    Raises:
        DeviceUnavailableError: torch or the device is not there.
    """

    def __init__(self, index: int) -> None:
        try:
            from torch import cuda
        except (ImportError, OSError) as error:
            raise _no_torch("cuda", "torch, built for CUDA", error) from error
        _check_index("cuda", index, cuda.device_count())
        self._index = index

    def enter_thread(self) -> None:
        """Set the calling thread's device; see `Device.enter_thread`."""
        from torch import cuda

        _enter(self, lambda: cuda.set_device(self._index))

    def record(self) -> DeviceEvent | None:
        """Mark the work of the calling thread; see `Device.record`."""
        from torch import cuda

        self.enter_thread()
        # Blocking: who waits shall sleep; by default it would take a core. torch gives no types.
        event = cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record()
        return _CudaEvent(self, event)


class _CudaEvent:
    """What CUDA promises of an event holds on every thread."""

    def __init__(self, device: CudaDevice, event: "cuda.Event") -> None:
        self._device = device
        self._event = event

    def synchronize(self) -> None:
        """Block the calling thread until the event; see `DeviceEvent.synchronize`."""
        self._device.enter_thread()
        self._event.synchronize()


class NpuDevice:
    """A device of `torch_npu`.

    Args:
        index: Its number among those that this process may use.

    Raises:
        DeviceUnavailableError: torch-npu, CANN or the device is not there.
    """

    def __init__(self, index: int) -> None:
        try:
            from torch_npu import npu
        except (ImportError, OSError) as error:
            raise _no_torch("npu", "torch-npu and the CANN that it needs", error) from error
        _check_index("npu", index, npu.device_count())
        self._index = index
        self._waiting = threading.local()

    def enter_thread(self) -> None:
        """Set the calling thread's device; see `Device.enter_thread`."""
        from torch_npu import npu

        _enter(self, lambda: npu.set_device(self._index))

    def record(self) -> DeviceEvent | None:
        """Mark the work of the calling thread; see `Device.record`."""
        from torch_npu import npu

        self.enter_thread()
        event = npu.Event()
        event.record()
        return _NpuEvent(self, event)

    def _waiting_stream(self) -> "npu.Stream":
        """A stream of the calling thread's own, for waiting only.

        Not its current stream: that is the device's default one unless the thread has set
        another, and it may hold the layers that the compute thread has put there since.
        """
        from torch_npu import npu

        self.enter_thread()
        stream: npu.Stream | None = getattr(self._waiting, "stream", None)
        if stream is None:
            stream = self._waiting.stream = npu.Stream(self._index)
        return stream


class _NpuEvent:
    """An event whose own `synchronize` is not used.

    torch_npu may not have given the record to the device yet when another thread asks, and then
    it returns too early. A stream's wait goes the same way as the record, and so comes after it.
    """

    def __init__(self, device: NpuDevice, event: "npu.Event") -> None:
        self._device = device
        self._event = event

    def synchronize(self) -> None:
        """Block the calling thread until the event; see `DeviceEvent.synchronize`."""
        stream = self._device._waiting_stream()
        stream.wait_event(self._event)
        stream.synchronize()


def device_for(platform: str, index: int) -> Device:
    """Make the device of a rank.

    Args:
        platform: vLLM's ``current_platform.device_type``: ``npu``, ``cuda`` or ``cpu``.
        index: Number of the device among those that this process may use; a CPU has none.

    Raises:
        DeviceUnavailableError: rd2h does not know the platform, or it is not on this host.
    """
    match platform:
        case "npu":
            return NpuDevice(index)
        case "cuda":
            return CudaDevice(index)
        case "cpu":
            return CpuDevice()
        case _:
            raise DeviceUnavailableError(
                f"rd2h cannot wait for the work of platform {platform!a}; it runs on npu, cuda "
                "and cpu"
            )


_thread = threading.local()  # `device`: the one that was set last on this thread


def _enter(device: Device, set_device: Callable[[], None]) -> None:
    if getattr(_thread, "device", None) is not device:
        set_device()
        _thread.device = device  # only now: if setting it failed, the next call tries again


def _check_index(platform: str, index: int, count: int) -> None:
    if not 0 <= index < count:
        raise DeviceUnavailableError(
            f"there is no {platform} device {index}: this process sees {count}; check the driver, "
            "the devices of this container, and the variables that hide some "
            "(ASCEND_RT_VISIBLE_DEVICES, CUDA_VISIBLE_DEVICES)"
        )


def _no_torch(platform: str, needed: str, error: Exception) -> DeviceUnavailableError:
    return DeviceUnavailableError(
        f"platform {platform} needs {needed}, which does not import here "
        f"({' '.join(str(error).split())}); install what vLLM needs for this platform"
    )
