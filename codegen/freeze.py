"""Writes a released version's frozen schema, and reads them all back."""

from __future__ import annotations

from pathlib import Path

import msgspec

from codegen.schema import Schema, SchemaError, load_schema

__all__ = ["freeze", "frozen_path", "load_frozen"]


def frozen_path(folder: Path, name: str, version: int) -> Path:
    """Where version ``version`` of schema ``name`` stands frozen."""
    return folder / f"{name}-{version}.toml"


def load_frozen(folder: Path, name: str) -> dict[int, Schema]:
    """Read every frozen version of schema ``name``, by the version in the file's name."""
    return {
        int(path.stem.removeprefix(f"{name}-")): load_schema(path)
        for path in sorted(folder.glob(f"{name}-*.toml"))
    }


def freeze(schema: Schema, folder: Path, version: int) -> Path:
    """Write ``schema`` as it is at ``version``; a frozen file is never written again.

    Raises:
        SchemaError: if the schema does not list the version as released, or it is frozen already.
    """
    if version not in schema.released:
        raise SchemaError(f"{schema.name}: add {version} to `released` first")
    path = frozen_path(folder, schema.name, version)
    if path.exists():
        raise SchemaError(f"{path} exists: what is released does not change")
    text = msgspec.toml.encode(_bare(schema.at_version(version))).decode()
    note = f"# {schema.name}, version {version}, as released. Never edited, never removed.\n\n"
    path.write_text(note + text, encoding="utf-8")
    return path


def _bare(part: object) -> object:
    """Plain TOML data without the keys that are not set."""
    match part:
        case msgspec.Struct():
            names = zip(part.__struct_fields__, part.__struct_encode_fields__, strict=True)
            values = {key: _bare(getattr(part, name)) for name, key in names}
            return {
                key: value
                for key, value in values.items()
                if value is not None
                and value is not msgspec.UNSET
                # A default or constant of false is a value; a flag that is false is not set.
                and (value is not False or key in ("default", "const"))
            }
        case list() | tuple():
            return [_bare(item) for item in part]
        case _:
            return part
