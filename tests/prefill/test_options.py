import pytest

from rd2h.prefill import SenderOptions


def test_the_defaults_fit_together() -> None:
    assert SenderOptions().failure_policy == "raise"


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="it is 'raise' or 'contain'"):
        SenderOptions(failure_policy="ignore")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["handshake_timeout", "answer_timeout", "wait_timeout"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_a_time_is_above_zero(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        SenderOptions(**{name: value})  # type: ignore[arg-type]


def test_a_layer_does_not_give_up_before_its_decode_rank_may() -> None:
    with pytest.raises(ValueError, match="wait_timeout 100 s is shorter than"):
        SenderOptions(handshake_timeout=60, answer_timeout=60, wait_timeout=100)
