import pytest

from rd2h.engines import EngineBinding, EngineUnavailableError, create_engine
from tests.engines.memfabric_fake import HOST


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "node-1.example",
        "::1",
        "",
        "127.1",
        "010.0.0.1",
        "1.2.3.4:5",
        "0.0.0.0",
        "\u0661.1.1.1",
    ],
)
def test_a_host_that_is_not_numeric_ipv4(host: str) -> None:
    with pytest.raises(EngineUnavailableError, match="configure this machine's address") as caught:
        EngineBinding("Decode", 0, host)
    assert "\n" not in str(caught.value)
    assert ascii(host) in str(caught.value)


@pytest.mark.parametrize(("role", "device"), [("decode", 0), ("", 0), ("Decode", -1)])
def test_a_role_or_a_device_that_is_none(role: str, device: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        EngineBinding(role, device, HOST)  # type: ignore[arg-type]


@pytest.mark.parametrize("device", [2**32, True, 1.0, "0", None])
def test_devices_that_the_library_would_refuse(device: object) -> None:
    with pytest.raises(ValueError, match="device number"):
        EngineBinding("Decode", device, HOST)  # type: ignore[arg-type]


def test_a_binding_is_needed() -> None:
    with pytest.raises(EngineUnavailableError, match="role, the device and the IPv4 address"):
        create_engine("memfabric")
