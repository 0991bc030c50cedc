"""What can be wrong with a message: one family of errors, each with the place of the fault.

A peer's fault and a fault of this side are two things: the first is logged and survived, the
second is a bug here and must not reach the peer.
"""

__all__ = [
    "MalformedMessageError",
    "UnencodableMessageError",
    "UnknownMessageError",
    "UnsupportedVersionError",
    "WireError",
]


class WireError(ValueError):
    """A message that cannot be read or written.

    Attributes:
        path: Where the fault is: ``$`` is the whole message, ``$[3][0][1]`` an element of an
            array (element 0 of a message is its tag), ``$.remote_port`` or
            ``$["model.layers.0"]`` an entry of a map.
        reason: What is wrong there.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.reason} (at {self.path})"


class UnknownMessageError(WireError):
    """A peer sent a message whose tag no version known here has. It may be a newer peer."""


class MalformedMessageError(WireError):
    """A peer sent bytes that are not the message that they claim to be."""


class UnencodableMessageError(WireError):
    """This side built a message that the peer's version could not read back as it was meant."""


class UnsupportedVersionError(WireError):
    """A protocol version was asked for that this release does not speak."""
