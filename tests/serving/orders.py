"""What a test tells the tampering connector of a Decode server: files in a folder that both know.

The test gives orders, :mod:`tests.serving.tampering` follows them inside the server. Files, since
they outlive either side and need no port; each is written aside and then renamed, so that nobody
sees half of one.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

import msgspec

from tests.serving.waiting import eventually

__all__ = ["FOLDER_VARIABLE", "Follower", "Hold", "Orders", "Spoil", "SpoilKind"]

FOLDER_VARIABLE = "RD2H_TEST_ORDERS"
"""Environment variable that names the folder."""

HOLD_SECONDS = 180.0
"""How long a read is held if nobody lets it go; a test has failed long before."""

_PAUSE = 0.01

_T = TypeVar("_T", bound=msgspec.Struct)
SpoilKind: TypeAlias = Literal["zero", "exchange"]


class Spoil(msgspec.Struct, frozen=True):
    """Spoil what has been read.

    Attributes:
        id: Tells this order from one before.
        kind: ``zero`` overwrites every byte; ``exchange`` puts one block's bytes in the place of
            another's. To swap the two would not do: attention does not ask for the order of
            blocks, since each key carries its own position.
        block_bytes: Size of a block in one layer.
        reads: Spoil this many reads, a layer each, and then no more.
    """

    id: int
    kind: SpoilKind
    block_bytes: int
    reads: int


class Hold(msgspec.Struct, frozen=True):
    """Let reads wait before they begin.

    Attributes:
        id: Tells this order from one before.
        after: Let this many reads pass.
    """

    id: int
    after: int


class Orders:
    """The test's side; for one thread."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._last_id = 0

    @property
    def environment(self) -> dict[str, str]:
        """For the server that follows them."""
        return {FOLDER_VARIABLE: str(self.folder)}

    @contextlib.contextmanager
    def spoil(self, kind: SpoilKind, block_bytes: int, reads: int = 1_000_000) -> Iterator[None]:
        """Spoil reads within the block; at its end, some must have been spoiled."""
        self._put("spoil", Spoil(self._new_id(), kind, block_bytes, reads))
        try:
            yield
        finally:
            (self.folder / "spoil").unlink()
        assert self._take("spoiled"), "no read was spoiled"

    @contextlib.contextmanager
    def hold(self, after: int = 0) -> Iterator[None]:
        """Hold reads until the end of the block, or until `release`."""
        self._put("hold", Hold(self._new_id(), after))
        try:
            yield
        finally:
            self.release()
            self._take("held")

    def release(self) -> None:
        """Let what is held go on."""
        (self.folder / "hold").unlink(missing_ok=True)

    def wait_held(self) -> None:
        """Wait until a read is held."""
        eventually((self.folder / "held").exists, "a read is held")

    def _new_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def _put(self, name: str, order: msgspec.Struct) -> None:
        aside = self.folder / f".{name}"
        aside.write_bytes(msgspec.json.encode(order))
        aside.rename(self.folder / name)

    def _take(self, name: str) -> bool:
        path = self.folder / name
        found = path.exists()
        path.unlink(missing_ok=True)
        return found


class Follower:
    """The server's side; any thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._passed: dict[int, int] = {}  # reads, by the order
        self._spoiled: dict[int, int] = {}

    def wait(self) -> None:
        """Wait here if reads are held.

        Raises:
            TimeoutError: Nobody let them go.
        """
        hold = self._get("hold", Hold)
        if hold is None:
            return
        passed = self._passed[hold.id] = self._passed.get(hold.id, 0) + 1
        if passed <= hold.after:
            return
        (self._folder / "held").touch()
        deadline = time.monotonic() + HOLD_SECONDS
        while (now := self._get("hold", Hold)) is not None and now.id == hold.id:
            if time.monotonic() > deadline:
                raise TimeoutError(f"a read was held for {HOLD_SECONDS:g} s")
            time.sleep(_PAUSE)

    def spoil(self) -> Spoil | None:
        """How to spoil the read that has just ended, if at all."""
        spoil = self._get("spoil", Spoil)
        if spoil is None:
            return None
        count = self._spoiled[spoil.id] = self._spoiled.get(spoil.id, 0) + 1
        return spoil if count <= spoil.reads else None

    def spoiled(self) -> None:
        """Tell the test that a read was spoiled."""
        (self._folder / "spoiled").touch()

    def _get(self, name: str, kind: type[_T]) -> _T | None:
        try:
            return msgspec.json.decode((self._folder / name).read_bytes(), type=kind)
        except FileNotFoundError:
            return None
