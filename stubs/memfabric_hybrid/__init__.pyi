"""The part of memfabric-hybrid 1.3.0 that rd2h uses; the wheel ships no types.

Taken from the signatures that pybind11 writes into the docstrings, and from trying them. Where
those say `SupportsInt`, this says `int`: the library refuses a float with a `TypeError`, and any
integer that is negative or does not fit.
"""

from collections.abc import Sequence
from typing import Literal, final

@final
class TransDataOpType:
    """Which hardware moves the bytes."""

    SDMA: TransDataOpType
    HOST_RDMA: TransDataOpType
    DEVICE_RDMA: TransDataOpType
    DEVICE_URMA: TransDataOpType
    DEVICE_UBOE: TransDataOpType

class TransferEngine:
    """One end of a transfer. Results are codes: 0 is success."""

    def __init__(self) -> None: ...
    def initialize(
        self,
        store_url: str,
        session_id: str,
        role: Literal["Prefill", "Decode"],
        device_id: int,
        data_op_type: TransDataOpType = ...,
        store_server_role: Literal["Prefill", "Decode"] = "Decode",
        nic: str = "",
    ) -> int:
        """Start; `device_id` has 32 bits."""

    def get_rpc_port(self) -> int:
        """Return the port behind this end's session, or 0 before a successful `initialize`."""

    def batch_register_memory(self, buffer_addrs: Sequence[int], capacities: Sequence[int]) -> int:
        """Register memory; returns 0 and does nothing yet if `initialize` was not called."""

    def batch_transfer_sync_read(
        self,
        dest_session: str,
        buffers: Sequence[int],
        peer_buffers: Sequence[int],
        lengths: Sequence[int],
        flags: int = 0,
    ) -> int:
        """Read; returns when it is over. Releases the GIL."""

    def destroy(self) -> None:
        """Close every connection of this end."""

    def unInitialize(self) -> None:  # noqa: N802 - the library's name
        """End what `initialize` started in this process."""

def set_log_level(level: int) -> int:
    """Set the lowest level that is printed: 0 debug, 1 info, 2 warn, 3 error."""

def set_conf_store_tls(enable: bool, tls_info: str) -> int:
    """Choose whether the configuration store uses TLS."""

def get_last_err_msg() -> str:
    """Return the last error of the calling thread, or an empty text."""

def get_and_clear_last_err_msg() -> str:
    """Return the last error of the calling thread and forget it."""
