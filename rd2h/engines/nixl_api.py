"""The part of NIXL's bindings that rd2h uses, typed; the only place that imports the library.

NIXL ships no stubs. The low-level bindings are used instead of `nixl._api`: they raise one
exception class per status and print nothing. No torch is needed.
"""

import importlib
import logging
from collections.abc import Sequence
from typing import Protocol, cast

from rd2h.engines.errors import EngineUnavailableError
from rd2h.engines.protocol import UInt64Array

__all__ = ["NixlAgent", "NixlBindings", "load_bindings"]


class NixlConfig(Protocol):
    """`nixlAgentConfig`: `pthrDelay` is in microseconds."""

    useProgThread: bool  # noqa: N815 - the library's name
    useListenThread: bool  # noqa: N815
    syncMode: object  # noqa: N815
    pthrDelay: int  # noqa: N815


class NixlAgent(Protocol):
    """`nixlAgent`: statuses are enum values, failures raise, handles are plain integers."""

    def createBackend(self, name: str, parameters: dict[str, str], /) -> int: ...  # noqa: N802, D102
    def registerMem(self, descs: object, /) -> object: ...  # noqa: N802, D102
    def deregisterMem(self, descs: object, /) -> object: ...  # noqa: N802, D102
    def getLocalMD(self) -> bytes: ...  # noqa: N802, D102
    def loadRemoteMD(self, metadata: bytes, /) -> bytes: ...  # noqa: N802, D102
    def invalidateRemoteMD(self, agent: str, /) -> object: ...  # noqa: N802, D102
    def createXferReq(  # noqa: N802, D102
        self, operation: object, local: object, remote: object, agent: str, /
    ) -> int: ...
    def postXferReq(self, request: int, /) -> object: ...  # noqa: N802, D102
    def getXferStatus(self, request: int, /) -> object: ...  # noqa: N802, D102
    def releaseXferReq(self, request: int, /) -> object: ...  # noqa: N802, D102


class NixlBindings(Protocol):
    """The module `nixl._bindings`."""

    DRAM_SEG: object
    NIXL_READ: object
    NIXL_SUCCESS: object
    NIXL_IN_PROG: object
    NIXL_THREAD_SYNC_RW: object
    nixlBackendError: type[Exception]  # noqa: N815
    nixlNotFoundError: type[Exception]  # noqa: N815
    nixlRemoteDisconnectError: type[Exception]  # noqa: N815

    def nixlAgentConfig(self) -> NixlConfig: ...  # noqa: N802, D102
    def nixlAgent(self, name: str, config: NixlConfig, /) -> NixlAgent: ...  # noqa: N802, D102
    def nixlRegDList(  # noqa: N802, D102
        self, memory: object, descs: Sequence[tuple[int, int, int, str]], /
    ) -> object: ...
    def nixlXferDList(self, memory: object, descs: UInt64Array, /) -> object: ...  # noqa: N802, D102


def load_bindings() -> NixlBindings:
    """Import NIXL.

    Raises:
        EngineUnavailableError: It is not installed, or does not load on this host.
    """
    raising = logging.raiseExceptions
    try:
        return cast("NixlBindings", importlib.import_module("nixl._bindings"))
    except ImportError as error:
        raise EngineUnavailableError(
            f"the nixl engine needs NIXL, which does not import here ({error}): "
            "pip install --no-deps nixl==1.5.1 nixl-cu12==1.5.1"
        ) from error
    finally:
        # Importing NIXL switches off the logging module's own error reports, process-wide.
        logging.raiseExceptions = raising
