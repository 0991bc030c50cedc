"""Sender and receiver machines together, under everything a network and a process can do.

After every run: no gate shut for ever, no request lost or left out without a word, nothing
reported twice, no request done with a layer missing or overwritten, every container back at its
idle size.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.transfer.world import DECODES, LAYERS, SPANS, World

IDS = list(SPANS)
small = st.integers(0, 7)


class Together(RuleBasedStateMachine):
    """Hypothesis drives a world; indices are taken modulo what there is."""

    world: World

    @initialize(homes=st.lists(st.integers(0, DECODES - 1), min_size=3, max_size=3))
    def start(self, homes: list[int]) -> None:
        self.world = World(dict(zip(IDS, homes, strict=True)))

    @rule(member=small)
    def compute(self, member: int) -> None:
        self.world.compute(self.world.prefills[member % len(self.world.prefills)])

    @rule(index=small, times=st.integers(1, 6))
    def deliver(self, index: int, times: int) -> None:
        if self.world.connections:
            connection = self.world.connections[index % len(self.world.connections)]
            self.world.establish(connection)
            for _ in range(times):
                self.world.deliver_up(connection)
                self.world.deliver_down(connection)

    @rule()
    def flow(self) -> None:
        """A quiet moment: everything that is on its way arrives."""
        for connection in list(self.world.connections):
            self.world.establish(connection)
            for _ in range(10):
                self.world.deliver_up(connection)
                self.world.deliver_down(connection)

    @rule(index=small, failed=st.booleans())
    def finish_read(self, index: int, failed: bool) -> None:
        if self.world.in_flight:
            flight = self.world.in_flight[index % len(self.world.in_flight)]
            self.world.finish_read(flight, failed and index == 0)

    @rule(index=small)
    def register(self, index: int) -> None:
        self.world.register(IDS[index % len(IDS)])

    @rule(index=small)
    def abort(self, index: int) -> None:
        if index == 0:
            self.world.abort(IDS[index % len(IDS)])

    @rule(member=small, index=small)
    def forget(self, member: int, index: int) -> None:
        if index < len(IDS):
            rank = self.world.prefills[member % len(self.world.prefills)]
            self.world.forget(rank, IDS[index])

    @rule(index=small, keep=st.integers(0, 2), up=st.booleans(), down=st.booleans())
    def cut(self, index: int, keep: int, up: bool, down: bool) -> None:
        if self.world.connections:
            connection = self.world.connections[index % len(self.world.connections)]
            self.world.cut(connection, keep)
            if up:
                self.world.prefill_notices(connection)
            if down:
                self.world.decode_notices(connection)

    @rule(index=small)
    def notice(self, index: int) -> None:
        if self.world.connections:
            connection = self.world.connections[index % len(self.world.connections)]
            self.world.prefill_notices(connection)
            self.world.decode_notices(connection)

    @rule(index=small, layer=st.integers(0, LAYERS - 1), failed=st.booleans())
    def disturb(self, index: int, layer: int, failed: bool) -> None:
        if self.world.connections:
            connection = self.world.connections[index % len(self.world.connections)]
            self.world.disturb(connection, layer, failed)

    @rule(index=small)
    def restart(self, index: int) -> None:
        if index == 0:
            self.world.restart_decode(self.world.decodes[0])
        elif index == 1:
            self.world.restart_prefill(self.world.prefills[1])

    @rule(seconds=st.sampled_from([0.1, 5.0, 11.0, 21.0, 41.0]))
    def advance(self, seconds: float) -> None:
        self.world.advance(seconds)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        self.world.settle()
        # Now every deadline passes, once for each thing that may wait behind another.
        for _ in range(20):
            self.world.advance(50.0)
            self.world.settle()
        self.world.check_idle()


TestTogether = pytest.mark.slow(Together.TestCase)
TestTogether.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)
