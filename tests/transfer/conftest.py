"""Fixtures of the tests with real sockets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.transfer.ranks import Site, make_site


@pytest.fixture
def site() -> Iterator[Site]:
    with make_site() as made:
        yield made
