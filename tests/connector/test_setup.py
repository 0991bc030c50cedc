from collections.abc import Mapping

import pytest

from rd2h.connector.options import OptionError
from rd2h.connector.setup import EngineSetup
from tests.connector.engine import INDEXER, MAIN, groups, kv_config, vllm_config

KV = kv_config(32)


def test_what_is_read_from_vllms_configuration() -> None:
    config = vllm_config("kv_consumer", port=23456, extra={"read_threads": 3})
    setup = EngineSetup.from_config(config, kv_config(40, groups(INDEXER, MAIN)))
    assert config.kv_transfer_config is not None
    assert (setup.side, setup.engine_id) == ("decode", config.kv_transfer_config.engine_id)
    assert (setup.host, setup.base_port, setup.tp_size) == ("127.0.0.1", 23456, 1)
    assert (setup.num_blocks, setup.groups.main, setup.groups.indexer) == (40, 1, 0)
    assert setup.options.read_threads == 3
    assert EngineSetup.from_config(vllm_config("kv_producer"), KV).side == "prefill"


@pytest.mark.parametrize(
    ("index", "size", "port"), [(0, 1, 20000), (3, 1, 20003), (0, 4, 20000), (3, 4, 20012)]
)
def test_ports_follow_the_global_data_parallel_rank(index: int, size: int, port: int) -> None:
    config = vllm_config()
    # What vLLM sets in the processes of a larger deployment.
    config.parallel_config.data_parallel_index = index
    config.parallel_config.data_parallel_rank_local = 0
    config.parallel_config.tensor_parallel_size = size
    assert EngineSetup.from_config(config, KV).base_port == port


@pytest.mark.parametrize(
    ("port", "index", "size", "fits"),
    [(65535, 0, 1, True), (65535, 0, 2, False), (65532, 1, 2, True), (65533, 1, 2, False)],
)
def test_the_highest_port_is_checked(port: int, index: int, size: int, fits: bool) -> None:
    config = vllm_config(port=port)
    config.parallel_config.data_parallel_index = index
    config.parallel_config.tensor_parallel_size = size
    if fits:
        EngineSetup.from_config(config, KV)
        return
    with pytest.raises(OptionError, match="65535"):
        EngineSetup.from_config(config, KV)


def test_both_roles_at_once_are_refused() -> None:
    with pytest.raises(OptionError, match=r"kv_role is kv_both; .*kv_producer.*kv_consumer"):
        EngineSetup.from_config(vllm_config("kv_both"), KV)


@pytest.mark.parametrize(
    ("name", "flag"),
    [
        ("pipeline_parallel_size", "--pipeline-parallel-size"),
        ("prefill_context_parallel_size", "--prefill-context-parallel-size"),
        ("decode_context_parallel_size", "--decode-context-parallel-size"),
    ],
)
def test_other_kinds_of_parallelism_are_refused(name: str, flag: str) -> None:
    config = vllm_config()
    setattr(config.parallel_config, name, 2)
    with pytest.raises(OptionError, match=f"{flag} is 2; .*TP only"):
        EngineSetup.from_config(config, KV)


def test_a_configuration_without_a_connector_is_refused() -> None:
    config = vllm_config()
    config.kv_transfer_config = None
    with pytest.raises(OptionError, match="--kv-transfer-config"):
        EngineSetup.from_config(config, KV)


@pytest.mark.parametrize("extra", [{"no such": 1}, {"read_threads": 0}])
def test_bad_options_are_refused(extra: Mapping[str, object]) -> None:
    with pytest.raises(OptionError, match="kv_connector_extra_config"):
        EngineSetup.from_config(vllm_config(extra=extra), KV)


def test_without_an_option_the_host_is_vllms_own_idea_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = vllm_config()
    assert config.kv_transfer_config is not None
    config.kv_transfer_config.kv_connector_extra_config.clear()
    monkeypatch.setenv("VLLM_HOST_IP", "10.1.2.3")
    assert EngineSetup.from_config(config, KV).host == "10.1.2.3"
    monkeypatch.setenv("VLLM_HOST_IP", "0.0.0.0")
    with pytest.raises(OptionError, match=r"advertise_host.*VLLM_HOST_IP"):
        EngineSetup.from_config(config, KV)
