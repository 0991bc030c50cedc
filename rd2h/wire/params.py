"""Reading and writing the rendezvous: typed parameters from and to JSON objects.

Pure; any thread. The classes that fill this base are generated, in
:mod:`rd2h.wire.rendezvous`.
"""

from collections.abc import Mapping
from typing import ClassVar, Self

import msgspec

from rd2h.wire.errors import MalformedMessageError, UnencodableMessageError
from rd2h.wire.support import at_key, explain_map, malformed

__all__ = ["Params"]


class Params(msgspec.Struct, frozen=True, kw_only=True):
    """A JSON object with typed fields: strict about them, tolerant of keys that it does not know.

    An unknown key is dropped on reading: another connector's, or a newer peer's.
    """

    # What a type cannot say: fields that always hold one value, fields that are left out while
    # they hold their default, and maps whose values are parameters themselves.
    CONSTANTS: ClassVar[dict[str, bool]] = {}
    OMITTED: ClassVar[frozenset[str]] = frozenset()
    MAPS: ClassVar[dict[str, "type[Params]"]] = {}

    @classmethod
    def from_params(cls, params: Mapping[str, object]) -> Self:
        """Read the dict that vLLM carries as ``kv_transfer_params``.

        Raises:
            MalformedMessageError: if a key is missing, or holds another type or a value out of
                its range; ``path`` names it (``$.remote_port``).
        """
        try:
            read = msgspec.convert(params, cls)
        except msgspec.ValidationError as error:
            # msgspec does not say which key of a map is at fault: convert one by one to find it.
            for name, item_type in cls.MAPS.items():
                entries = params.get(name)
                if isinstance(entries, Mapping):
                    explain_map(entries, item_type, f"$.{name}")
            raise malformed(error) from error
        read._check_constants("$")
        return read

    @classmethod
    def from_json(cls, body: bytes | str) -> Self:
        """Read a JSON object, such as the body of an HTTP request.

        Raises:
            MalformedMessageError: as `from_params` does, and if ``body`` is not JSON.
        """
        try:
            params = msgspec.json.decode(body, type=dict[str, object])
        except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
            raise malformed(error) from error
        return cls.from_params(params)

    def to_params(self) -> dict[str, object]:
        """The dict that vLLM carries as ``kv_transfer_params``; a new one on every call.

        Raises:
            UnencodableMessageError: if a field holds what its type does not allow.
        """
        try:
            params: dict[str, object] = msgspec.to_builtins(self)
            if type(self).from_params(params) != self:
                raise UnencodableMessageError("$", "the parameters do not read back as they are")
            msgspec.json.encode(params)  # fails for text that no JSON can carry
        except MalformedMessageError as error:
            raise UnencodableMessageError(error.path, error.reason) from error
        except (OverflowError, RecursionError, TypeError, UnicodeError) as error:
            raise UnencodableMessageError("$", str(error)) from error
        # An omitted default is always an empty map: the schema has no other kind.
        return {k: v for k, v in params.items() if v or k not in self.OMITTED}

    def to_json(self) -> bytes:
        """The JSON text of `to_params`.

        Raises:
            UnencodableMessageError: as `to_params` does.
        """
        return msgspec.json.encode(self.to_params())

    def _check_constants(self, path: str) -> None:
        for name, constant in self.CONSTANTS.items():
            if getattr(self, name) != constant:
                raise MalformedMessageError(f"{path}.{name}", f"must be {str(constant).lower()}")
        for name in self.MAPS:
            for key, item in getattr(self, name).items():
                item._check_constants(at_key(f"{path}.{name}", key))
