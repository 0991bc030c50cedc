import msgspec
import pytest

from rd2h.connector.options import ConnectorOptions, OptionError


def test_defaults_fit_together_and_reach_both_sides() -> None:
    options = ConnectorOptions.from_extra_config({})
    assert options == ConnectorOptions()
    assert options.sender().failure_policy == "raise"
    assert options.receiver().read_threads == 16


def test_every_option_reaches_its_place() -> None:
    options = ConnectorOptions.from_extra_config(
        {
            "transfer_backend": "nixl",
            "prefill_failure_policy": "contain",
            "advertise_host": "node-7",
            "handshake_timeout": 1,
            "answer_timeout": 2,
            "wait_timeout": 3.5,
            "read_threads": 4,
            "read_timeout": 5,
            "park_timeout": 1.5,
            "idle_timeout": 7,
            "remember": 8,
            "rendezvous_timeout": 9,
            "shutdown_timeout": 10,
        }
    )
    sender, receiver = options.sender(), options.receiver()
    assert (sender.failure_policy, sender.handshake_timeout) == ("contain", 1)
    assert (sender.answer_timeout, sender.wait_timeout) == (2, 3.5)
    assert (receiver.read_threads, receiver.park_timeout) == (4, 1.5)
    assert (receiver.idle_timeout, receiver.remember) == (7, 8)
    assert (options.transfer_backend, options.advertise_host) == ("nixl", "node-7")
    assert (options.read_timeout, options.rendezvous_timeout) == (5, 9)
    assert options.shutdown_timeout == 10


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"read_thread": 4}, ["no option read_thread", "read_threads"]),
        ({"a": 1, "b": 2, "c": 3, "d": 4, "e": 5}, ["a, b, c and 2 more"]),
        ({"read_threads": "4"}, ["`int`", "$.read_threads"]),
        ({"read_threads": 0}, ["read_threads"]),
        ({"read_timeout": "30"}, ["$.read_timeout"]),
        ({"read_timeout": 0}, ["read_timeout is 0", "above 0 s"]),
        ({"shutdown_timeout": -1}, ["shutdown_timeout is -1"]),
        ({"rendezvous_timeout": float("nan")}, ["rendezvous_timeout is nan"]),
        ({"park_timeout": 0}, ["park_timeout"]),
        ({"idle_timeout": None}, ["$.idle_timeout"]),
        ({"transfer_backend": "rdma"}, ["rdma", "$.transfer_backend"]),
        ({"prefill_failure_policy": "ignore"}, ["ignore", "$.prefill_failure_policy"]),
        ({"wait_timeout": 10}, ["wait_timeout 10 s is shorter"]),
        ({"advertise_host": ""}, ["advertise_host is ''"]),
        ({"advertise_host": "0.0.0.0"}, ["advertise_host is '0.0.0.0'"]),
        ({"advertise_host": "::"}, ["advertise_host is '::'"]),
        ({"advertise_host": 7}, ["$.advertise_host"]),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(
    extra: dict[str, object], words: list[str]
) -> None:
    with pytest.raises(OptionError) as caught:
        ConnectorOptions.from_extra_config(extra)
    for word in ["kv_connector_extra_config", *words]:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_options_do_not_change() -> None:
    with pytest.raises(AttributeError):
        ConnectorOptions().read_threads = 3  # type: ignore[misc]
    assert msgspec.structs.replace(ConnectorOptions(), read_threads=3).read_threads == 3
