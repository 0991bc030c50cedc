"""The part of MemFabric that rd2h uses; the only place that imports the library.

`MemFabricLibrary` turns result codes into exceptions. MemFabric keeps the text of its last error
for each thread: it is cleared before a call and fetched after it, on the thread that calls, so
that it always belongs to that call. `start`, `register` and `stop` belong to one thread at a
time; `read` may run on any number of threads at once, and releases the GIL.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rd2h.engines.binding import EngineBinding
from rd2h.engines.errors import EngineError, EngineUnavailableError, quote_session
from rd2h.engines.segments import Segments
from rd2h.texts import cut

if TYPE_CHECKING:
    from memfabric_hybrid import TransferEngine

__all__ = ["MemFabricError", "MemFabricLibrary"]

_WARN = 2
# MemFabric looks for the driver's version here, in this order, and does not start without it.
_DRIVER_FILES = (Path("/etc/ascend_install.info"), Path("/usr/local/Ascend/driver/version.info"))


class MemFabricError(EngineError):
    """MemFabric answered a call with a code that is not 0.

    Attributes:
        code: The result of the call.
        reason: MemFabric's last error text on this thread; may be empty.
    """

    def __init__(self, doing: str, code: int, reason: str, advice: str) -> None:
        super().__init__(f"{doing}: {_answer(code, reason)}; {advice}")
        self.code = code
        self.reason = reason


class MemFabricLibrary:
    """`memfabric_hybrid`, imported, with one transfer engine in it that is not started.

    Args:
        enter_thread: Called once on every thread, before the first call into the library there.

    Raises:
        EngineUnavailableError: The library is not installed, or does not load on this host.
    """

    def __init__(self, enter_thread: Callable[[], None] | None = None) -> None:
        try:
            # Names one by one: a version that lacks one is an ImportError as well.
            from memfabric_hybrid import (
                TransferEngine,
                get_and_clear_last_err_msg,
                set_conf_store_tls,
                set_log_level,
            )
        except (ImportError, OSError) as error:  # OSError: one of its shared objects
            raise EngineUnavailableError(
                f"the memfabric engine needs MemFabric, which does not import here "
                f"({' '.join(str(error).split())}): pip install memfabric-hybrid==1.3.0"
            ) from error
        self._set_log_level = set_log_level
        self._set_conf_store_tls = set_conf_store_tls
        self._take_error = get_and_clear_last_err_msg
        self._make_engine = TransferEngine
        self._engine: TransferEngine | None = None
        self._enter_thread = enter_thread
        self._thread = threading.local()

    def start(self, binding: EngineBinding) -> int:
        """Start MemFabric in this process; return the port of its session.

        P keeps the store in which both sides find one another, so that a D can come and go.

        Raises:
            EngineUnavailableError: It does not start; nothing of it is left running.
        """
        self._enter()
        failure = f"memfabric does not start as {binding}"
        for name, call in (
            ("set_log_level", lambda: self._set_log_level(_WARN)),
            ("set_conf_store_tls", lambda: self._set_conf_store_tls(False, "")),
        ):
            code, reason = self._call(call)
            if code:
                raise EngineUnavailableError(
                    f"{failure}: {name} {_answer(code, reason)}; install memfabric-hybrid==1.3.0"
                )
        engine = self._engine = self._make_engine()
        code, reason = self._call(
            lambda: engine.initialize(
                f"tcp://{binding.host}",
                binding.host,
                binding.role,
                binding.device_id,
                store_server_role="Prefill",
            )
        )
        if code:
            self.stop()
            raise EngineUnavailableError(
                f"{failure}: initialize {_answer(code, reason)}; {_advice(binding)}"
            )
        port = engine.get_rpc_port()
        if not 0 < port < 2**16:
            self.stop()
            raise EngineUnavailableError(
                f"{failure}: its session got port {port}; free some TCP ports on {binding.host}, "
                "or choose a range with MF_CONFIG_STORE_PORT_START and MF_CONFIG_STORE_PORT_END"
            )
        return port

    def register(self, addresses: list[int], sizes: list[int]) -> None:
        """Register memory: addresses, and as many sizes in bytes.

        Raises:
            EngineError: The counts differ.
            MemFabricError: MemFabric refuses.
        """
        # MemFabric would answer -1, without any text.
        if len(addresses) != len(sizes):
            raise EngineError(
                f"cannot register memory: {len(addresses)} addresses, but {len(sizes)} sizes"
            )
        self._enter()
        engine = self._started()
        code, reason = self._call(lambda: engine.batch_register_memory(addresses, sizes))
        if code:
            raise MemFabricError(
                f"cannot register {len(addresses)} regions, {sum(sizes)} bytes, with memfabric",
                code,
                reason,
                "register only memory that this process has allocated and mapped, and that the "
                "device can reach",
            )

    def read(self, session: str, segments: Segments) -> None:
        """Read segments, at least one, of a peer's memory.

        Raises:
            MemFabricError: The read failed.
        """
        self._enter()
        engine = self._started()
        code, reason = self._call(
            lambda: engine.batch_transfer_sync_read(
                session,
                segments.local.tolist(),
                segments.remote.tolist(),
                segments.lengths.tolist(),
            )
        )
        if code:
            raise MemFabricError(
                f"read from {quote_session(session)} failed ({len(segments)} segments, "
                f"{segments.lengths.sum()} bytes; the first is {segments.describe(0)})",
                code,
                reason,
                "check that the peer is alive and reachable, and that what it announced is what "
                "it registered",
            )

    def stop(self) -> None:
        """End what `start` began; it can be started again. Idempotent."""
        engine, self._engine = self._engine, None
        if engine is not None:
            self._enter()
            engine.destroy()
            engine.unInitialize()

    def _started(self) -> TransferEngine:
        if self._engine is None:
            raise EngineError("memfabric is not started")
        return self._engine

    def _enter(self) -> None:
        if self._enter_thread is not None and not getattr(self._thread, "entered", False):
            self._enter_thread()
            self._thread.entered = True

    def _call(self, call: Callable[[], int]) -> tuple[int, str]:
        """Return the code, and the error text of this very call."""
        self._take_error()
        code = call()
        return (code, self._take_error()) if code else (0, "")


def _answer(code: int, reason: str) -> str:
    """What MemFabric said, on one line."""
    text = cut(" ".join(reason.split()), 300)
    return f"returned {code} ({text or 'MemFabric gives no reason'})"


def _advice(binding: EngineBinding) -> str:
    """What to change when MemFabric does not start; it gives no reason for a missing driver."""
    if not any(file.exists() for file in _DRIVER_FILES):
        return (
            f"this host has no Ascend driver (there is neither {_DRIVER_FILES[0]} nor "
            f"{_DRIVER_FILES[1]}): install it, or mount it into this container"
        )
    return (
        f"check that npu-smi shows device {binding.device_id}, that {binding.host} is an address "
        "of this machine, and that this MemFabric supports the Ascend driver (its lines above)"
    )
