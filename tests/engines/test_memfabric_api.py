"""How MemFabric starts, or says why not: on a fake, and on the real library."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rd2h.engines import EngineBinding, EngineError, create_engine
from rd2h.engines import memfabric_api as api
from tests.engines.memfabric_fake import DECODE, HOST, START, FakeFabric, FakeMemFabric, start_error


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the driver's version would be: not there."""
    files = tmp_path / "install.info", tmp_path / "version.info"
    monkeypatch.setattr(api, "_DRIVER_FILES", files)
    return files[1]


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "memfabric_hybrid", None)
    assert "pip install memfabric-hybrid==1.3.0" in start_error()


def test_a_library_that_lacks_a_function(library: FakeMemFabric) -> None:
    del library.TransferEngine
    assert "pip install memfabric-hybrid==1.3.0" in start_error()


def test_a_library_whose_shared_objects_do_not_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "memfabric_hybrid.py"
    broken.write_text("raise OSError('libmf_smem.so: wrong\\nformat')\n")
    monkeypatch.delitem(sys.modules, "memfabric_hybrid", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "(libmf_smem.so: wrong format): pip install" in start_error()


def test_without_a_driver(library: FakeMemFabric, driver: Path) -> None:
    library.answer("initialize", -1)
    text = start_error()
    assert f"as Decode on device 3 at {HOST}: initialize returned -1" in text
    assert "MemFabric gives no reason" in text
    assert "no Ascend driver" in text
    assert str(driver) in text
    assert "install it" in text


def test_a_start_that_fails_with_a_driver(library: FakeMemFabric, driver: Path) -> None:
    driver.touch()
    library.answer("initialize", -7, "no such\ndevice")
    text = start_error()
    assert "initialize returned -7 (no such device)" in text
    assert "npu-smi shows device 3" in text
    assert "no Ascend driver" not in text


def test_a_start_that_failed_can_be_tried_again(
    library: FakeMemFabric, fabric: FakeFabric, driver: Path
) -> None:
    library.answer("initialize", -1)
    start_error()
    assert library.calls[-2:] == ["destroy", "unInitialize"]
    assert library.live is None
    assert fabric.ends == {}
    library.answer("initialize", 0)
    create_engine("memfabric", binding=EngineBinding("Prefill", 0, HOST)).close()
    assert not driver.exists()


@pytest.mark.parametrize("name", ["set_log_level", "set_conf_store_tls"])
def test_a_setting_that_fails(library: FakeMemFabric, name: str) -> None:
    library.answer(name, -2000, "invalid param")
    assert f"{name} returned -2000 (invalid param)" in start_error()
    assert library.live is None


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_a_session_without_a_port_is_not_published(library: FakeMemFabric, port: int) -> None:
    library.port = port
    assert f"its session got port {port}; free some TCP ports" in start_error()


def test_counts_of_addresses_and_sizes(library: FakeMemFabric) -> None:
    bare = api.MemFabricLibrary()
    bare.start(DECODE)
    with pytest.raises(EngineError, match="2 addresses, but 1 sizes"):
        bare.register([1, 2], [3])
    assert library.calls == START
    bare.stop()
    bare.stop()
    with pytest.raises(EngineError, match="not started"):
        bare.register([1], [3])


# ------------------------------------------------------------------------------ the real library

REAL = """
import json, os, sys
out = os.dup(1)
os.dup2(2, 1)  # the library prints its log to standard output
from rd2h.engines import EngineBinding, EngineError, create_engine
texts = []
for role in ("Decode", "Prefill"):  # the second binding: the first one left nothing behind
    try:
        create_engine("memfabric", binding=EngineBinding(role, 0, "127.0.0.1"))
    except EngineError as error:
        texts.append([type(error).__name__, str(error)])
import memfabric_hybrid, threading
engine = memfabric_hybrid.TransferEngine()
docs = {name: getattr(engine, name).__doc__ for name in dir(engine) if name[0] != "_"}
refused = []
for value in (1.0, "1", None, -1, 2**64):
    for lists in (([value], [1]), ([1], [value])):
        try:
            engine.batch_register_memory(*lists)
        except TypeError:
            refused.append(str(value))
code = engine.batch_register_memory([1], [2, 3])
memfabric_hybrid.get_and_clear_last_err_msg()
engine.batch_transfer_sync_read("192.0.2.1:5", [1], [1], [1])
errors = []
look = lambda: errors.append(memfabric_hybrid.get_last_err_msg())
thread = threading.Thread(target=look)
thread.start()
thread.join()
look()
answer = {"texts": texts, "docs": docs, "refused": refused, "code": code, "errors": errors}
os.write(out, json.dumps(answer).encode())
"""


@pytest.fixture(scope="module")
def real() -> dict[str, Any]:
    """What the real library did, in a process of its own: native code may take that down."""
    done = subprocess.run(
        [sys.executable, "-c", REAL], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.mark.slow
def test_the_real_library_has_no_driver_here(real: dict[str, Any]) -> None:
    for role, (kind, text) in zip(("Decode", "Prefill"), real["texts"], strict=True):
        assert kind == "EngineUnavailableError"
        assert f"as {role} on device 0 at 127.0.0.1: initialize returned -1" in text
        assert "no Ascend driver" in text
        assert "\n" not in text


@pytest.mark.slow
def test_what_the_stub_and_the_fake_say_of_the_real_library(real: dict[str, Any]) -> None:
    docs = real["docs"]
    assert "role: str, device_id: typing.SupportsInt, data_op_type" in docs["initialize"]
    assert "store_server_role: str = 'Decode', nic: str = ''" in docs["initialize"]
    for name in ("buffers", "peer_buffers", "lengths"):
        numbers = f"{name}: collections.abc.Sequence[typing.SupportsInt]"
        assert numbers in docs["batch_transfer_sync_read"]
    assert {"get_rpc_port", "batch_register_memory", "destroy", "unInitialize"} <= set(docs)
    assert real["refused"] == [
        str(value) for value in (1.0, "1", None, -1, 2**64) for _ in range(2)
    ]
    assert real["code"] == -1  # as many sizes as addresses
    other, own = real["errors"]
    assert other == ""  # each thread has its own last error
    assert own == "smem trans not initialized yet"
