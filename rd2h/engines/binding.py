"""What binds a process to its device and its address, for engines that need to be told.

Immutable, checked when made: any thread may use it.
"""

import ipaddress
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from rd2h.engines.errors import EngineUnavailableError, quote_session

__all__ = ["EngineBinding", "EngineRole"]

EngineRole: TypeAlias = Literal["Prefill", "Decode"]


@dataclass(frozen=True, slots=True)
class EngineBinding:
    """One role on one device at one address.

    Attributes:
        role: Which side of the hand-off this process is.
        device_id: Number of the NPU among those that this process may use; at least 0.
        host: Numeric IPv4 address of this machine at which peers reach it.

    Raises:
        ValueError: The role or the device is none: a bug of the caller.
        EngineUnavailableError: The host is not a numeric IPv4 address: the operator's to mend.
    """

    role: EngineRole
    device_id: int
    host: str

    def __post_init__(self) -> None:
        if self.role not in get_args(EngineRole):
            raise ValueError(f"role {self.role!a} must be Prefill or Decode")
        # The library takes 32 bits and says "incompatible function arguments" to anything else.
        if type(self.device_id) is not int or not 0 <= self.device_id < 2**32:
            raise ValueError(f"device {self.device_id!a} must be a device number, 0 or more")
        try:
            usable = not ipaddress.IPv4Address(self.host).is_unspecified
        except ValueError:
            usable = False
        if not usable:
            raise EngineUnavailableError(
                f"host {quote_session(self.host)} is not a numeric IPv4 address that peers can "
                "connect to; configure this machine's address, such as 192.0.2.7: a name, an "
                "IPv6 address or 0.0.0.0 will not do"
            )

    def __str__(self) -> str:
        return f"{self.role} on device {self.device_id} at {self.host}"
