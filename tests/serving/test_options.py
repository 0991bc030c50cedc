"""Options become arguments, and nothing that was not given is said."""

import json
from dataclasses import replace
from pathlib import Path

from serving.deployment import Role, with_nixl, with_rd2h
from serving.options import KvTransfer, VllmOptions

ROLES: tuple[Role, ...] = ("kv_producer", "kv_consumer")
PLAIN = VllmOptions(model=Path("/models/llama"))


def test_a_plain_server() -> None:
    line = PLAIN.command_line(8100)
    assert {"--model=/models/llama", "--port=8100", "--enable-prefix-caching"} <= set(line)
    assert not [argument for argument in line if argument.startswith(("--block", "--kv-transfer"))]
    assert not [argument for argument in line if "override" in argument]


def test_everything_that_can_be_given() -> None:
    line = replace(
        PLAIN,
        tensor_parallel=2,
        kv_cache_mib=3,
        blocks=19,
        block_size=32,
        prefix_caching=False,
        step_tokens=250,
        arguments=["--long-prefill-token-threshold=100"],
    ).command_line(1)
    assert {
        "--tensor-parallel-size=2",
        "--kv-cache-memory-bytes=3145728",
        "--num-gpu-blocks-override=19",
        "--block-size=32",
        "--no-enable-prefix-caching",
        "--max-num-batched-tokens=250",
    } <= set(line)
    assert line[-1] == "--long-prefill-token-threshold=100"


def test_a_connector_of_vllm() -> None:
    assert json.loads(KvTransfer(connector="Some").to_json()) == {
        "kv_connector": "Some",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "fail",
    }


def test_rd2h_has_ports_of_its_own() -> None:
    both = [
        with_rd2h(replace(PLAIN, tensor_parallel=2), role, extra={"read_threads": 4})
        for role in ROLES
    ]
    configs = [json.loads(options.kv_transfer.to_json()) for options in both if options.kv_transfer]
    assert abs(configs[0].pop("kv_port") - configs[1].pop("kv_port")) >= 2
    assert configs[1] == {
        "kv_connector": "SfaRemoteD2HConnector",
        "kv_connector_module_path": "rd2h.connector",
        "kv_role": "kv_consumer",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"read_threads": 4},
    }


def test_nixl_has_ports_of_its_own() -> None:
    prefill, decode = with_nixl(PLAIN, "kv_producer"), with_nixl(PLAIN, "kv_consumer")
    port = "VLLM_NIXL_SIDE_CHANNEL_PORT"
    assert prefill.environment[port] != decode.environment[port]
    assert PLAIN.environment == {}
