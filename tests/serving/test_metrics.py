"""vLLM's figures under names that say what they are."""

import pytest

from serving.metrics import Metrics

TEXT = """\
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0"} 0.25
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0"} 2.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0"} 3.0
# TYPE vllm:num_preemptions counter
vllm:num_preemptions_total{engine="0"} 4.0
# TYPE vllm:prompt_tokens_by_source counter
vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"} 100.0
vllm:prompt_tokens_by_source_total{engine="1",source="local_compute"} 10.0
vllm:prompt_tokens_by_source_total{engine="0",source="local_cache_hit"} 128.0
vllm:prompt_tokens_by_source_total{engine="0",source="external_kv_transfer"} 300.0
# TYPE vllm:request_success counter
vllm:request_success_total{engine="0",finished_reason="length"} 5.0
vllm:request_success_total{engine="0",finished_reason="abort"} 1.0
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="128",num_gpu_blocks="33"} 1.0
"""


def test_every_figure() -> None:
    metrics = Metrics(TEXT)
    assert (metrics.kv_cache_usage, metrics.blocks, metrics.used_blocks) == (0.25, 33, 8)
    assert (metrics.running, metrics.waiting, metrics.preemptions) == (2, 3, 4)
    assert (metrics.computed_tokens, metrics.cached_tokens, metrics.external_tokens) == (
        110,
        128,
        300,
    )
    assert metrics.finished == {"length": 5, "abort": 1}


def test_one_engine_of_several() -> None:
    name = "vllm:prompt_tokens_by_source_total"
    assert Metrics(TEXT).value(name, engine="1") == 10
    assert Metrics(TEXT).value(name, engine="2") == 0


def test_what_is_not_there() -> None:
    metrics = Metrics("")
    assert metrics.value("vllm:no_such_thing") == metrics.preemptions == 0
    with pytest.raises(LookupError, match="cache_config_info"):
        _ = metrics.blocks
