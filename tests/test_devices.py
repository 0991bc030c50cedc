"""Devices on fakes of `torch_npu` and `torch.cuda` that hold threads to the real ones' rules."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from types import ModuleType

import pytest

from rd2h.devices import CpuDevice, Device, DeviceUnavailableError, device_for
from rd2h.prefill import DeviceEvent


class MisuseError(AssertionError):
    """torch was used as it must not be used."""


class FakeRuntime:
    """What `torch.cuda` and `torch_npu.npu` have in common: streams, events, a device per thread.

    Attributes:
        calls: The calls that matter, in order, each with the name of its thread.
        lose_records: An event's own `synchronize` refuses threads that did not record it.
    """

    def __init__(self, *, devices: int, lose_records: bool) -> None:
        self.devices = devices
        self.lose_records = lose_records
        self.calls: list[str] = []
        self.broken = False
        self.done = threading.Event()  # the work that was put on the compute stream
        self.done.set()
        self._thread = threading.local()

    def call(self, name: str) -> None:
        if getattr(self._thread, "device", None) is None:
            raise MisuseError(f"{name} on a thread that has not set its device")
        self.calls.append(f"{threading.current_thread().name}: {name}")

    def device_count(self) -> int:
        return self.devices

    def set_device(self, device: int) -> None:
        if self.broken:
            raise RuntimeError("device is busy")
        assert type(device) is int
        assert 0 <= device < self.devices
        self._thread.device = device
        self.call(f"set_device {device}")

    @property
    def device(self) -> int | None:
        return getattr(self._thread, "device", None)


class FakeEvent:
    def __init__(self, runtime: FakeRuntime, blocking: bool = False) -> None:
        runtime.call(f"Event {blocking=}")
        self._runtime = runtime
        self.recorded_by: int | None = None

    def record(self, stream: "FakeStream | None" = None) -> None:
        assert stream is None, "it belongs on the stream that the compute thread works on"
        self._runtime.call("record")
        if self.recorded_by is not None:
            raise MisuseError("an event was recorded twice: it belongs to one task")
        self.recorded_by = threading.get_ident()

    def synchronize(self) -> None:
        self._runtime.call("event synchronize")
        if self.recorded_by is None:
            raise MisuseError("nothing was recorded")
        if self._runtime.lose_records and self.recorded_by != threading.get_ident():
            raise MisuseError("another thread's record may not have reached the device")
        self._runtime.done.wait(60)


class FakeStream:
    def __init__(self, runtime: FakeRuntime, device: int | None = None) -> None:
        runtime.call(f"Stream {device}")
        self._runtime = runtime
        self._owner = threading.get_ident()
        self._events: list[FakeEvent] = []

    def wait_event(self, event: FakeEvent) -> None:
        self._runtime.call("wait_event")
        if event.recorded_by is None:
            raise MisuseError("nothing was recorded")
        if self._owner != threading.get_ident():
            raise MisuseError("a stream for waiting is shared by two threads")
        self._events.append(event)

    def synchronize(self) -> None:
        self._runtime.call("stream synchronize")
        if self._owner != threading.get_ident():
            raise MisuseError("a stream for waiting is shared by two threads")
        if self._events:
            self._runtime.done.wait(60)
        self._events.clear()


def install(monkeypatch: pytest.MonkeyPatch, package: str, name: str, runtime: FakeRuntime) -> None:
    """Let `from package import name` find the runtime."""
    inner = ModuleType(f"{package}.{name}")
    vars(inner).update(
        device_count=runtime.device_count,
        set_device=runtime.set_device,
        Event=lambda **options: FakeEvent(runtime, **options),
    )
    if name == "npu":
        vars(inner).update(Stream=lambda device=None: FakeStream(runtime, device))
    outer = ModuleType(package)
    setattr(outer, name, inner)
    monkeypatch.setitem(sys.modules, package, outer)
    monkeypatch.setitem(sys.modules, f"{package}.{name}", inner)


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    runtime = FakeRuntime(devices=4, lose_records=True)
    install(monkeypatch, "torch_npu", "npu", runtime)
    return runtime


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    runtime = FakeRuntime(devices=4, lose_records=False)
    install(monkeypatch, "torch", "cuda", runtime)
    return runtime


@pytest.fixture(params=["npu", "cuda"])
def platform(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def runtime(platform: str, request: pytest.FixtureRequest) -> FakeRuntime:
    runtime = request.getfixturevalue(platform)
    assert isinstance(runtime, FakeRuntime)
    return runtime


class Thread:
    """A thread with a name; `join` raises what it raised."""

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        self._raised: list[BaseException] = []
        self._work = work
        self.thread = threading.Thread(target=self._run, name=name)
        self.thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._raised.append(error)

    def join(self) -> None:
        self.thread.join(60)
        assert not self.thread.is_alive()
        for error in self._raised:
            raise error


def record(device: Device) -> DeviceEvent:
    """Record an event on a compute thread of its own."""
    events: list[DeviceEvent | None] = []
    Thread("compute", lambda: events.append(device.record())).join()
    (event,) = events
    assert event is not None
    return event


def test_an_npu_event_is_waited_for_through_a_stream_of_the_waiting_thread(
    npu: FakeRuntime,
) -> None:
    device = device_for("npu", 2)
    first, second = record(device), record(device)

    def wait() -> None:
        first.synchronize()
        second.synchronize()

    Thread("events", wait).join()
    recording = ["compute: set_device 2", "compute: Event blocking=False", "compute: record"]
    assert npu.calls == [
        *recording,
        *recording,  # on another thread of that name
        "events: set_device 2",
        "events: Stream 2",
        "events: wait_event",
        "events: stream synchronize",
        "events: wait_event",
        "events: stream synchronize",
    ]


def test_a_cuda_event_is_waited_for_asleep(cuda: FakeRuntime) -> None:
    event = record(device_for("cuda", 1))
    Thread("events", event.synchronize).join()
    assert cuda.calls == [
        "compute: set_device 1",
        "compute: Event blocking=True",
        "compute: record",
        "events: set_device 1",
        "events: event synchronize",
    ]


def test_waiting_lasts_until_the_work_is_done(platform: str, runtime: FakeRuntime) -> None:
    event = record(device_for(platform, 0))
    runtime.done.clear()
    over = threading.Event()

    def wait() -> None:
        event.synchronize()
        over.set()

    thread = Thread("events", wait)
    assert not over.wait(0.05)
    runtime.done.set()
    thread.join()
    assert over.is_set()


def test_each_record_is_an_event_of_its_own(platform: str, runtime: FakeRuntime) -> None:
    device = device_for(platform, 0)
    assert device.record() is not device.record()
    assert [call.split()[1] for call in runtime.calls].count("record") == 2


def test_any_number_of_threads_wait_for_events_of_any_other(
    platform: str, runtime: FakeRuntime
) -> None:
    device = device_for(platform, 0)
    events = [record(device) for _ in range(8)]
    barrier = threading.Barrier(8)

    def wait() -> None:
        barrier.wait(60)
        for event in events:
            event.synchronize()

    threads = [Thread(f"waiter-{number}", wait) for number in range(8)]
    for thread in threads:
        thread.join()
    for number in range(8):
        mine = [call for call in runtime.calls if call.startswith(f"waiter-{number}:")]
        assert mine[0].endswith("set_device 0")
        assert sum("set_device" in call for call in mine) == 1
        assert sum("synchronize" in call for call in mine) == 8


def test_a_thread_sets_its_device_once(platform: str, runtime: FakeRuntime) -> None:
    device = device_for(platform, 3)
    assert runtime.calls == []  # making it sets nothing

    def enter() -> None:
        for _ in range(3):
            device.enter_thread()
            assert runtime.device == 3
        device.record()

    for name in ("one", "two"):
        Thread(name, enter).join()
        assert runtime.calls.count(f"{name}: set_device 3") == 1


def test_a_thread_that_changes_devices_sets_each(platform: str, runtime: FakeRuntime) -> None:
    one, two = device_for(platform, 1), device_for(platform, 2)

    def change() -> None:
        for device, index in ((one, 1), (two, 2), (one, 1)):
            device.enter_thread()
            assert runtime.device == index

    Thread("changing", change).join()


def test_a_device_that_could_not_be_set_is_set_the_next_time(
    platform: str, runtime: FakeRuntime
) -> None:
    device = device_for(platform, 1)

    def enter() -> None:
        runtime.broken = True
        with pytest.raises(RuntimeError, match="device is busy"):
            device.enter_thread()
        runtime.broken = False
        device.enter_thread()
        assert runtime.device == 1

    Thread("trying", enter).join()


@pytest.mark.parametrize("index", [-1, 4, 100])
def test_a_device_that_is_not_there(platform: str, runtime: FakeRuntime, index: int) -> None:
    with pytest.raises(DeviceUnavailableError, match=rf"no {platform} device {index}.*sees 4"):
        device_for(platform, index)
    assert runtime.calls == []


@pytest.mark.parametrize(
    ("platform", "package"), [("npu", "torch_npu"), ("cuda", "torch")], ids=["npu", "cuda"]
)
def test_torch_that_does_not_import(
    platform: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DeviceUnavailableError, match=f"platform {platform} needs torch") as caught:
        device_for(platform, 0)
    assert "install what vLLM needs" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("platform", ["", "tpu", "NPU", "cuda:0", "xpu"])
def test_platforms_that_are_not_known(platform: str) -> None:
    with pytest.raises(DeviceUnavailableError, match="npu, cuda and cpu") as caught:
        device_for(platform, 0)
    assert ascii(platform) in str(caught.value)


def test_a_cpu_has_nothing_to_set_and_nothing_to_wait_for() -> None:
    device = device_for("cpu", 0)
    assert isinstance(device, CpuDevice)
    device.enter_thread()
    assert device.record() is None


REAL = """
import sys
from rd2h.devices import DeviceUnavailableError, device_for
assert device_for("cpu", 0).record() is None
print(any(name.split(".")[0] in ("torch", "torch_npu") for name in sys.modules))
try:
    device_for("cuda", 0)
except DeviceUnavailableError as error:
    print(error)
from torch import cuda
print(all(map(callable, (cuda.Event.record, cuda.Event.synchronize, cuda.set_device))))
"""


@pytest.mark.slow
def test_the_real_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", REAL],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    imported, refused, usable = done.stdout.splitlines()
    assert imported == "False"  # a CPU needs no torch
    assert refused.startswith("there is no cuda device 0: this process sees 0")
    assert usable == "True"
