"""Decode's side of the control protocol: the receiver.

:class:`Receiver` is what a Decode rank uses. Inside, events flow from its threads into the
state machine (:mod:`rd2h.decode.machine`, with the requests in :mod:`rd2h.decode.requests`) and
actions flow out to the socket (:mod:`rd2h.decode.loop`) and the read threads
(:mod:`rd2h.decode.pool`).
"""

from rd2h.decode.errors import PortTakenError, ReceiverBrokenError, ReceiverClosedError
from rd2h.decode.options import ReceiverOptions
from rd2h.decode.pool import Reader
from rd2h.decode.receiver import Receiver, ReceiverStats
from rd2h.decode.requests import Finished, Outcome

__all__ = [
    "Finished",
    "Outcome",
    "PortTakenError",
    "Reader",
    "Receiver",
    "ReceiverBrokenError",
    "ReceiverClosedError",
    "ReceiverOptions",
    "ReceiverStats",
]
