"""`memfabric_hybrid` for tests: one module for each process, and the fabric between them.

At least as strict as memfabric-hybrid 1.3.0. Where the real one would crash, hang, or answer 0
and do nothing, this one raises `MisuseError`. Bytes are really moved.
"""

import ctypes
import itertools
import operator
import threading
from collections.abc import Callable, Sequence
from types import ModuleType

import numpy as np
import pytest

from rd2h.engines import (
    EngineBinding,
    EngineUnavailableError,
    MemoryRegion,
    create_engine,
)
from tests.engines.peers import Buffer, pattern

HOST = "127.0.0.1"
DECODE = EngineBinding("Decode", 3, HOST)
START = [
    "set_log_level(2)",
    "set_conf_store_tls(False, '')",
    f"initialize({HOST}, Decode, 3)",
    "get_rpc_port",
]


def start_error(binding: EngineBinding = DECODE) -> str:
    """What is said when MemFabric does not start: one line."""
    with pytest.raises(EngineUnavailableError) as caught:
        create_engine("memfabric", binding=binding)
    assert "\n" not in str(caught.value)
    return str(caught.value)


class MisuseError(AssertionError):
    """The library was called as it must not be called."""


class FakeFabric:
    """Where the ends of one test find one another: regions by session."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.ends: dict[str, list[MemoryRegion]] = {}
        self._ports = 20000

    def join(self, host: str) -> int:
        with self.lock:
            self._ports += 1
            self.ends[f"{host}:{self._ports}"] = []
            return self._ports


class Hold:
    """A call that waits inside the library."""

    def __init__(self) -> None:
        self.started, self.go = threading.Event(), threading.Event()


class FakeMemFabric(ModuleType):
    """The module, in one process.

    Attributes:
        calls: Names of the calls, in order, with what matters of their arguments.
        live: The transfer engine that is initialised.
    """

    def __init__(self, fabric: FakeFabric, *, needs_device: bool = False) -> None:
        super().__init__("memfabric_hybrid")
        self.fabric = fabric
        self.needs_device = needs_device
        self.calls: list[str] = []
        self.live: FakeTransferEngine | None = None
        self.hold: Hold | None = None
        self.port: int | None = None
        self._answers: dict[str, tuple[int, str]] = {}
        self._thread = threading.local()
        self.TransferEngine: Callable[[], FakeTransferEngine] = lambda: FakeTransferEngine(self)

    def answer(self, name: str, code: int, text: str = "") -> None:
        """Let every call of this name fail from now on; with 0, no longer."""
        self._answers[name] = (code, text)

    def set_device(self) -> None:
        """What `enter_thread` does in these tests."""
        if getattr(self._thread, "entered", False):
            raise MisuseError("the device was set twice on one thread")
        self._thread.entered = True
        self.calls.append("set_device")

    def called(self, name: str, note: str = "") -> int:
        """Take note of a call; return the code that the test asked for."""
        if self.needs_device and not getattr(self._thread, "entered", False):
            raise MisuseError(f"{name} on a thread that has not set its device")
        self.calls.append(f"{name}{note}")
        code, text = self._answers.get(name, (0, ""))
        return self.fail(text, code) if code else 0

    def wait_if_held(self) -> None:
        """Wait in a start, a registration or a read, if the test wants that."""
        hold = self.hold
        if hold is not None:
            hold.started.set()
            hold.go.wait(60)

    def fail(self, text: str, code: int = -1) -> int:
        self._thread.error = text or getattr(self._thread, "error", "")
        return code

    def set_log_level(self, level: int) -> int:
        return self.called("set_log_level", f"({operator.index(level)})")

    def set_conf_store_tls(self, enable: bool, tls_info: str) -> int:
        if type(tls_info) is not str:
            raise TypeError("set_conf_store_tls(): incompatible function arguments")
        return self.called("set_conf_store_tls", f"({bool(enable)}, {tls_info!r})")

    def get_last_err_msg(self) -> str:
        return str(getattr(self._thread, "error", ""))

    def get_and_clear_last_err_msg(self) -> str:
        if self.needs_device and not getattr(self._thread, "entered", False):
            raise MisuseError("get_and_clear_last_err_msg on a thread without a device")
        text = self.get_last_err_msg()
        self._thread.error = ""
        return text


class FakeTransferEngine:
    """`TransferEngine`: initialise, register once, read, destroy, un-initialise; in this order."""

    def __init__(self, library: FakeMemFabric) -> None:
        self._library = library
        self._state = "new"
        self.session = ""

    def initialize(
        self,
        store_url: str,
        session_id: str,
        role: str,
        device_id: int,
        data_op_type: object = None,
        store_server_role: str = "Decode",
        nic: str = "",
    ) -> int:
        self._expect("initialize", "new")
        if self._library.calls[-2:] != ["set_log_level(2)", "set_conf_store_tls(False, '')"]:
            raise MisuseError("initialize comes right after set_log_level and set_conf_store_tls")
        if self._library.live is not None:
            raise MisuseError("a second engine was initialised in one process")
        if (store_url, store_server_role) != (f"tcp://{session_id}", "Prefill"):
            raise MisuseError(f"{store_url}, store_server_role {store_server_role}")
        if data_op_type is not None or nic:
            raise MisuseError("the peer leaves data_op_type and nic alone")
        if not 0 <= operator.index(device_id) < 2**32:
            raise TypeError("initialize(): incompatible function arguments")
        self._library.live = self
        if code := self._library.called("initialize", f"({session_id}, {role}, {device_id})"):
            self._state = "failed"
            return code
        self._library.wait_if_held()
        if role not in ("Prefill", "Decode"):
            return self._library.fail("The value of role is invalid.")
        self._state = "started"
        self._port = self._library.fabric.join(session_id)
        self.session = f"{session_id}:{self._port}"
        return 0

    def get_rpc_port(self) -> int:
        self._expect("get_rpc_port", "started", "registered")
        self._library.called("get_rpc_port")
        return self._port if self._library.port is None else self._library.port

    def batch_register_memory(self, buffer_addrs: Sequence[int], capacities: Sequence[int]) -> int:
        self._expect("batch_register_memory", "started")  # the real one: 0, and nothing happens
        addresses, sizes = _numbers(buffer_addrs), _numbers(capacities)
        if code := self._library.called("batch_register_memory", f"({len(addresses)})"):
            return code
        self._library.wait_if_held()
        if len(addresses) != len(sizes):
            return self._library.fail("")  # the real one says this in its log only
        regions = [MemoryRegion(*pair) for pair in zip(addresses, sizes, strict=True)]
        ends = sorted((region.address, region.address + region.length) for region in regions)
        if not regions or any(start == end for start, end in ends):
            raise MisuseError("nothing to register")
        if any(end > start for (_, end), (start, _) in itertools.pairwise(ends)):
            raise MisuseError("regions overlap")
        self._library.fabric.ends[self.session] = regions
        self._state = "registered"
        return 0

    def batch_transfer_sync_read(
        self,
        dest_session: str,
        buffers: Sequence[int],
        peer_buffers: Sequence[int],
        lengths: Sequence[int],
        flags: int = 0,
    ) -> int:
        self._expect("batch_transfer_sync_read", "registered")
        local, remote, sizes = _numbers(buffers), _numbers(peer_buffers), _numbers(lengths)
        if type(dest_session) is not str or operator.index(flags) != 0:
            raise TypeError("batch_transfer_sync_read(): incompatible function arguments")
        if not len(local) == len(remote) == len(sizes) > 0:
            raise MisuseError(f"{len(local)}, {len(remote)}, {len(sizes)} entries")
        library, fabric = self._library, self._library.fabric
        if code := library.called("batch_transfer_sync_read"):
            return code
        library.wait_if_held()
        with fabric.lock:
            source = fabric.ends.get(dest_session)
            if source is None:
                return library.fail("smem trans create failed\nlink down")
            for to, start, size in zip(local, remote, sizes, strict=True):
                if not _inside(fabric.ends[self.session], to, size):
                    return library.fail("local address is not registered")
                if not _inside(source, start, size):
                    return library.fail("remote address is not registered")
                ctypes.memmove(to, start, size)
        self._expect("end of batch_transfer_sync_read", "registered")
        return 0

    def destroy(self) -> None:
        self._expect("destroy", "started", "registered", "failed")
        self._library.called("destroy")
        self._library.fabric.ends.pop(self.session, None)
        self._state = "destroyed"

    def unInitialize(self) -> None:  # noqa: N802
        self._expect("unInitialize", "destroyed")
        self._library.called("unInitialize")
        self._state, self._library.live = "gone", None

    def _expect(self, call: str, *states: str) -> None:
        if self._state not in states:
            raise MisuseError(f"{call} on an engine that is {self._state}")


def _numbers(values: Sequence[int]) -> list[int]:
    """What pybind11 takes: integers of any kind that fit 64 bits. No floats, no texts."""
    numbers = [operator.index(value) for value in values]
    if any(not 0 <= number < 2**64 for number in numbers):
        raise TypeError("incompatible function arguments")
    return numbers


def _inside(regions: list[MemoryRegion], address: int, size: int) -> bool:
    return any(
        region.address <= address and address + size <= region.address + region.length
        for region in regions
    )


class FakePeer:
    """A Prefill end that calls its library as vllm-ascend does, without rd2h's engine."""

    def __init__(self, fabric: FakeFabric, size: int, seed: int) -> None:
        self.seed = seed
        self._buffer = Buffer(size)
        self._buffer.bytes[:] = pattern(self._buffer.size, seed)
        self._fabric = fabric
        library = FakeMemFabric(fabric)
        library.set_log_level(2)
        library.set_conf_store_tls(False, "")
        engine = library.TransferEngine()
        assert not engine.initialize(
            f"tcp://{HOST}", HOST, "Prefill", 0, store_server_role="Prefill"
        )
        assert not engine.batch_register_memory([self._buffer.address], [self._buffer.size])
        self.session = f"{HOST}:{engine.get_rpc_port()}"
        self.address, self.size = self._buffer.address, self._buffer.size

    def kill(self) -> None:
        with self._fabric.lock:
            self._fabric.ends.pop(self.session, None)

    def close(self) -> None:
        self.kill()


def filled(buffer: Buffer) -> int:
    """How many bytes are no longer what `Reader` wrote into it."""
    return int(np.count_nonzero(buffer.bytes != 255))
