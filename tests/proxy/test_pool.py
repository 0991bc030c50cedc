"""Choosing engines, counting their load, and taking them in and out; the time is passed in."""

import pytest

from rd2h.proxy.pool import Backoff, Engine, NoEngineError, Pool, Role

BACKOFF = Backoff(failures=3, interval=10, first=1, longest=60)


def pool(*names: str, role: Role = Role.DECODE) -> Pool:
    made = Pool(role, names, BACKOFF)
    for engine in made.engines:
        made.probed(engine, None, 0)
    return made


def test_an_engine_is_out_until_it_answers() -> None:
    p = Pool(Role.PREFILL, ["a"], BACKOFF)
    assert p.up == 0
    assert p.engines[0].next_probe == 0
    with pytest.raises(NoEngineError):
        p.choose()
    p.probed(p.engines[0], None, 5)
    assert p.choose() is p.engines[0]
    assert p.engines[0].next_probe == 15


def test_ties_are_rotated() -> None:
    p = pool("a", "b", "c")
    assert [p.choose().url for _ in range(7)] == ["a", "b", "c", "a", "b", "c", "a"]


def test_the_least_loaded_is_chosen() -> None:
    p = pool("a", "b")
    with p.lease(100) as first:
        with p.lease(10) as second:
            assert first.engine is not second.engine
            with p.lease(80) as third, p.lease(1) as fourth:
                # 10 + 80 is still less than 100.
                assert third.engine is fourth.engine is second.engine
        assert second.engine.load == 0
        assert first.engine.requests == 1
    assert [(e.load, e.requests) for e in p.engines] == [(0, 0), (0, 0)]


def test_a_lease_ends_on_every_way_out_and_only_once() -> None:
    p = pool("a")
    with pytest.raises(ZeroDivisionError), p.lease(5):
        raise ZeroDivisionError
    with p.lease(5) as lease:
        lease.release()
        assert p.engines[0].load == 0
        lease.release()
    assert (p.engines[0].load, p.engines[0].requests) == (0, 0)


def test_engines_that_were_tried_are_left_out() -> None:
    p = pool("a", "b")
    a, b = p.engines
    assert p.choose([a]) is b
    with pytest.raises(NoEngineError):
        p.choose([a, b])


def changes(p: Pool) -> list[str]:
    seen: list[str] = []

    def changed(engine: Engine) -> None:
        seen.append(f"{engine.url} {'in' if engine.up else 'out'}")

    p.changed = changed
    return seen


def test_a_broken_connection_takes_it_out_and_it_is_probed_at_once() -> None:
    p = pool("a")
    seen = changes(p)
    p.failed(p.engines[0], "refused", 100, down=True)
    assert p.up == 0
    assert p.engines[0].next_probe == 100
    assert p.engines[0].last_error == "refused"
    p.failed(p.engines[0], "refused", 100, down=True)
    assert seen == ["a out"]
    p.probed(p.engines[0], None, 101)
    assert seen == ["a out", "a in"]


def test_failures_in_a_row_take_it_out_and_a_success_forgives() -> None:
    p = pool("a")
    [a] = p.engines
    p.failed(a, "500", 0, down=False)
    p.failed(a, "500", 0, down=False)
    p.succeeded(a)
    p.failed(a, "500", 0, down=False)
    p.failed(a, "500", 0, down=False)
    assert p.up == 1
    p.failed(a, "500", 0, down=False)
    assert p.up == 0
    # It may well answer its probe: the more often it is out, the longer.
    assert a.next_probe == 1
    p.probed(a, None, 1)
    for _ in range(3):
        assert p.up == 1
        # A probe that is answered while it is in forgives nothing.
        p.probed(a, None, 1)
        p.failed(a, "500", 1, down=False)
    assert p.up == 0
    assert a.next_probe == 3
    p.probed(a, None, 3)
    p.succeeded(a)
    p.failed(a, "gone", 4, down=True)
    assert a.next_probe == 4


def test_what_fails_while_it_is_out_counts_for_nothing() -> None:
    p = pool("a")
    [a] = p.engines
    for _ in range(30):
        p.failed(a, "gone", 100, down=True)
    assert (p.up, a.failures, a.next_probe) == (0, 30, 100)
    p.probed(a, None, 100)
    p.failed(a, "500", 101, down=False)
    assert p.up == 1
    # Broken again before one request has gone well: not probed at once any more.
    p.failed(a, "gone", 101, down=True)
    assert (p.up, a.next_probe) == (0, 102)


def test_the_delay_between_probes_doubles_up_to_a_limit() -> None:
    p = pool("a")
    [a] = p.engines
    p.failed(a, "gone", 0, down=True)
    delays = []
    for _ in range(9):
        p.probed(a, "gone", 0)
        delays.append(a.next_probe)
    assert delays == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    p.probed(a, None, 0)
    assert a.misses == 0
    assert BACKOFF.delay(10**6) == 60


def test_a_probe_can_take_it_out() -> None:
    p = pool("a")
    seen = changes(p)
    p.probed(p.engines[0], "/health answered 503", 7)
    assert seen == ["a out"]
    assert p.engines[0].next_probe == 8
