"""What an operator can set in ``kv_connector_extra_config``; documented in docs/connector.md.

Read in one place, when the connector is made: an unknown key, a wrong type or a value that cannot
work stops the engine with one line.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

import msgspec

from rd2h.decode import ReceiverOptions
from rd2h.prefill import FailurePolicy, SenderOptions
from rd2h.texts import listed

__all__ = ["ConnectorOptions", "OptionError", "TransferBackend"]

TransferBackend: TypeAlias = Literal["auto", "host", "nixl", "memfabric"]


class OptionError(ValueError):
    """An option, or a combination of the engine's own, with which rd2h cannot work."""


class ConnectorOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All options. Times are seconds.

    Attributes:
        transfer_backend: The transfer engine; the same on both sides. ``auto``: ``memfabric`` on
            NPUs, ``nixl`` on CUDA, ``host`` (one machine) on CPUs.
        prefill_failure_policy: P: what requests that are lost for a D do to this engine; see
            :class:`rd2h.prefill.SenderOptions`.
        advertise_host: Where the other engine reaches this one: a host name or an address; for
            ``memfabric`` a numeric IPv4 address. None: vLLM's own idea of it, which
            ``VLLM_HOST_IP`` sets.
        handshake_timeout: P: from the first batch for a D rank until it has acknowledged.
        answer_timeout: P: from sending a batch until its answer.
        wait_timeout: P: how long a layer, or a step, waits for memory that D still reads.
        read_threads: D: how many P ranks are read from at a time.
        read_timeout: D: longest single read, for engines that can be told (``nixl``).
        park_timeout: D: how long a batch waits for its requests to get blocks.
        idle_timeout: D: how long a request goes without a batch before it fails.
        remember: D: how long the id of a request that has ended is remembered.
        rendezvous_timeout: D: longest wait for a connection to the metaserver. A rendezvous that
            is not delivered is posted again, with growing pauses of at most 5 s, until the request
            ends.
        shutdown_timeout: How long reads in flight may take when the engine stops.
    """

    transfer_backend: TransferBackend = "auto"
    prefill_failure_policy: FailurePolicy = SenderOptions.failure_policy
    advertise_host: str | None = None
    handshake_timeout: float = SenderOptions.handshake_timeout
    answer_timeout: float = SenderOptions.answer_timeout
    wait_timeout: float = SenderOptions.wait_timeout
    read_threads: int = ReceiverOptions.read_threads
    read_timeout: float = 30.0
    park_timeout: float = ReceiverOptions.park_timeout
    idle_timeout: float = ReceiverOptions.idle_timeout
    remember: float = ReceiverOptions.remember
    rendezvous_timeout: float = 10.0
    shutdown_timeout: float = 5.0

    def __post_init__(self) -> None:
        for name in ("read_timeout", "rendezvous_timeout", "shutdown_timeout"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it is a time above 0 s")
        if self.advertise_host in ("", "0.0.0.0", "::"):
            raise ValueError(
                f"advertise_host is {self.advertise_host!r}; it is an address that the other "
                f"engine can reach"
            )
        # Their own checks, here where the operator's line can still be named.
        self.sender()
        self.receiver()

    @classmethod
    def from_extra_config(cls, extra_config: Mapping[str, object]) -> ConnectorOptions:
        """Read and check the options.

        Raises:
            OptionError: An option is unknown, or its value is not allowed; one line.
        """
        if unknown := sorted(set(extra_config) - set(cls.__struct_fields__)):
            raise OptionError(
                f"kv_connector_extra_config: rd2h has no option {listed(unknown)}; it has "
                f"{', '.join(cls.__struct_fields__)}"
            )
        try:
            return msgspec.convert(dict(extra_config), cls)
        except msgspec.ValidationError as error:
            raise OptionError(f"kv_connector_extra_config: {error}") from error

    def sender(self) -> SenderOptions:
        """P's part."""
        return SenderOptions(
            failure_policy=self.prefill_failure_policy,
            handshake_timeout=self.handshake_timeout,
            answer_timeout=self.answer_timeout,
            wait_timeout=self.wait_timeout,
        )

    def receiver(self) -> ReceiverOptions:
        """D's part."""
        return ReceiverOptions(
            read_threads=self.read_threads,
            park_timeout=self.park_timeout,
            idle_timeout=self.idle_timeout,
            remember=self.remember,
        )
