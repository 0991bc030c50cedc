"""The same shape gives the same bytes, and a folder that is there is whole."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import serving.checkpoint
from serving.checkpoint import BENCHMARK, LLAMA, MLA, Shape, write_checkpoint

WEIGHTS = "model.safetensors"


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("shape", [LLAMA, MLA], ids=["llama", "mla"])
def test_the_same_shape_gives_the_same_bytes(shape: Shape, tmp_path: Path) -> None:
    first = write_checkpoint(tmp_path / "first", shape)
    again = write_checkpoint(tmp_path / "again", shape)
    assert set(content(first)) == {"config.json", WEIGHTS, "rd2h.json"}
    assert content(first) == content(again)


def test_another_seed_gives_other_weights(tmp_path: Path) -> None:
    first = load_file(write_checkpoint(tmp_path / "first", LLAMA) / WEIGHTS)
    other = load_file(write_checkpoint(tmp_path / "other", replace(LLAMA, seed=9)) / WEIGHTS)
    assert first.keys() == other.keys()
    assert all(
        np.array_equal(first[name], other[name]) == name.endswith("norm.weight") for name in first
    )


def test_what_is_there_is_used_again(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", LLAMA)
    before = (folder / WEIGHTS).stat()
    assert write_checkpoint(folder, LLAMA) == folder
    assert (folder / WEIGHTS).stat().st_ino == before.st_ino


def test_another_shape_takes_its_place(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", LLAMA)
    write_checkpoint(folder, MLA)
    assert content(folder) == content(write_checkpoint(tmp_path / "fresh", MLA))
    assert {path.name for path in tmp_path.iterdir()} == {"model", "fresh"}


@pytest.mark.parametrize("as_file", [False, True], ids=["folder", "file"])
def test_remains_of_something_else_are_replaced(as_file: bool, tmp_path: Path) -> None:
    path = tmp_path / "model"
    if as_file:
        path.write_text("what is this?")
    else:
        path.mkdir()
        (path / WEIGHTS).write_bytes(b"half")
    write_checkpoint(path, LLAMA)
    assert content(path) == content(write_checkpoint(tmp_path / "fresh", LLAMA))


def test_a_writer_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_arguments: object, **_options: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(serving.checkpoint, "save_file", full)
    with pytest.raises(OSError, match="no space"):
        write_checkpoint(tmp_path / "model", LLAMA)
    assert not list(tmp_path.iterdir())


def test_writers_at_the_same_time(tmp_path: Path) -> None:
    fresh = content(write_checkpoint(tmp_path / "fresh", LLAMA))
    path = tmp_path / "model"
    with ThreadPoolExecutor(4) as pool:
        for folder in pool.map(lambda _: write_checkpoint(path, LLAMA), range(8)):
            assert content(folder) == fresh
    assert {path.name for path in tmp_path.iterdir()} == {"model", "fresh"}


@pytest.mark.parametrize("shape", [LLAMA, MLA, BENCHMARK], ids=["llama", "mla", "benchmark"])
def test_heads_can_be_split_over_two_ranks(shape: Shape) -> None:
    config = json.loads(json.dumps(shape.config()))
    assert config["num_attention_heads"] % 2 == config["num_key_value_heads"] % 2 == 0


def test_the_benchmark_moves_tens_of_megabytes() -> None:
    assert 30e6 < 900 * BENCHMARK.kv_bytes_per_token < 100e6
