"""Errors in the logs of servers are found, but for those that must be there."""

from __future__ import annotations

import pytest

from tests.serving.logs import errors_in

START = "(APIServer pid=1) INFO 11-30 06:38:10 [api_utils.py:286] non-default args: {}"
STOP = "(APIServer pid=1) INFO 11-30 06:38:16 [x.py:1] [shutdown] API server: shutdown triggered"
BROKEN = "(APIServer pid=1) ERROR 11-30 06:38:16 [async_llm.py:906] AsyncLLM output_handler failed."


@pytest.mark.parametrize(
    "line",
    [
        BROKEN,
        "Traceback (most recent call last):",
        "(Worker pid=3) WARNING 11-30 05:01:19 [x.py:1] Traceback (most recent call last):",
        "(Worker pid=3) ERROR 11-30 05:01:19 [receiver.py:241] request cmpl-1-0 failed: no memory",
        "request cmpl-1-0 failed: no memory",
    ],
)
def test_an_error_is_found(line: str) -> None:
    assert errors_in(f"{START}\n{line}\n", []) == [line]


@pytest.mark.parametrize(
    "line",
    [
        "(Worker pid=3) INFO 11-30 05:01:19 [x.py:1] no errors",
        "(APIServer pid=2) WARNING 11-30 05:01:26 [base.py:380] Traceback (most recent call last):",
    ],
)
def test_what_is_no_error_is_not(line: str) -> None:
    assert not errors_in(line, [])


def test_an_error_that_is_expected_is_not_told() -> None:
    assert not errors_in(BROKEN, ["no such", r"output_handler \w+"])
    assert errors_in(BROKEN, ["no such"]) == [BROKEN]


def test_a_server_that_was_asked_to_stop_may_stumble_until_it_starts_again() -> None:
    assert not errors_in(f"{START}\n{STOP}\n{BROKEN}\n{START}\n", [])
    assert errors_in(f"{STOP}\n{START}\n{BROKEN}\n", []) == [BROKEN]
    assert errors_in(f"{BROKEN}\n{STOP}\n", []) == [BROKEN]
