"""The conformance tests that mean something for MemFabric, on a library that is a fake.

Left out: what needs two engines in one process (MemFabric has one), more memory after the first
registration (it registers once), or the reason of a failed read (it gives a code and a text).
`test_memfabric` has tests of its own for each of these.
"""

import sys
from collections.abc import Iterator

import pytest

from rd2h.engines import EngineBinding, create_engine
from tests.engines import test_conformance as suite
from tests.engines.memfabric_fake import HOST, FakeFabric, FakeMemFabric, FakePeer
from tests.engines.peers import Ground

peer = suite.peer
reader = suite.reader


@pytest.fixture
def ground(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ground]:
    fabric = FakeFabric()
    library = FakeMemFabric(fabric, needs_device=True)
    monkeypatch.setitem(sys.modules, "memfabric_hybrid", library)
    binding = EngineBinding("Decode", 0, HOST)
    yield Ground(
        "memfabric",
        lambda: create_engine("memfabric", binding=binding, enter_thread=library.set_device),
        lambda size, seed: FakePeer(fabric, size, seed),
    )
    assert library.live is None


test_one_segment = suite.test_one_segment
test_unaligned_segments = suite.test_unaligned_segments_touch_no_neighbouring_byte
test_thousands_of_segments = suite.test_thousands_of_scattered_segments_in_any_order
test_the_last_byte_of_both_buffers = suite.test_the_last_byte_of_both_buffers
test_64_mib_in_one_segment = suite.test_64_mib_in_one_segment
test_empty_segments_move_nothing = suite.test_no_segments_and_empty_segments_move_nothing
test_a_bad_destination = suite.test_a_destination_outside_the_registered_memory
test_ranges_that_wrap = suite.test_ranges_that_pass_the_end_of_the_address_space
test_arrays_that_are_no_segments = suite.test_arrays_that_are_no_segments
test_read_before_register = suite.test_read_before_register
test_two_peers_in_parallel = suite.test_two_peers_in_parallel
test_forget_is_idempotent = suite.test_forget_is_idempotent_and_a_later_read_works
test_use_after_close = suite.test_use_after_close
test_close_during_reads_ends_them = suite.test_close_during_reads_ends_them
