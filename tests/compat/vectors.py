"""The golden frames as typed values: what a peer of each version puts on the wire."""

from pathlib import Path
from typing import Any

import msgspec

from rd2h.wire import (
    LayerMetadata,
    Message,
    MfMeta,
    MfMetaAck,
    ReadDone,
    ReadFailed,
    ReadReadyBatch,
    ReadRequest,
)

__all__ = ["VECTORS", "Vector"]


class Vector(msgspec.Struct, frozen=True):
    """One frame: its bytes, and the fields that were put into it (only those).

    Any: the fields are JSON, handed to constructors as keyword arguments.
    """

    name: str
    protocol_version: int
    message: str
    direction: str
    fields: dict[str, Any]
    payload_hex: str
    zmq_frames_hex: list[str]

    @property
    def payload(self) -> bytes:
        return bytes.fromhex(self.payload_hex)

    @property
    def id(self) -> str:
        return f"v{self.protocol_version}-{self.name}"

    def build(self) -> Message:
        """The message as a program would construct it, giving only the fields of the vector."""
        return _build(self.message, self.fields)


def _build(message: str, fields: dict[str, Any]) -> Message:
    # msgspec.convert is not used here: the vectors must not depend on how the library that is
    # under test fills in defaults.
    match message:
        case "MfMeta":
            layers = msgspec.convert(fields["layers"], dict[str, dict[str, Any]])
            return MfMeta(
                session=str(fields["session"]),
                layers={name: LayerMetadata(**layer) for name, layer in layers.items()},
            )
        case "MfMetaAck":
            return MfMetaAck()
        case "ReadReadyBatch":
            requests = msgspec.convert(fields["read_reqs"], list[dict[str, Any]])
            rest = {key: value for key, value in fields.items() if key != "read_reqs"}
            return ReadReadyBatch(
                read_reqs=[ReadRequest(**request) for request in requests], **rest
            )
        case "ReadDone":
            return ReadDone(**fields)
        case "ReadFailed":
            return ReadFailed(**fields)
    raise AssertionError(message)


_DECODER = msgspec.json.Decoder(list[Vector])

VECTORS = [
    vector
    for path in sorted((Path(__file__).parent / "golden").glob("v*.json"))
    for vector in _DECODER.decode(path.read_bytes())
]
