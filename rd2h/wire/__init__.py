"""The protocol between Prefill, Decode and the proxy, as typed messages.

`encode` and `decode` are the control protocol (msgpack over ZMQ); `DecodeParams`,
`Advertisement` and `PrefillParams` are the HTTP rendezvous. ``docs/protocol.md`` describes both
to someone who writes a peer in another language. Everything here is pure, may be called from
any thread, and needs msgspec only.
"""

from rd2h.wire.codec import decode, encode
from rd2h.wire.errors import (
    MalformedMessageError,
    UnencodableMessageError,
    UnknownMessageError,
    UnsupportedVersionError,
    WireError,
)
from rd2h.wire.messages import (
    MINIMUM_VERSION,
    PROTOCOL_VERSION,
    DecodeMessage,
    LayerMetadata,
    Message,
    MfMeta,
    MfMetaAck,
    PrefillMessage,
    ReadDone,
    ReadFailed,
    ReadReadyBatch,
    ReadRequest,
)
from rd2h.wire.rendezvous import Advertisement, DecodeParams, PrefillParams

__all__ = [
    "MINIMUM_VERSION",
    "PROTOCOL_VERSION",
    "Advertisement",
    "DecodeMessage",
    "DecodeParams",
    "LayerMetadata",
    "MalformedMessageError",
    "Message",
    "MfMeta",
    "MfMetaAck",
    "PrefillMessage",
    "PrefillParams",
    "ReadDone",
    "ReadFailed",
    "ReadReadyBatch",
    "ReadRequest",
    "UnencodableMessageError",
    "UnknownMessageError",
    "UnsupportedVersionError",
    "WireError",
    "decode",
    "encode",
]
