"""What the two ends of a check say to each other, and what they take from strangers."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rd2h.cli.check.failures import Failure, Side, Step
from rd2h.cli.check.messages import (
    VERSION,
    Busy,
    ConnectBack,
    ConnectedBack,
    ControlError,
    Failed,
    FromDecode,
    FromPrefill,
    Goodbye,
    Hello,
    Prepare,
    Prepared,
    Run,
    VersionError,
    Welcome,
    encode,
    from_decode,
    from_prefill,
)
from rd2h.cli.check.options import EngineName, Pattern

FAILURE = Failure(Side.PREFILL, Step.FIRST_READ, "seen", ["look", "there"])
HELLO = Hello(release="1", host="h", machine="m", engine=EngineName.AUTO)
FROM_DECODE: list[FromDecode] = [
    HELLO,
    ConnectBack(host="h", port=1, token=bytes(16), timeout=0.5),
    Prepare(seed=(1 << 63) - 1, runs=[Run(1, 1, Pattern.STRIDED)]),
    Goodbye(),
    Goodbye(failure=FAILURE),
]
FROM_PREFILL: list[FromPrefill] = [
    Welcome(release="1", engine=EngineName.HOST),
    Busy(host="h"),
    ConnectedBack(),
    Prepared(session="s" * 100_000, address=(1 << 64) - 1, digests=[bytes(32)]),
    Failed(failure=FAILURE),
]


def test_messages_arrive_as_they_were_sent() -> None:
    assert [from_decode(encode(message)) for message in FROM_DECODE] == FROM_DECODE
    assert [from_prefill(encode(message)) for message in FROM_PREFILL] == FROM_PREFILL


@pytest.mark.parametrize("message", [*FROM_DECODE, *FROM_PREFILL], ids=lambda m: type(m).__name__)
def test_every_message_carries_the_version(message: FromDecode | FromPrefill) -> None:
    assert msgspec.msgpack.decode(encode(message))["version"] == VERSION


@pytest.mark.parametrize(
    "other", [{"version": 2, "kind": "hello"}, {"version": 0}, {"version": 9, "kind": "news"}]
)
def test_another_version_is_named_whatever_else_it_says(other: dict[str, object]) -> None:
    payload = msgspec.msgpack.encode(other)
    for read in (from_decode, from_prefill):
        with pytest.raises(VersionError, match="install the same release of rd2h on both"):
            read(payload)


@pytest.mark.parametrize(
    "message",
    [
        ConnectBack(host="h", port=0, token=bytes(16), timeout=1),
        ConnectBack(host="h", port=1, token=bytes(15), timeout=1),
        ConnectBack(host="h", port=1, token=bytes(16), timeout=61),
        ConnectBack(host="h" * 256, port=1, token=bytes(16), timeout=1),
        Prepare(seed=-1, runs=[Run(1, 1, Pattern.STRIDED)]),
        Prepare(seed=1, runs=[]),
        Prepare(seed=1, runs=[Run(1, 1, Pattern.STRIDED)] * 257),
        Prepare(seed=1, runs=[Run(0, 1, Pattern.STRIDED)]),
        Prepare(seed=1, runs=[Run(1, 0, Pattern.STRIDED)]),
        Prepare(seed=1, runs=[Run((1 << 40) + 1, 1, Pattern.STRIDED)]),
        Goodbye(failure=Failure(Side.DECODE, Step.READ, "x" * 4097, [])),
        Goodbye(failure=Failure(Side.DECODE, Step.READ, "x", ["x"] * 21)),
    ],
    ids=repr,
)
def test_what_is_out_of_range_is_no_message(message: FromDecode) -> None:
    with pytest.raises(ControlError):
        from_decode(encode(message))


def test_each_end_takes_only_the_others_messages() -> None:
    for message in FROM_PREFILL:
        with pytest.raises(ControlError):
            from_decode(encode(message))
    for question in FROM_DECODE:
        with pytest.raises(ControlError):
            from_prefill(encode(question))


@given(st.binary(max_size=200))
def test_junk_is_one_error(payload: bytes) -> None:
    for read in (from_decode, from_prefill):
        with pytest.raises(ControlError):
            read(payload)


@given(st.data())
def test_a_damaged_message_is_a_message_or_one_error(data: st.DataObject) -> None:
    payload = bytearray(encode(data.draw(st.sampled_from(FROM_DECODE))))
    for _ in range(data.draw(st.integers(1, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    try:
        from_decode(bytes(payload))
    except ControlError as error:
        assert str(error)


@pytest.mark.parametrize("payload", [b"\x81" * 500_000, b"\x91" * 500_000, b"\xa3kin" * 100])
def test_nesting_without_end(payload: bytes) -> None:
    with pytest.raises(ControlError):
        from_decode(payload)
