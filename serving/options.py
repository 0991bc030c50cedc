"""How a vLLM server is started, and with which KV connector."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from serving.client import MODEL

__all__ = ["KvTransfer", "VllmOptions"]


@dataclass(frozen=True, kw_only=True)
class KvTransfer:
    """The KV connector of a server: vLLM's ``--kv-transfer-config``.

    Attributes:
        connector: Class name of the connector.
        module: Where it is imported from; None if vLLM has it.
        role: What the engine does with KV.
        port: First port of the connector; None leaves vLLM's default.
        engine: Engine id; None lets vLLM make one.
        on_load_failure: What vLLM does with a request whose KV could not be loaded.
        extra: The connector's own options (``kv_connector_extra_config``).
    """

    connector: str
    module: str | None = None
    role: Literal["kv_producer", "kv_consumer", "kv_both"] = "kv_both"
    port: int | None = None
    engine: str | None = None
    on_load_failure: Literal["recompute", "fail"] = "fail"
    extra: Mapping[str, object] = field(default_factory=dict)

    def to_json(self) -> str:
        """The argument, with nothing in it that was not given."""
        options: dict[str, object] = {
            "kv_connector": self.connector,
            "kv_role": self.role,
            "kv_load_failure_policy": self.on_load_failure,
        }
        if self.module is not None:
            options["kv_connector_module_path"] = self.module
        if self.port is not None:
            options["kv_port"] = self.port
        if self.engine is not None:
            options["engine_id"] = self.engine
        if self.extra:
            options["kv_connector_extra_config"] = dict(self.extra)
        return msgspec.json.encode(options).decode()


@dataclass(frozen=True, kw_only=True)
class VllmOptions:
    """How a server is started.

    Attributes:
        model: Folder of the checkpoint.
        tensor_parallel: TP size; each rank is a process.
        kv_cache_mib: Memory of the KV cache on each rank, in MiB.
        blocks: Number of KV blocks instead, for a cache that is full soon. One of them is never
            used (vLLM's null block).
        block_size: Tokens in a block; None takes what vLLM prefers on CPU: 128, or 16 for MLA.
            Attention on CPU wants a multiple of 32, the MLA kernel only knows 16.
        prefix_caching: Whether blocks of finished requests are found again.
        max_sequences: Most requests in one step.
        step_tokens: Most tokens in one step: a longer prompt is computed in chunks.
        max_length: Longest sequence, in tokens.
        kv_transfer: The KV connector, if any.
        arguments: Further arguments of the API server.
        environment: Variables for this server alone.
    """

    model: Path
    tensor_parallel: int = 1
    kv_cache_mib: int = 64
    blocks: int | None = None
    block_size: int | None = None
    prefix_caching: bool = True
    max_sequences: int = 16
    step_tokens: int = 2048
    max_length: int = 2048
    kv_transfer: KvTransfer | None = None
    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def command_line(self, port: int) -> list[str]:
        """The arguments for a server on ``port``."""
        line = [
            f"--model={self.model}", f"--served-model-name={MODEL}",
            "--host=127.0.0.1", f"--port={port}",
            "--skip-tokenizer-init", "--enforce-eager", "--dtype=float32",
            f"--tensor-parallel-size={self.tensor_parallel}",
            f"--kv-cache-memory-bytes={self.kv_cache_mib << 20}",
            f"--max-num-seqs={self.max_sequences}",
            f"--max-num-batched-tokens={self.step_tokens}",
            f"--max-model-len={self.max_length}",
            f"--{'' if self.prefix_caching else 'no-'}enable-prefix-caching",
            "--disable-uvicorn-access-log",
        ]  # fmt: skip
        if self.blocks is not None:
            line.append(f"--num-gpu-blocks-override={self.blocks}")
        if self.block_size is not None:
            line.append(f"--block-size={self.block_size}")
        if self.kv_transfer is not None:
            line.append(f"--kv-transfer-config={self.kv_transfer.to_json()}")
        return [*line, *self.arguments]
