"""Prefill's side of the control protocol: the sender.

:class:`Sender` is what a Prefill rank uses. Inside, events flow from its threads into the state
machine (:mod:`rd2h.prefill.machine`) and actions flow out to the sockets
(:mod:`rd2h.prefill.loop`) and the gates (:mod:`rd2h.prefill.gates`).
"""

from rd2h.prefill.errors import LayerSendError, SenderBrokenError, SenderClosedError
from rd2h.prefill.gates import WaitTimeoutError
from rd2h.prefill.options import FailurePolicy, SenderOptions
from rd2h.prefill.sender import DeviceEvent, LayerTask, Sender, SenderStats

__all__ = [
    "DeviceEvent",
    "FailurePolicy",
    "LayerSendError",
    "LayerTask",
    "Sender",
    "SenderBrokenError",
    "SenderClosedError",
    "SenderOptions",
    "SenderStats",
    "WaitTimeoutError",
]
