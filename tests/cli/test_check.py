"""A whole check between two threads on engines in memory: what passes, and what must not."""

from __future__ import annotations

import ctypes
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

import rd2h
import rd2h.cli.check.service
from rd2h.cli.check import decode
from rd2h.cli.check.content import CANARY, content
from rd2h.cli.check.engine import Disagreement, agree, machine_name
from rd2h.cli.check.failures import Side, Step
from rd2h.cli.check.kv_port import KvPort, connect_back
from rd2h.cli.check.memory import HostMemory
from rd2h.cli.check.messages import (
    Busy,
    ConnectBack,
    Failed,
    Goodbye,
    Hello,
    Prepare,
    Prepared,
    Run,
    Welcome,
)
from rd2h.cli.check.options import DecodeOptions, EngineName, Pattern
from rd2h.cli.check.result import CheckResult
from rd2h.engines import EngineError, MemoryRegion, TransferEngine, UInt64Array
from rd2h.engines.memory import MemoryEngine, MemoryFabric
from tests.cli.check_ends import (
    DECODE,
    PREFILL,
    Dealer,
    Wrapped,
    prefill_end,
    run_decode,
    start_on,
)
from tests.engines.forwarding import ForwardingEngine

HELLO = Hello(release="1", host="10.0.0.9", machine="", engine=EngineName.AUTO)
RUN = Run(4096, 4096, Pattern.RANDOM)


def failed_at(result: CheckResult) -> tuple[Side, Step]:
    assert result.failure is not None
    assert not result.ok
    assert result.failure.look
    return result.failure.side, result.failure.step


def test_a_good_check() -> None:
    fabric = MemoryFabric()
    with prefill_end(start_on(fabric)) as prefill:
        result = run_decode(prefill.port, start_on(fabric))
    assert result.failure is None
    assert result.ok
    assert [(read.size, read.pattern) for read in result.reads] == [
        (size, pattern) for size in DECODE.sizes for pattern in DECODE.patterns
    ]
    assert [read.segments for read in result.reads] == [1, 1, 1, 1, 1, 1, 1, 18, 18]
    assert all(len(read.seconds) == 2 and min(read.seconds) > 0 for read in result.reads)
    assert [done.step for done in result.steps] == [
        Step.CONNECT,
        Step.HANDSHAKE,
        Step.CONNECT_BACK,
        Step.PREPARE,
        Step.ENGINE_START,
        Step.ALLOCATE,
        Step.REGISTER,
        Step.FIRST_READ,
        Step.READ,
        Step.COMPARE_BYTES,
        Step.COMPARE_REST,
        Step.COMPARE_DIGEST,
    ]
    assert prefill.outcomes == [rd2h.cli.check.service.Outcome("127.0.0.1", None)]
    assert prefill.begun == [("127.0.0.1", EngineName.NIXL)]
    assert fabric.sessions == frozenset()  # both engines were closed


# ----------------------------------------------------------------------------- wrong bytes


def run_tampered(
    after: Callable[[UInt64Array, UInt64Array], None], options: DecodeOptions = DECODE
) -> CheckResult:
    """A check in which every read is followed by something of the test's."""
    fabric = MemoryFabric()
    made: list[Wrapped] = []

    def start(name: EngineName, host: str) -> TransferEngine:
        made.append(Wrapped(start_on(fabric)(name, host), after))
        return made[-1]

    with prefill_end(start_on(fabric)) as prefill:
        result = run_decode(prefill.port, start, options)
    assert all(engine.closed for engine in made)
    (outcome,) = prefill.outcomes
    assert outcome.failure == result.failure  # prefill is told, word for word
    return result


ONE = replace(DECODE, sizes=(8192,), patterns=(Pattern.RANDOM,))


def poke(address: int, change: Callable[[int], int]) -> None:
    byte = ctypes.c_ubyte.from_address(address)
    byte.value = change(byte.value)


@pytest.mark.parametrize("at", [0, 4095, 8191])
def test_one_wrong_byte_is_found(at: int) -> None:
    def flip(local: UInt64Array, _lengths: UInt64Array) -> None:
        segment, offset = divmod(at, 4096)
        if len(local) > segment:
            poke(int(local[segment]) + offset, lambda value: value ^ 1)

    result = run_tampered(flip, ONE)
    assert failed_at(result) == (Side.DECODE, Step.COMPARE_BYTES)
    assert result.failure is not None
    assert "8K random: 1 of 2 segments are wrong" in result.failure.seen
    assert f"segment {at // 4096} (4,096 bytes" in result.failure.seen
    assert f"from its byte {at % 4096:,}: 0x" in result.failure.seen
    assert result.reads == []


def test_bytes_are_compared_in_every_round() -> None:
    reads = 0

    def flip(local: UInt64Array, _lengths: UInt64Array) -> None:
        nonlocal reads
        reads += 1
        if reads == 3:  # the first read, the first round, the last round
            poke(int(local[0]), lambda value: value ^ 1)

    assert failed_at(run_tampered(flip, ONE)) == (Side.DECODE, Step.COMPARE_BYTES)


def test_a_read_that_writes_nothing_is_no_repeat_of_the_last() -> None:
    fabric = MemoryFabric()

    class Lazy(Wrapped):
        def read(
            self,
            session: str,
            local_addrs: UInt64Array,
            remote_addrs: UInt64Array,
            lengths: UInt64Array,
        ) -> None:
            if self.reads < 2:
                super().read(session, local_addrs, remote_addrs, lengths)

    with prefill_end(start_on(fabric)) as prefill:
        result = run_decode(
            prefill.port, lambda *_: Lazy(MemoryEngine(fabric), lambda *_: None), ONE
        )
    assert failed_at(result) == (Side.DECODE, Step.COMPARE_BYTES)
    assert result.failure is not None
    assert "2 of 2 segments are wrong" in result.failure.seen
    assert "nothing was written there" in result.failure.seen


@pytest.mark.parametrize("pattern", list(Pattern))
def test_a_byte_beside_the_segments_is_found(pattern: Pattern) -> None:
    def spill(local: UInt64Array, lengths: UInt64Array) -> None:
        ends = local + lengths
        # Behind a segment that no other one follows.
        poke(int(next(end for end in ends if end not in local)), lambda _: CANARY ^ 0xFF)

    result = run_tampered(spill, replace(ONE, patterns=(pattern,)))
    assert failed_at(result) == (Side.DECODE, Step.COMPARE_REST)
    assert result.failure is not None
    assert "1 bytes were written that no segment covers" in result.failure.seen
    assert "now 0x5a" in result.failure.seen


def test_a_digest_that_differs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rd2h.cli.check.service, "digest", lambda *_: bytes(32))
    result = run_tampered(lambda *_: None, ONE)
    assert failed_at(result) == (Side.DECODE, Step.COMPARE_DIGEST)
    assert result.failure is not None
    assert "prefill took 0000000000000000 of its own memory" in result.failure.seen


def test_memory_that_is_wrong_on_prefill_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def other_seed(seed: int, offset: int, length: int) -> object:
        return content(seed + 1, offset, length)

    monkeypatch.setattr(rd2h.cli.check.service, "content", other_seed)
    assert failed_at(run_tampered(lambda *_: None, ONE)) == (Side.DECODE, Step.COMPARE_BYTES)


# ------------------------------------------------------------------- what fails on the way


class Broken(ForwardingEngine):
    """An engine that fails where it is told to."""

    def __init__(self, fabric: MemoryFabric, where: str, error: Exception) -> None:
        super().__init__(MemoryEngine(fabric))
        self._where = where
        self._error = error

    def _maybe(self, what: str) -> None:
        if what == self._where:
            raise self._error

    @property
    def session(self) -> str:
        self._maybe("session")
        return super().session

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        self._maybe("register")
        super().register(regions)

    def read(
        self,
        session: str,
        local_addrs: UInt64Array,
        remote_addrs: UInt64Array,
        lengths: UInt64Array,
    ) -> None:
        self._maybe("read" if len(lengths) > 1 else "first read")
        super().read(session, local_addrs, remote_addrs, lengths)

    def close(self) -> None:
        super().close()
        self._maybe("close")


ERRORS = [EngineError("no, said the library"), ValueError("a bug of somebody")]


@pytest.mark.parametrize("error", ERRORS, ids=["engine error", "any other"])
@pytest.mark.parametrize(
    ("where", "side", "step"),
    [
        ("start", Side.PREFILL, Step.ENGINE_START),
        ("register", Side.PREFILL, Step.REGISTER),
        ("session", Side.PREFILL, Step.REGISTER),
        ("start", Side.DECODE, Step.ENGINE_START),
        ("register", Side.DECODE, Step.REGISTER),
        ("first read", Side.DECODE, Step.FIRST_READ),
        ("read", Side.DECODE, Step.READ),
        ("close", Side.DECODE, Step.CLOSE),
    ],
)
def test_a_failure_names_its_end_and_its_step(
    where: str, side: Side, step: Step, error: Exception
) -> None:
    fabric = MemoryFabric()

    def start(_name: EngineName, _host: str) -> TransferEngine:
        if where == "start":
            raise error
        return Broken(fabric, where, error)

    good = start_on(fabric)
    with prefill_end(start if side is Side.PREFILL else good) as prefill:
        result = run_decode(prefill.port, start if side is Side.DECODE else good, ONE)
    assert failed_at(result) == (side, step)
    assert result.failure is not None
    assert result.failure.seen.endswith(str(error))
    assert ("ValueError" in result.failure.seen) == isinstance(error, ValueError)
    (outcome,) = prefill.outcomes
    assert outcome.failure == result.failure
    assert fabric.sessions == frozenset()


def test_an_earlier_failure_counts_for_more_than_one_in_closing() -> None:
    class BrokenTwice(Broken):
        def close(self) -> None:
            self._engine.close()
            raise EngineError("second")

    fabric = MemoryFabric()
    with prefill_end(start_on(fabric)) as prefill:
        result = run_decode(
            prefill.port, lambda *_: BrokenTwice(fabric, "read", EngineError("first")), ONE
        )
    assert failed_at(result) == (Side.DECODE, Step.READ)


@pytest.mark.parametrize("side", list(Side))
def test_memory_that_is_not_there(side: Side) -> None:
    def no_memory(size: int) -> HostMemory:
        raise MemoryError(f"no {size}")

    fabric = MemoryFabric()
    start = start_on(fabric)
    mine = {side: no_memory}
    with prefill_end(start, allocate=mine.get(Side.PREFILL, HostMemory)) as prefill:
        result = run_decode(prefill.port, start, allocate=mine.get(Side.DECODE, HostMemory))
    assert failed_at(result) == (side, Step.ALLOCATE)
    assert fabric.sessions == frozenset()


def test_prefill_allocates_no_more_than_its_limit() -> None:
    fabric = MemoryFabric()
    need = (2 * 18 + 1) * 4096  # random: 18 blocks among twice as many, and one
    for limit, step in ((need - 1, Step.ALLOCATE), (need, None)):
        with prefill_end(start_on(fabric), replace(PREFILL, limit=limit)) as prefill:
            result = run_decode(prefill.port, start_on(fabric))
        if step is None:
            assert result.ok
        else:
            assert failed_at(result) == (Side.PREFILL, step)
            assert result.failure is not None
            assert "decode asks for 148K of memory, and --limit is 151551" in result.failure.seen


# ------------------------------------------------------------------------------ engines


@pytest.mark.parametrize(
    ("decode_name", "prefill_name", "same_machine", "agreed"),
    [
        ("auto", "auto", True, "host"),
        ("auto", "auto", False, "nixl"),
        ("auto", "host", False, "host"),
        ("nixl", "auto", True, "nixl"),
        ("memfabric", "memfabric", True, "memfabric"),
    ],
)
def test_what_the_ends_agree_on(
    decode_name: str, prefill_name: str, same_machine: bool, agreed: str
) -> None:
    names = EngineName(decode_name), EngineName(prefill_name)
    assert agree(*names, same_machine=same_machine) is EngineName(agreed)


def test_what_they_cannot_agree_on() -> None:
    with pytest.raises(Disagreement, match="prefill uses --engine nixl and decode --engine host"):
        agree(EngineName.HOST, EngineName.NIXL, same_machine=True)


def test_another_engine_at_the_other_end() -> None:
    fabric = MemoryFabric()
    with prefill_end(start_on(fabric), replace(PREFILL, engine=EngineName.NIXL)) as prefill:
        result = run_decode(prefill.port, start_on(fabric), replace(DECODE, engine=EngineName.HOST))
    assert failed_at(result) == (Side.PREFILL, Step.HANDSHAKE)
    assert result.failure is not None
    assert "prefill uses --engine nixl and decode --engine host" in result.failure.seen
    assert [outcome.failure for outcome in prefill.outcomes] == [result.failure]


@pytest.mark.parametrize(
    ("machine", "agreed"),
    [(machine_name(), EngineName.HOST), ("", EngineName.NIXL), ("other/1", EngineName.NIXL)],
)
def test_the_host_engine_is_for_one_machine(machine: str, agreed: EngineName) -> None:
    assert machine_name()
    fabric = MemoryFabric()
    with prefill_end(start_on(fabric), machine=machine) as prefill:
        result = run_decode(prefill.port, start_on(fabric), ONE)
    assert result.engine is agreed
    assert result.ok


# --------------------------------------------------------------------------- connections


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    result = run_decode(port, start_on(MemoryFabric()))
    assert failed_at(result) == (Side.DECODE, Step.CONNECT)
    assert result.failure is not None
    assert f"nobody listens at 127.0.0.1 port {port}" in result.failure.seen
    assert "is `rd2h check prefill` running there" in result.failure.look[0]


def test_decode_waits_for_prefill_to_come() -> None:
    fabric = MemoryFabric()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    results: list[CheckResult] = []
    waiting = replace(ONE, wait=15)
    thread = threading.Thread(
        target=lambda: results.append(run_decode(port, start_on(fabric), waiting))
    )
    thread.start()
    time.sleep(0.3)
    with prefill_end(start_on(fabric), replace(PREFILL, port=port)):
        thread.join(20)
    assert [result.ok for result in results] == [True]


def test_a_name_that_leads_nowhere() -> None:
    result = run_decode(1, start_on(MemoryFabric()), replace(DECODE, connect="no.such.invalid"))
    assert failed_at(result) == (Side.DECODE, Step.CONNECT)


@pytest.mark.slow
def test_something_else_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        result = run_decode(port, start_on(MemoryFabric()), replace(DECODE, timeout=1))
    assert failed_at(result) == (Side.DECODE, Step.HANDSHAKE)
    assert result.failure is not None
    assert "did not answer in 1 s" in result.failure.seen


def test_prefill_goes_away_while_it_is_asked() -> None:
    with socket.create_server(("127.0.0.1", 0)) as rude:
        port = rude.getsockname()[1]

        def hang_up() -> None:
            for _ in range(2):  # the plain connection, and ZMQ's
                connection, _ = rude.accept()
                connection.close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        begun = time.monotonic()
        result = run_decode(port, start_on(MemoryFabric()))
        thread.join()
    assert time.monotonic() - begun < 5  # not its deadline of 10 s
    assert failed_at(result) == (Side.DECODE, Step.HANDSHAKE)
    assert result.failure is not None
    assert "closed the connection" in result.failure.seen


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        options = replace(PREFILL, port=taken.getsockname()[1])
        with (
            pytest.raises(rd2h.cli.check.failures.CheckFailed) as raised,
            prefill_end(start_on(MemoryFabric()), options),
        ):
            pass
    failure = raised.value.failure
    assert (failure.side, failure.step) == (Side.PREFILL, Step.BIND)
    assert "Address already in use" in failure.seen


def test_nobody_comes() -> None:
    with prefill_end(start_on(MemoryFabric()), replace(PREFILL, wait=0.1)) as prefill:
        prefill.ended()
    (failure,) = prefill.failures
    assert (failure.side, failure.step) == (Side.PREFILL, Step.WAIT)


# ---------------------------------------------------------------------------- connect back


def test_a_kv_port_that_is_taken() -> None:
    fabric = MemoryFabric()
    with (
        socket.create_server(("", 0)) as taken,
        prefill_end(start_on(fabric)) as prefill,
    ):
        port = taken.getsockname()[1]
        result = run_decode(prefill.port, start_on(fabric), replace(DECODE, kv_port=port))
    assert failed_at(result) == (Side.DECODE, Step.KV_PORT)
    assert result.failure is not None
    assert f"cannot listen on TCP port {port}: Address already in use" in result.failure.seen


def test_prefill_connects_to_the_kv_port_that_was_asked_for() -> None:
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    fabric = MemoryFabric()
    with prefill_end(start_on(fabric)) as prefill:
        result = run_decode(prefill.port, start_on(fabric), replace(ONE, kv_port=port))
    assert result.ok
    (detail,) = [done.detail for done in result.steps if done.step == Step.CONNECT_BACK]
    assert detail == f"prefill reached 127.0.0.1 port {port}"


def test_a_kv_port_that_prefill_cannot_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed(KvPort):
        def __init__(self, host: str, port: int) -> None:
            super().__init__(host, port)
            self._socket.close()  # as a firewall that rejects

    monkeypatch.setattr(decode, "KvPort", Closed)
    fabric = MemoryFabric()
    with prefill_end(start_on(fabric)) as prefill:
        result = run_decode(prefill.port, start_on(fabric))
    assert failed_at(result) == (Side.PREFILL, Step.CONNECT_BACK)
    assert result.failure is not None
    assert "prefill cannot connect to decode at 127.0.0.1 port" in result.failure.seen
    assert result.failure.look[0].startswith("firewall: on the Decode machine")
    assert [outcome.failure for outcome in prefill.outcomes] == [result.failure]


def test_something_else_answers_at_the_kv_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rd2h.cli.check.service, "connect_back", lambda *_: None)
    monkeypatch.setattr(decode, "_CAME", 0.1)
    fabric = MemoryFabric()
    with prefill_end(start_on(fabric)) as prefill:
        result = run_decode(prefill.port, start_on(fabric))
    assert failed_at(result) == (Side.DECODE, Step.CONNECT_BACK)


def test_strangers_at_the_kv_port_are_passed_over() -> None:
    token = bytes(range(16))
    with KvPort("127.0.0.1", 0) as listener:
        with socket.create_connection(("127.0.0.1", listener.port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with socket.create_connection(("127.0.0.1", listener.port)):
            pass
        connect_back("127.0.0.1", listener.port, token, 5)
        assert listener.came(token, 5)
        assert not listener.came(token, 0.1)


# ------------------------------------------------------------------- what is on the control port


def test_junk_on_the_control_port_and_then_a_good_check(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fabric = MemoryFabric()
    with prefill_end(start_on(fabric)) as prefill:
        with socket.create_connection(("127.0.0.1", prefill.port)) as plain:
            plain.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
        with Dealer(prefill.port) as dealer, caplog.at_level(logging.WARNING):
            for _ in range(20):
                dealer.send(b"")
                dealer.send(b"", b"two", b"frames")
                for junk in (b"\xc1", b"\x81" * 1000, b"\xff" * 4096, b"{}", b"\x80"):
                    dealer.send(junk)
                dealer.say(ConnectBack(host="h", port=1, token=bytes(16), timeout=1))
                dealer.say(Prepare(seed=1, runs=[RUN]))
                dealer.say(Goodbye())
            dealer.say(Hello(version=2, release="2", host="h", machine="", engine=EngineName.AUTO))
            refused = dealer.hear()
        assert isinstance(refused, Failed)
        assert "speaks version 2" in refused.failure.seen
        result = run_decode(prefill.port, start_on(fabric), ONE)
    assert result.ok
    assert [outcome.failure for outcome in prefill.outcomes] == [None]
    lines = [record.getMessage() for record in caplog.records]
    assert 0 < len(lines) <= 6, lines


def test_a_message_that_is_too_long_costs_its_sender_the_connection() -> None:
    fabric = MemoryFabric()
    with prefill_end(start_on(fabric)) as prefill:
        with Dealer(prefill.port) as dealer:
            dealer.send(bytes((1 << 20) + 1))
            time.sleep(0.1)
        assert run_decode(prefill.port, start_on(fabric), ONE).ok


def test_a_second_decode_waits_its_turn() -> None:
    fabric = MemoryFabric()
    with prefill_end(start_on(fabric)) as prefill, Dealer(prefill.port) as first:
        first.say(HELLO)
        assert isinstance(first.hear(), Welcome)
        with Dealer(prefill.port) as second:
            second.say(HELLO)
            assert second.hear() == Busy(host="10.0.0.9")
        first.say(Goodbye())
    assert [outcome.failure for outcome in prefill.outcomes] == [None]


@pytest.mark.slow
def test_a_decode_asks_again_until_prefill_is_free() -> None:
    fabric = MemoryFabric()
    with prefill_end(start_on(fabric)) as prefill, Dealer(prefill.port) as first:
        first.say(HELLO)
        first.hear()
        result = run_decode(prefill.port, start_on(fabric), replace(DECODE, timeout=2))
        first.say(Goodbye())
    assert failed_at(result) == (Side.DECODE, Step.HANDSHAKE)
    assert result.failure is not None
    assert "busy with the check of 10.0.0.9" in result.failure.seen


@pytest.mark.slow
def test_a_decode_that_leaves_ends_its_check() -> None:
    fabric = MemoryFabric()
    with prefill_end(start_on(fabric)) as prefill:
        with Dealer(prefill.port) as dealer:
            dealer.say(HELLO)
            dealer.hear()
            dealer.say(Prepare(seed=1, runs=[RUN]))
            prepared = dealer.hear()
            assert isinstance(prepared, Prepared)
            assert fabric.sessions == {prepared.session}
        begun = time.monotonic()
    assert time.monotonic() - begun < 5
    (outcome,) = prefill.outcomes
    assert outcome.failure is not None
    assert (outcome.failure.side, outcome.failure.step) == (Side.PREFILL, Step.RESULT)
    assert fabric.sessions == frozenset()  # and its memory is not open any more


def test_memory_is_prepared_once_in_a_check() -> None:
    fabric = MemoryFabric()
    with prefill_end(start_on(fabric)) as prefill, Dealer(prefill.port) as dealer:
        dealer.say(HELLO)
        dealer.hear()
        for _ in range(2):
            dealer.say(Prepare(seed=1, runs=[RUN]))
        dealer.hear()
        dealer.say(Goodbye())
        prefill.ended()
    assert [outcome.failure for outcome in prefill.outcomes] == [None]


def test_a_read_of_too_many_blocks_is_refused() -> None:
    with prefill_end(start_on(MemoryFabric())) as prefill, Dealer(prefill.port) as dealer:
        dealer.say(HELLO)
        dealer.hear()
        dealer.say(Prepare(seed=1, runs=[Run((1 << 20) + 1, 1, Pattern.CONTIGUOUS)]))
        refused = dealer.hear()
    assert isinstance(refused, Failed)
    assert "more than 1,048,576 blocks" in refused.failure.seen
