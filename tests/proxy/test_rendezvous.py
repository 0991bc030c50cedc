"""The state machine of a rendezvous: no I/O, the time is passed in."""

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rd2h.proxy.errors import ErrorKind, ProxyError
from rd2h.proxy.rendezvous import Complete, Expired, Gathering, Registry, Send, WaitUntil
from rd2h.wire import Advertisement


def ad(request_id: str) -> Advertisement:
    return Advertisement(
        request_id=request_id, remote_engine_id="d", remote_host="h", remote_port=1,
        remote_tp_size=1, remote_pcp_size=1, remote_dcp_size=1, remote_cached_tokens=0,
    )  # fmt: skip


def gathering(*ids: str, now: float = 100.0) -> Gathering:
    return Gathering(ids, now=now, timeout=10.0, batch_wait=1.0)


def test_one_id() -> None:
    g = gathering("a")
    assert g.step(100) == WaitUntil(110)
    assert g.arrive(ad("a"), 101)
    assert g.step(101) == Send((ad("a"),), whole=True)
    assert g.step(101) == Complete()


def test_all_of_a_list_are_sent_at_once_in_order_of_arrival() -> None:
    g = gathering("a", "b", "c")
    for ext_id in "cab":
        assert g.arrive(ad(ext_id), 101)
    assert g.step(101) == Send((ad("c"), ad("a"), ad("b")), whole=True)


def test_a_part_is_sent_after_a_bounded_wait_that_later_ones_do_not_prolong() -> None:
    g = gathering("a", "b", "c", "d")
    g.arrive(ad("a"), 101)
    assert g.step(101) == WaitUntil(102)
    g.arrive(ad("b"), 101.9)
    assert g.step(101.9) == WaitUntil(102)
    assert g.step(102) == Send((ad("a"), ad("b")), whole=False)
    # The rest comes when D has room again, however long that takes.
    assert g.step(102) == WaitUntil(None)
    assert g.step(100_000) == WaitUntil(None)
    g.arrive(ad("c"), 100_000)
    assert g.step(100_000) == WaitUntil(100_001)
    g.arrive(ad("d"), 100_000.5)
    assert g.step(100_000.5) == Send((ad("c"), ad("d")), whole=False)
    assert g.step(100_000.5) == Complete()


def test_nothing_in_time() -> None:
    g = gathering("a", "b")
    assert g.step(109.9) == WaitUntil(110)
    assert g.step(110) == Expired(10)


def test_a_d_that_answers_is_not_expected_to_ask() -> None:
    g = gathering("a")
    g.answering()
    assert g.step(1000) == WaitUntil(None)


def test_duplicates_and_strangers() -> None:
    g = gathering("a", "b")
    assert g.arrive(ad("a"), 101)
    assert not g.arrive(ad("a"), 101)
    assert not g.arrive(ad("x"), 101)
    assert g.missing == 1


def test_nothing_is_expected() -> None:
    assert gathering().step(100) == Complete()


@given(
    st.integers(1, 6),
    st.lists(st.tuples(st.sampled_from(["arrive", "step", "answer"]), st.integers(0, 6),
                       st.floats(0, 2)), max_size=40),
)  # fmt: skip
def test_whatever_happens_each_id_is_sent_once_and_nothing_is_held_back(
    count: int, happenings: list[tuple[str, int, float]]
) -> None:
    g = gathering(*map(str, range(count)))
    now, arrived, sent = 100.0, set[str](), list[str]()
    for what, which, later in happenings:
        now += later
        if what == "arrive":
            new = which < count and str(which) not in arrived
            assert g.arrive(ad(str(which)), now) is new
            arrived |= {str(which)} if new else set()
        elif what == "answer":
            g.answering()
        else:
            match g.step(now):
                case Send(ads, whole):
                    assert whole is (len(ads) == count)
                    sent += [a.request_id for a in ads]
                case WaitUntil(time):
                    # Never a wait that is over, and never longer than the bound with one in hand.
                    assert time is None or time > now
                    assert len(arrived) < count
                    if len(arrived) > len(sent):
                        assert time is not None
                        assert time <= now + 1.0
                case Expired():
                    assert not arrived
                case Complete():
                    assert len(sent) == count
        assert g.missing == count - len(arrived)
    while isinstance(action := g.step(now := now + 2), Send):
        sent += [a.request_id for a in action.arrived]
    assert len(sent) == len(set(sent))
    assert set(sent) == arrived


# ------------------------------------------------------------------------------------- the registry


def run(test: Callable[[Registry], None]) -> None:
    async def main() -> None:
        registry = Registry(asyncio.get_running_loop().time, lambda ext_id: "ours" in ext_id)
        test(registry)
        assert len(registry) == registry.waiting == 0

    asyncio.run(main())


def refused(registry: Registry, ext_id: str) -> ErrorKind:
    with pytest.raises(ProxyError) as caught:
        registry.post(ad(ext_id))
    assert ext_id in caught.value.message
    return caught.value.kind


def test_the_registry_finds_the_request() -> None:
    def test(registry: Registry) -> None:
        assert refused(registry, "ours-a") is ErrorKind.RENDEZVOUS_LATE
        assert refused(registry, "a") is ErrorKind.RENDEZVOUS_UNKNOWN
        with registry.expect(["ours-a", "ours-b"], timeout=1, batch_wait=1) as waiter:
            assert (len(registry), registry.waiting) == (2, 2)
            registry.post(ad("ours-a"))
            assert (waiter.arrived, waiter.expected, registry.waiting) == (1, 2, 1)
            assert refused(registry, "ours-a") is ErrorKind.RENDEZVOUS_DUPLICATE
            waiter.close()
            assert refused(registry, "ours-b") is ErrorKind.RENDEZVOUS_LATE
            waiter.close()
        assert refused(registry, "ours-a") is ErrorKind.RENDEZVOUS_LATE

    run(test)


def test_a_registration_ends_with_its_context() -> None:
    def test(registry: Registry) -> None:
        with (
            pytest.raises(ZeroDivisionError),
            registry.expect(["ours"], timeout=1, batch_wait=1),
        ):
            raise ZeroDivisionError

    run(test)


def test_closing_ends_the_batches() -> None:
    async def main() -> None:
        registry = Registry(asyncio.get_running_loop().time, lambda _: True)
        with registry.expect(["a", "b"], timeout=60, batch_wait=60) as waiter:
            registry.post(ad("a"))
            collecting = asyncio.create_task(anext(waiter.batches(), None))
            await asyncio.sleep(0)
            waiter.close()
            assert await collecting is None

    asyncio.run(main())
