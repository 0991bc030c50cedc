"""The package itself: what it exports, what it imports, how engines are chosen."""

import subprocess
import sys

import pytest

from rd2h import engines
from rd2h.engines import EngineBinding, EngineUnavailableError, TransferEngine, create_engine
from rd2h.engines.host import HostEngine
from rd2h.engines.memfabric import shared_engine
from rd2h.engines.memory import MemoryEngine, MemoryFabric
from rd2h.engines.nixl import NixlEngine
from tests.engines.memfabric_fake import FakeFabric, FakeMemFabric


def test_engines_are_chosen_by_name() -> None:
    assert isinstance(create_engine("host"), HostEngine)
    nixl = create_engine("nixl", timeout=3)
    assert isinstance(nixl, NixlEngine)
    nixl.close()


@pytest.mark.parametrize("name", ["memory", "", "../x", "MemFabric"])
def test_engines_that_are_not_there(name: str) -> None:
    with pytest.raises(EngineUnavailableError, match="choose host, nixl or memfabric"):
        create_engine(name)


def test_a_binding_is_nothing_to_engines_that_need_none() -> None:
    binding = EngineBinding("Decode", 0, "127.0.0.1")
    for name in ("host", "nixl"):
        create_engine(
            name, binding=binding, enter_thread=lambda: pytest.fail("it was called")
        ).close()


def test_every_engine_has_the_type_of_the_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "memfabric_hybrid", FakeMemFabric(FakeFabric()))
    made: list[TransferEngine] = [
        HostEngine(),
        MemoryEngine(MemoryFabric()),
        NixlEngine(),
        shared_engine(EngineBinding("Decode", 0, "127.0.0.1")),
    ]
    for engine in made:
        engine.close()


def test_all_names_exist_in_order() -> None:
    assert [name for name in engines.__all__ if not hasattr(engines, name)] == []


@pytest.mark.slow
def test_importing_the_package_imports_no_library() -> None:
    code = (
        "import rd2h.engines, sys; "
        "print([m for m in sys.modules if m.startswith(('nixl', 'memfabric', 'torch'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
