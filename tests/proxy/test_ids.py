"""Request ids: safe, unique, and the ones that vLLM will make."""

import re
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rd2h.proxy.ids import Minter, attempt_id, external_ids, usable


def minter(mark: str = "a") -> Minter:
    def digits() -> Iterator[str]:
        yield mark * 8
        count = 0
        while True:
            count += 1
            yield f"{count:016x}"

    stream = digits()
    return Minter(lambda _: next(stream))


@pytest.mark.parametrize("client_id", ["a", "job-7", "A.b_c:d-1", "x" * 128])
def test_usable(client_id: str) -> None:
    assert usable(client_id) == client_id


@pytest.mark.parametrize("client_id", [None, "", "a b", "a\n", "ä", "<b>", "x" * 129, "a/b", "a%"])
def test_not_usable(client_id: str | None) -> None:
    assert usable(client_id) is None


def test_what_vllm_makes_of_an_id() -> None:
    assert external_ids("cmpl", "x", 1, 1) == ["cmpl-x-0"]
    assert external_ids("cmpl", "x", 2, 1) == ["cmpl-x-0", "cmpl-x-1"]
    assert external_ids("cmpl", "x", 1, 2) == ["0_cmpl-x-0", "1_cmpl-x-0"]
    assert external_ids("chatcmpl", "x", None, 1) == ["chatcmpl-x"]
    assert external_ids("chatcmpl", "x", None, 2) == ["0_chatcmpl-x", "1_chatcmpl-x"]


clients = st.none() | st.from_regex(r"[A-Za-z0-9._:-]{1,128}\Z")


@given(clients, st.integers(1, 3), st.none() | st.integers(1, 3), st.integers(1, 3))
def test_an_id_of_ours_is_recognised_and_survives_the_connector(
    client: str | None, attempt: int, prompts: int | None, n: int
) -> None:
    ours, other = minter("a"), minter("b")
    request_id = attempt_id(ours.mint(client), attempt)
    prefix = "chatcmpl" if prompts is None else "cmpl"
    for ext_id in external_ids(prefix, request_id, prompts, n):
        assert ours.is_ours(ext_id)
        assert not other.is_ours(ext_id)
        # The connector strips `-` and 8 hex digits from vLLM's internal id, once.
        for internal in (ext_id, f"{ext_id}-0123abcd"):
            assert re.sub(r"-[0-9a-f]{8}\Z", "", internal) == ext_id


def test_ids_differ() -> None:
    ours = minter()
    ids = {attempt_id(ours.mint(client), k) for client in (None, "a", "a") for k in (1, 2)}
    assert len(ids) == 6


def test_an_id_of_somebody_else_is_not_ours() -> None:
    for ext_id in ("", "cmpl-x-0", "chatcmpl-" + "a" * 23, "cmpl-" + "a" * 24 + "x-0"):
        assert not minter().is_ours(ext_id)
