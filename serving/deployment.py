"""Prefill servers, Decode servers and the proxy in front of them, started and stopped together."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from serving.client import Client
from serving.launcher import Launcher
from serving.ports import free_ports
from serving.servers import (
    START_SECONDS,
    KvTransfer,
    ProxyServer,
    Server,
    VllmOptions,
    VllmServer,
    start_all,
    stop_all,
)

__all__ = ["Deployment", "DeploymentOptions", "Role", "with_nixl", "with_rd2h"]

Role = Literal["kv_producer", "kv_consumer"]


@dataclass(frozen=True, kw_only=True)
class DeploymentOptions:
    """What belongs to a deployment.

    Attributes:
        prefill: One entry for each P.
        decode: One entry for each D.
        proxy: Options of ``rd2h proxy``; None leaves the proxy out.
    """

    prefill: Sequence[VllmOptions]
    decode: Sequence[VllmOptions]
    proxy: Sequence[str] | None = field(default=())


class Deployment:
    """Servers that work together; a context manager that starts them in parallel.

    Args:
        launcher: Starts them.
        options: Which.
        folder: Where their logs go.
        name: Stands before the servers' names, which are ``p0``, ``d0``, ...

    Attributes:
        prefill: The Ps.
        decode: The Ds.
    """

    def __init__(
        self, launcher: Launcher, options: DeploymentOptions, folder: Path, name: str = ""
    ) -> None:
        def servers(side: str, each: Sequence[VllmOptions]) -> list[VllmServer]:
            return [
                VllmServer(launcher, one, f"{name}{side}{number}", folder)
                for number, one in enumerate(each)
            ]

        self.prefill = servers("p", options.prefill)
        self.decode = servers("d", options.decode)
        self._proxy: ProxyServer | None = None
        if options.proxy is not None:
            self._proxy = ProxyServer(
                launcher,
                [p.url for p in self.prefill],
                [d.url for d in self.decode],
                folder,
                options.proxy,
                name=f"{name}proxy",
            )
        self._clients = ExitStack()

    def __enter__(self) -> Self:
        start_all(self.servers)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def servers(self) -> list[Server]:
        """All of them, the proxy last: it is ready when the others are."""
        servers: list[Server] = [*self.prefill, *self.decode]
        return servers if self._proxy is None else [*servers, self._proxy]

    @property
    def proxy(self) -> ProxyServer:
        """The proxy.

        Raises:
            LookupError: It was left out.
        """
        if self._proxy is None:
            raise LookupError("this deployment has no proxy")
        return self._proxy

    def start(self, seconds: float = START_SECONDS) -> Mapping[str, float]:
        """Start all; the seconds that each took, by name.

        Raises:
            ServingError: One did not start; none is left running.
        """
        return dict(
            zip((s.name for s in self.servers), start_all(self.servers, seconds), strict=True)
        )

    def stop(self) -> None:
        """Stop all."""
        self._clients.close()
        stop_all(self.servers)

    def client(self) -> Client:
        """A client of the proxy; closed with the deployment."""
        return self._clients.enter_context(self.proxy.client())


def with_rd2h(
    options: VllmOptions,
    role: Role,
    *,
    extra: Mapping[str, object] | None = None,
    on_load_failure: Literal["recompute", "fail"] = "fail",
) -> VllmOptions:
    """The options of a server with rd2h's connector, on ports of its own.

    Args:
        options: Of the server.
        role: ``kv_producer`` for P, ``kv_consumer`` for D.
        extra: The connector's own options.
        on_load_failure: What D does with a request whose KV did not come.
    """
    return replace(
        options,
        kv_transfer=KvTransfer(
            connector="SfaRemoteD2HConnector",
            module="rd2h.connector",
            role=role,
            port=free_ports(options.tensor_parallel),
            on_load_failure=on_load_failure,
            extra=extra or {},
        ),
    )


def with_nixl(options: VllmOptions, role: Role) -> VllmOptions:
    """The options of a server with vLLM's own NixlConnector, on ports of its own."""
    port = free_ports(options.tensor_parallel)
    return replace(
        options,
        kv_transfer=KvTransfer(connector="NixlConnector", role=role),
        environment={
            **options.environment,
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),
        },
    )
