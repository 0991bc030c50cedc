"""What a server says about itself on ``/metrics``.

vLLM writes its gauges when a step has ended, not when they are asked for: an engine that came to
rest shows the state of its last step.
"""

import math
from collections.abc import Mapping
from functools import cached_property

from prometheus_client.parser import text_string_to_metric_families

__all__ = ["Metrics"]


class Metrics:
    """One reading.

    Args:
        text: In Prometheus's text format.
    """

    def __init__(self, text: str) -> None:
        self.samples = [
            sample for family in text_string_to_metric_families(text) for sample in family.samples
        ]

    def value(self, name: str, **labels: str) -> float:
        """The sum of the samples of a name that have these labels; 0 if there are none."""
        return math.fsum(
            sample.value
            for sample in self.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def by_label(self, name: str, label: str) -> Mapping[str, float]:
        """The values of a name for each value of one of its labels."""
        return {s.labels[label]: s.value for s in self.samples if s.name == name}

    @property
    def kv_cache_usage(self) -> float:
        """Part of the KV blocks that are in use, 0 to 1."""
        return self.value("vllm:kv_cache_usage_perc")

    @cached_property
    def blocks(self) -> int:
        """KV blocks of the engine; one of them, the null block, is never used."""
        for sample in self.samples:
            if sample.name == "vllm:cache_config_info":
                return int(sample.labels["num_gpu_blocks"])
        raise LookupError("no vllm:cache_config_info")

    @property
    def used_blocks(self) -> int:
        """KV blocks that are in use."""
        return round(self.kv_cache_usage * (self.blocks - 1))

    @property
    def running(self) -> int:
        """Requests that are computed."""
        return int(self.value("vllm:num_requests_running"))

    @property
    def waiting(self) -> int:
        """Requests that wait, those for remote KV among them."""
        return int(self.value("vllm:num_requests_waiting"))

    @property
    def preemptions(self) -> int:
        """How often a running request lost its blocks."""
        return int(self.value("vllm:num_preemptions_total"))

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that the engine computed itself."""
        return self._prompt_tokens("local_compute")

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that it found in its prefix cache."""
        return self._prompt_tokens("local_cache_hit")

    @property
    def external_tokens(self) -> int:
        """Prompt tokens that came through its KV connector."""
        return self._prompt_tokens("external_kv_transfer")

    @property
    def finished(self) -> Mapping[str, float]:
        """Requests that ended, by reason: ``length``, ``abort``, ``error``, ..."""
        return self.by_label("vllm:request_success_total", "finished_reason")

    def _prompt_tokens(self, source: str) -> int:
        return int(self.value("vllm:prompt_tokens_by_source_total", source=source))
