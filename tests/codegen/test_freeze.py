from pathlib import Path

import pytest

from codegen.evolution import check_evolution
from codegen.freeze import freeze, frozen_path, load_frozen
from codegen.schema import SchemaError, load_schema

ROOT = Path(__file__).parents[2]
NAMES = ["control", "rendezvous"]


@pytest.mark.parametrize("name", NAMES)
def test_a_frozen_schema_reads_back_as_the_schema_at_that_version(
    name: str, tmp_path: Path
) -> None:
    schema = load_schema(ROOT / "schemas" / f"{name}.toml")
    for version in schema.released:
        freeze(schema, tmp_path, version)
    frozen = load_frozen(tmp_path, name)
    assert frozen == {version: schema.at_version(version) for version in schema.released}
    assert check_evolution(schema, frozen) == []


def test_a_frozen_file_is_never_written_again(tmp_path: Path) -> None:
    schema = load_schema(ROOT / "schemas" / "control.toml")
    freeze(schema, tmp_path, 2)
    before = frozen_path(tmp_path, "control", 2).read_bytes()
    with pytest.raises(SchemaError, match="what is released does not change"):
        freeze(schema, tmp_path, 2)
    assert frozen_path(tmp_path, "control", 2).read_bytes() == before


def test_only_a_released_version_is_frozen(tmp_path: Path) -> None:
    schema = load_schema(ROOT / "schemas" / "control.toml")
    with pytest.raises(SchemaError, match="add 4 to `released` first"):
        freeze(schema, tmp_path, 4)
    assert list(tmp_path.iterdir()) == []
