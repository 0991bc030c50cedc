"""The session text of the NIXL engine.

    nixl/1:<agent name>:<regions>:<metadata>:<check>

`regions` is base64 of little-endian `uint64` pairs (address, bytes), `metadata` is base64 of
NIXL's own agent metadata, and `check` is the CRC-32 of all text before it in hexadecimal: NIXL
parses its metadata in C++, so text that was cut or altered on the way must not reach it.
Pure; any thread may call.
"""

import base64
import binascii
import re
import zlib
from dataclasses import dataclass

import numpy as np

from rd2h.engines.errors import SessionError, quote_session
from rd2h.engines.protocol import MemoryRegion
from rd2h.engines.segments import RegionIndex

__all__ = ["NixlSession"]

_SESSION = re.compile(
    r"(nixl/1:([A-Za-z0-9-]{1,64}):([A-Za-z0-9+/=]*):([A-Za-z0-9+/=]*)):([0-9a-f]{8})"
)


@dataclass(frozen=True, slots=True)
class NixlSession:
    """A parsed session of the NIXL engine.

    Attributes:
        agent: Name of the peer's NIXL agent, new with each process.
        regions: What the peer registered.
        metadata: NIXL's metadata of that agent.
    """

    agent: str
    regions: RegionIndex
    metadata: bytes

    def __str__(self) -> str:
        pairs = [(region.address, region.length) for region in self.regions.regions]
        regions = base64.b64encode(np.array(pairs, "<u8").tobytes()).decode()
        text = f"nixl/1:{self.agent}:{regions}:{base64.b64encode(self.metadata).decode()}"
        return f"{text}:{zlib.crc32(text.encode()):08x}"

    @classmethod
    def parse(cls, text: str) -> "NixlSession":
        """Parse the text that a peer published.

        Raises:
            SessionError: It is not a session of the NIXL engine, version 1, or was altered.
        """
        found = _SESSION.fullmatch(text)
        if found is None:
            raise SessionError(
                f"{quote_session(text)} is not a session of the nixl engine, version 1; do both "
                "sides run the same engine?"
            )
        if zlib.crc32(found[1].encode()) != int(found[5], 16):
            raise SessionError(f"{quote_session(text)} was altered on the way: its check is wrong")
        try:
            pairs = np.frombuffer(base64.b64decode(found[3], validate=True), "<u8").reshape(-1, 2)
            regions = [MemoryRegion(address, length) for address, length in pairs.tolist()]
            metadata = base64.b64decode(found[4], validate=True)
        except (binascii.Error, ValueError) as error:
            raise SessionError(f"{quote_session(text)} is malformed: {error}") from error
        return cls(found[2], RegionIndex(regions), metadata)
