"""The golden frames, as far as the generator needs them: examples for the documentation."""

from __future__ import annotations

from pathlib import Path

import msgspec

__all__ = ["Golden", "example_of", "load_golden"]


class Golden(msgspec.Struct, frozen=True):
    """One frame that a peer sent (or, for version 1, that receivers accept)."""

    name: str
    protocol_version: int
    message: str
    payload_hex: str

    @property
    def payload(self) -> bytes:
        """The message's bytes."""
        return bytes.fromhex(self.payload_hex)


def load_golden(folder: Path) -> list[Golden]:
    """Read every frame in ``folder``, in the order of the files' names."""
    decoder = msgspec.json.Decoder(list[Golden])
    return [
        frame
        for path in sorted(folder.glob("*.json"))
        for frame in decoder.decode(path.read_bytes())
    ]


def example_of(message: str, golden: list[Golden]) -> Golden | None:
    """The frame that shows a message best: newest version, then the first of the file."""
    frames = [frame for frame in golden if frame.message == message]
    return max(frames, key=lambda frame: frame.protocol_version, default=None)
