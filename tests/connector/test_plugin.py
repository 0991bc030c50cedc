from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.metadata import entry_points

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole, supports_hma

from rd2h.connector import Rd2hConnector, SfaRemoteD2HConnector
from rd2h.connector.plugin import register
from tests.connector.engine import kv_config, vllm_config

SHARED = "SfaRemoteD2HConnector"


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[[], object]]:
    """vLLM's own connectors, and nobody else's."""
    own = {
        name: loader
        for name, loader in KVConnectorFactory._registry.items()
        if name not in ("Rd2hConnector", SHARED)
    }
    monkeypatch.setattr(KVConnectorFactory, "_registry", own)
    return own  # type: ignore[return-value]


def ascend(monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    def find_spec(name: str) -> ModuleSpec | None:
        assert name == "vllm_ascend"
        return ModuleSpec(name, None) if installed else None

    monkeypatch.setattr("rd2h.connector.plugin.find_spec", find_spec)


def test_both_names_where_nobody_else_owns_one(
    registry: dict[str, Callable[[], object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ascend(monkeypatch, installed=False)
    for _ in range(2):  # vLLM runs it in each process, and may do so twice
        register()
        assert registry["Rd2hConnector"]() is Rd2hConnector
        assert registry[SHARED]() is SfaRemoteD2HConnector


def test_the_shared_name_is_left_to_vllm_ascend(
    registry: dict[str, Callable[[], object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ascend(monkeypatch, installed=True)
    register()
    assert "Rd2hConnector" in registry
    assert SHARED not in registry


def test_a_name_that_is_taken_stays_with_its_owner(
    registry: dict[str, Callable[[], object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ascend(monkeypatch, installed=False)
    KVConnectorFactory.register_connector(SHARED, "collections", "OrderedDict")
    register()
    assert registry[SHARED]() is not SfaRemoteD2HConnector
    assert registry["Rd2hConnector"]() is Rd2hConnector


@pytest.mark.parametrize(
    ("name", "module", "kind"),
    [
        ("Rd2hConnector", None, Rd2hConnector),
        (SHARED, None, SfaRemoteD2HConnector),
        ("Rd2hConnector", "rd2h.connector", Rd2hConnector),
        (SHARED, "rd2h.connector", SfaRemoteD2HConnector),
    ],
)
def test_vllm_makes_it_by_name_and_by_module(
    name: str, module: str | None, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    ascend(monkeypatch, installed=False)
    if module is None:
        register()
    config = vllm_config("kv_consumer", connector=name, module=module)
    made = KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, kv_config(16))
    assert type(made) is kind
    assert supports_hma(kind)
    assert isinstance(made, SfaRemoteD2HConnector)
    made.shutdown()


def test_the_package_declares_the_entry_point() -> None:
    points = entry_points(group="vllm.general_plugins", name="rd2h")
    assert [point.load() for point in points] == [register] or not points
