"""Makes the connectors known to vLLM by name; vLLM runs this in each of its processes.

It is the package's entry point in ``vllm.general_plugins``.
"""

from contextlib import suppress
from importlib.util import find_spec

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

__all__ = ["register"]

_MODULE = "rd2h.connector"
# vllm-ascend has a connector of this name, and cannot register it if the name is taken.
_SHARED_NAME = "SfaRemoteD2HConnector"


def register() -> None:
    """Register rd2h's own names, and the shared one if nobody else owns it. Idempotent."""
    names = ["Rd2hConnector", "Rd2hMultiConnector"]
    if find_spec("vllm_ascend") is None:
        names.append(_SHARED_NAME)
    for name in names:
        with suppress(ValueError):  # taken: by an earlier call, or by its owner
            KVConnectorFactory.register_connector(name, _MODULE, name)
