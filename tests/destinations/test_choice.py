"""On an NPU, Decode keeps main KV in the host pool and Prefill must not; elsewhere nobody asks."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from rd2h.connector import SfaRemoteD2HConnector
from rd2h.connector import connector as connector_module
from rd2h.destinations import (
    NoManagerError,
    SparseOffloadError,
    check_prefill_platform,
    decode_destination,
)
from rd2h.devices import CpuDevice
from rd2h.engines.memory import MemoryEngine, MemoryFabric
from serving.ports import free_ports
from tests.connector.engine import groups, kv_config, vllm_config
from tests.destinations.ascend import Caches, FakeManager, HostPool, Rank, install, main, memory

BLOCKS = 16


class OnDevice(torch.Tensor):
    """A tensor that says it is on a device of this number."""

    number = 0

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", self.number)


def _on(index: int) -> torch.Tensor:
    tensor = torch.empty(2).as_subclass(OnDevice)
    tensor.number = index
    return tensor


def test_decode_on_an_npu_reads_into_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(HostPool(1, BLOCKS), 0, {})
    install(monkeypatch, rank.manager)
    assert decode_destination("npu", rank.kv_caches, BLOCKS, 0).main_shared


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_decode_elsewhere_reads_into_the_paged_cache(
    monkeypatch: pytest.MonkeyPatch, platform: str
) -> None:
    # Without so much as an import of vllm-ascend.
    monkeypatch.setitem(sys.modules, "vllm_ascend", None)
    made = decode_destination(platform, {main(0): memory(BLOCKS, 4)}, BLOCKS, 0)
    assert not made.main_shared


def test_decode_on_an_npu_without_offload_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, None)
    with pytest.raises(
        NoManagerError,
        match=r'is off in this engine; set "sparse_kv_offload_config".*--additional-config on the ',
    ):
        decode_destination("npu", {main(0): memory(BLOCKS, 4)}, BLOCKS, 0)


def test_decode_on_an_npu_without_vllm_ascend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm_ascend", None)
    with pytest.raises(NoManagerError, match="this vllm-ascend has no sparse KV offload"):
        decode_destination("npu", {main(0): memory(BLOCKS, 4)}, BLOCKS, 0)


@pytest.mark.parametrize("registered", [True, False])
def test_prefill_on_an_npu_with_offload_is_refused(
    monkeypatch: pytest.MonkeyPatch, registered: bool
) -> None:
    manager = Rank(pool := HostPool(1, BLOCKS), 0, {}).manager
    install(monkeypatch, manager if registered else FakeManager(pool, 0))
    with pytest.raises(
        SparseOffloadError, match=r'is on in this engine; leave out "sparse_kv_offload_config"'
    ):
        check_prefill_platform("npu")


def test_prefill_on_an_npu_without_offload_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, None)
    check_prefill_platform("npu")
    monkeypatch.setitem(sys.modules, "vllm_ascend", None)
    check_prefill_platform("npu")


def test_prefill_elsewhere_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeManager(HostPool(1, BLOCKS), 0))
    check_prefill_platform("cpu")


# --------------------------------------------------------------------------- from the connector


class Npu:
    """Connectors on a platform that says it is an NPU.

    Attributes:
        engines: The transfer engines that were started.
    """

    def __init__(self) -> None:
        self.engines: list[MemoryEngine] = []
        self.connectors: list[SfaRemoteD2HConnector] = []

    def start(self, *_: object, **__: object) -> MemoryEngine:
        self.engines.append(MemoryEngine(MemoryFabric()))
        return self.engines[-1]

    def register(self, role: str, caches: Caches) -> None:
        config = vllm_config(role, port=free_ports(), extra={"transfer_backend": "host"})
        of = kv_config(BLOCKS, groups(main(0)))
        self.connectors.append(SfaRemoteD2HConnector(config, KVConnectorRole.WORKER, of))
        # vLLM's type is that of a cache without parts; vllm-ascend registers tuples.
        self.connectors[-1].register_kv_caches(caches)  # type: ignore[arg-type]


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Npu]:
    made = Npu()
    platform = SimpleNamespace(device_type="npu")
    monkeypatch.setattr(connector_module, "current_platform", platform)
    monkeypatch.setattr(connector_module, "device_for", lambda *_: CpuDevice())
    monkeypatch.setattr(connector_module, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(SfaRemoteD2HConnector, "engine_factory", staticmethod(made.start))
    yield made
    for connector in made.connectors:
        connector.shutdown()


def test_the_connector_of_decode_registers_the_pool(
    monkeypatch: pytest.MonkeyPatch, npu: Npu
) -> None:
    rank = Rank(pool := HostPool(1, BLOCKS), 0, {})
    install(monkeypatch, rank.manager)
    npu.register("kv_consumer", rank.kv_caches)
    (engine,) = npu.engines
    registered = {region.address for region in engine._regions.regions}
    assert registered == {pool.k[0].data_ptr(), pool.v[0].data_ptr()}


@pytest.mark.parametrize("role", ["kv_consumer", "kv_producer"])
def test_the_connector_starts_nothing_on_the_wrong_engine(
    monkeypatch: pytest.MonkeyPatch, npu: Npu, role: str
) -> None:
    manager = Rank(HostPool(1, BLOCKS), 0, {}).manager
    install(monkeypatch, manager if role == "kv_producer" else None)
    with pytest.raises(SparseOffloadError, match="sparse_kv_offload_config"):
        npu.register(role, {main(0): (memory(BLOCKS, 4, 1, 16), memory(BLOCKS, 4, 1, 4))})
    assert npu.engines == []


@pytest.mark.parametrize(
    ("registered", "index"),
    [
        ([memory(2, 2)], 0),
        ([(None, None, memory(2, 2), memory(2, 2))], 0),
        ([(None, None, memory(2, 2), _on(3))], 3),
        ([(None, None), (_on(5),)], 5),
    ],
)
def test_the_device_is_that_of_the_first_tensor_that_is_on_one(
    registered: list[torch.Tensor | Sequence[torch.Tensor | None]], index: int
) -> None:
    caches = dict(zip("abc", registered, strict=False))
    assert connector_module._device_index(caches) == index
