"""The vLLM connector; the only room that imports vLLM.

``--kv-transfer-config`` finds it by ``"kv_connector": "SfaRemoteD2HConnector"`` and
``"kv_connector_module_path": "rd2h.connector"``, or, when the package is installed, by
``"kv_connector": "Rd2hConnector"`` alone (:mod:`rd2h.connector.plugin`). `Rd2hMultiConnector` is
found in the same two ways.
"""

from rd2h.connector.connector import Rd2hConnector, SfaRemoteD2HConnector
from rd2h.connector.multi import Rd2hMultiConnector
from rd2h.connector.options import ConnectorOptions, OptionError

__all__ = [
    "ConnectorOptions",
    "OptionError",
    "Rd2hConnector",
    "Rd2hMultiConnector",
    "SfaRemoteD2HConnector",
]
