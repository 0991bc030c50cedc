import threading

import pytest

from rd2h.engines import EngineClosedError
from rd2h.engines.lifecycle import Lifecycle
from tests.engines.peers import in_thread


def test_close_waits_for_calls_inside_and_only_the_first_is_told() -> None:
    lifecycle = Lifecycle("test")
    entered, leave = threading.Event(), threading.Event()
    told: list[bool] = []

    def call() -> None:
        with lifecycle.inside():
            entered.set()
            leave.wait(60)
            assert lifecycle.closing

    thread, raised = in_thread(call)
    assert entered.wait(60)
    lifecycle.begin_close()
    with pytest.raises(EngineClosedError, match="test engine is closed"), lifecycle.inside():
        pass
    closers = [threading.Thread(target=lambda: told.append(lifecycle.close())) for _ in range(3)]
    for closer in closers:
        closer.start()
    assert not told
    leave.set()
    for closer in [*closers, thread]:
        closer.join(60)
    assert sorted(told) == [False, False, True]
    assert not raised
