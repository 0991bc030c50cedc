"""What the layout of a frame says about its sender: the version, what is absent, what is extra.

No message carries a version number. A version only appends fields, so the fields that are there
tell it. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec
from msgspec import Struct

from rd2h.cli.inspect.raw import array_parts, bin_content, map_parts, text_of
from rd2h.wire import (
    MINIMUM_VERSION,
    PROTOCOL_VERSION,
    LayerMetadata,
    Message,
    MfMeta,
    MfMetaAck,
    ReadDone,
    ReadFailed,
    ReadReadyBatch,
    ReadRequest,
)
from rd2h.wire.support import at_key

__all__ = ["SINCE", "Layout", "layout_of"]

# The version that brought each field, in the order of the wire. A test holds it to the schema.
SINCE: Mapping[type[Struct], Mapping[str, int]] = {
    LayerMetadata: {
        "base_addrs": 1,
        "block_len": 1,
        "block_size_scale": 2,
        "tensor_group_idx": 2,
        "main_tensor_count": 2,
        "has_indexer": 2,
    },
    ReadRequest: {
        "ext_id": 1,
        "main_block_ids": 1,
        "indexer_block_ids": 2,
        "main_start_block": 2,
        "indexer_start_block": 2,
    },
    MfMeta: {"session": 1, "layers": 1},
    MfMetaAck: {},
    ReadReadyBatch: {
        "layer_idx": 1,
        "layer_name": 1,
        "read_reqs": 1,
        "done_ext_ids": 2,
        "group_member_idx": 3,
        "tp_ratio": 3,
    },
    ReadDone: {"layer_idx": 1},
    ReadFailed: {"layer_idx": 1, "error": 2},
}


class Layout(msgspec.Struct, frozen=True):
    """How a frame that can be read is laid out.

    Attributes:
        version: The lowest version that has everything that is present.
        exact: Every version whose sender lays the message out just so. Empty for a mix that no
            version sends, such as a batch of version 2 with requests of version 1.
        absent: Fields of the current version that the frame lacks, and that were read as their
            defaults: ``tp_ratio``, ``read_reqs[0].main_start_block``.
        extra: Elements and map keys that the current version does not know, by their paths.
        header_bytes: What comes before the first element.
        element_bytes: The size of each element, by name; one that is not known by its index.
        item_bytes: The size of each request of a batch.
    """

    version: int
    exact: list[int]
    absent: list[str]
    extra: list[str]
    header_bytes: int = 0
    element_bytes: dict[str, int] = {}
    item_bytes: list[int] = []


class _Part(msgspec.Struct, frozen=True):
    """One structure of a frame: where it is, which of its fields are there, what is extra."""

    kind: type[Struct]
    prefix: str
    present: list[str]
    extra: list[str]

    def top(self) -> int:
        """The version that brought the newest of its fields."""
        return max((SINCE[self.kind][name] for name in self.present), default=MINIMUM_VERSION)

    def absent(self) -> list[str]:
        """Its fields that are not there."""
        return [name for name in SINCE[self.kind] if name not in self.present]

    def sent_by(self, version: int) -> bool:
        """Whether a sender of that version puts in just these fields."""
        known = {name for name, since in SINCE[self.kind].items() if since <= version}
        return known == set(self.present)


def layout_of(payload: bytes, message: Message) -> Layout:
    """Look at the bytes of a frame that was read as ``message``."""
    if isinstance(message, MfMetaAck):
        # Three bytes that are no msgpack, the same in every version.
        versions = list(range(MINIMUM_VERSION, PROTOCOL_VERSION + 1))
        return Layout(MINIMUM_VERSION, versions, [], [], element_bytes={"tag": len(payload)})
    elements = array_parts(payload)
    fields = list(SINCE[type(message)])
    names = ["tag", *fields, *(f"[{i}]" for i in range(len(fields) + 1, len(elements)))]
    by_name = dict(zip(names, elements, strict=False))
    parts = [_array(type(message), "", "$", elements, first=1), *_inner(by_name)]
    return Layout(
        version=max(part.top() for part in parts),
        exact=[
            version
            for version in range(MINIMUM_VERSION, PROTOCOL_VERSION + 1)
            if all(part.sent_by(version) and not part.extra for part in parts)
        ],
        absent=[part.prefix + name for part in parts for name in part.absent()],
        extra=[path for part in parts for path in part.extra],
        header_bytes=len(payload) - sum(map(len, elements)),
        element_bytes={name: len(data) for name, data in by_name.items()},
        item_bytes=[len(item) for item in array_parts(by_name.get("read_reqs", b"\x90"))],
    )


def _inner(by_name: Mapping[str, bytes]) -> Iterator[_Part]:
    """Yield the structures inside a message."""
    for index, item in enumerate(array_parts(by_name.get("read_reqs", b"\x90"))):
        prefix = f"read_reqs[{index}]."
        yield _array(ReadRequest, prefix, f"$[3][{index}]", array_parts(item), first=0)
    if "layers" not in by_name:
        return
    known = SINCE[LayerMetadata]
    for raw_name, layer in map_parts(bin_content(by_name["layers"])):
        name = text_of(raw_name)
        keys = [text_of(key) for key, _ in map_parts(layer)]
        yield _Part(
            LayerMetadata,
            at_key("layers", name) + ".",
            [key for key in known if key in keys],
            [at_key(at_key("$[2]", name), key) for key in keys if key not in known],
        )


def _array(kind: type[Struct], prefix: str, path: str, elements: list[bytes], first: int) -> _Part:
    names = list(SINCE[kind])
    end = first + len(names)
    return _Part(
        kind,
        prefix,
        names[: len(elements) - first],
        [f"{path}[{index}]" for index in range(end, len(elements))],
    )
