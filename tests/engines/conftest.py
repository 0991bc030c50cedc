"""The fake of MemFabric's library, for the tests that ask for it."""

import sys
from collections.abc import Iterator

import pytest

from tests.engines.memfabric_fake import FakeFabric, FakeMemFabric


@pytest.fixture
def fabric() -> FakeFabric:
    return FakeFabric()


@pytest.fixture
def library(fabric: FakeFabric, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeMemFabric]:
    library = FakeMemFabric(fabric)
    monkeypatch.setitem(sys.modules, "memfabric_hybrid", library)
    yield library
    assert library.live is None
