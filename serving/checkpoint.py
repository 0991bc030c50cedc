"""Small seeded checkpoints whose answers hang on the KV cache of the prompt.

The dummy weights of vLLM are so small that a greedy answer hardly looks at the cache: a hand-off
that loses half of it would go unnoticed. With these, a block of one layer that is lost or stale
changes the answer, and the best token leads the next by far more than float32 rounding, so that
another chunking or batch does not (`tests/serving/` proves both).

Same shape, same bytes. Any thread or process may write; the folder appears at once, complete.
"""

import argparse
import fcntl
import json
import math
import os
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from serving.shapes import BENCHMARK, LLAMA, MLA, Gains, LlamaShape, MlaShape, Shape

__all__ = [
    "BENCHMARK",
    "LLAMA",
    "MLA",
    "Gains",
    "LlamaShape",
    "MlaShape",
    "Shape",
    "write_checkpoint",
]

# Goes into the stamp: raise it when the same shape gives other bytes.
_FORMAT = 2
_STAMP = "rd2h.json"


def write_checkpoint(path: Path, shape: Shape) -> Path:
    """Write ``config.json`` and the weights into folder ``path``, once.

    A folder that holds this very checkpoint is left as it is; one that holds anything else is
    replaced.

    Returns:
        ``path``, for ``--model``.

    Raises:
        OSError: The folder cannot be written.
    """
    stamp = json.dumps(
        {"format": _FORMAT, "kind": type(shape).__name__, "shape": asdict(shape)}, indent=1
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    with _alone_in(path.parent):
        if not _holds(path, stamp):
            with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as work:
                fresh = Path(work, "fresh")
                _write(fresh, shape, stamp)
                if path.exists():
                    path.rename(Path(work, "old"))
                fresh.rename(path)
    return path


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Keep other writers, in this process or another, out of a folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _holds(path: Path, stamp: str) -> bool:
    try:
        return (path / _STAMP).read_text() == stamp
    except (FileNotFoundError, NotADirectoryError):
        return False


def _write(folder: Path, shape: Shape, stamp: str) -> None:
    folder.mkdir()
    weights = {name: _weights(shape.seed, name, size, gain) for name, size, gain in shape.tensors()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(shape.config(), indent=1))
    (folder / _STAMP).write_text(stamp)


def _weights(seed: int, name: str, size: tuple[int, ...], gain: float) -> npt.NDArray[np.float32]:
    if not gain:
        return np.ones(size, dtype=np.float32)
    # From its own name, so that a tensor does not depend on those before it.
    random = np.random.default_rng([seed, zlib.crc32(name.encode())])
    scale = np.float32(gain / math.sqrt(size[-1]))
    return random.standard_normal(size, dtype=np.float32) * scale


def main() -> None:
    """Write one: ``python -m serving.checkpoint FOLDER [--mla]``."""
    parser = argparse.ArgumentParser(
        prog="python -m serving.checkpoint",
        description="Write a small model with seeded weights, for tries on a CPU. It takes and "
        "gives token ids from 0 to 1023; there is no tokenizer.",
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--mla", action="store_true", help="latent attention instead of a Llama")
    options = parser.parse_args()
    print(write_checkpoint(options.folder, MLA if options.mla else LLAMA))


if __name__ == "__main__":
    main()
