"""What the demo can be asked for, and which of it makes no sense.

Pure: nothing here starts anything, and everything is checked before anything starts.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rd2h.topology import TopologyError, TpMapping

__all__ = [
    "DemoOptions",
    "EngineName",
    "Fault",
    "OptionError",
    "Sabotage",
    "check_options",
]

MAX_NUMBER = 1 << 30
MAX_TIMEOUT = 86_400
MAX_LAYERS = 1 << 12
MAX_REQUESTS = 1 << 16
MAX_BLOCKS = 1 << 26


class OptionError(ValueError):
    """An option, or a combination of options, that makes no sense; the text is one line."""


class EngineName(StrEnum):
    """The transfer engines that work on any host."""

    HOST = "host"
    NIXL = "nixl"


class Fault(StrEnum):
    """What goes wrong on purpose in the middle of a run."""

    KILL_DECODE = "kill-decode"
    KILL_PREFILL = "kill-prefill"
    SLOW_DECODE = "slow-decode"
    ABORT = "abort"


class Sabotage(StrEnum):
    """A fault of the demo itself, which its checks must find. For the demo's own tests.

    ``swap`` announces two blocks in each other's place, ``stale`` leaves a block as an earlier
    layer left it, ``guard`` writes beside the destinations, ``leftover`` leaves a receiver open.
    """

    SWAP = "swap"
    STALE = "stale"
    GUARD = "guard"
    LEFTOVER = "leftover"


@dataclass(frozen=True)
class DemoOptions:
    """One run of the demo; the defaults are the shape of DeepSeek-V3.2.

    Attributes:
        prefill_tp: Prefill's tensor-parallel size, in processes.
        decode_tp: Decode's.
        layers: Layers of the model.
        latent: Width of the first main tensor, in bf16 numbers for each token.
        rope: Width of the second; 0 for a cache of one packed tensor.
        indexer_dim: Width of the indexer; 0 for a model without.
        no_indexer_every: Each such layer has no indexer; 0 if all have one.
        lic8: The indexer is int8, with a float16 scale for each token in a tensor of its own.
        block_size: Tokens in a block.
        requests: Requests.
        tokens: Tokens in the prompt of each.
        chunk: Tokens of each request that one Prefill step computes.
        buffers: Layer buffers on each Prefill rank; layer ``i`` uses buffer ``i % buffers``.
        engine: The transfer engine.
        fault: What goes wrong on purpose.
        seed: Of everything that is random: contents and block ids.
        timeout: Seconds that any one wait may take; the transfer as a whole is one.
        sabotage: For tests of the demo.
    """

    prefill_tp: int = 4
    decode_tp: int = 2
    layers: int = 61
    latent: int = 512
    rope: int = 64
    indexer_dim: int = 128
    no_indexer_every: int = 10
    lic8: bool = False
    block_size: int = 128
    requests: int = 8
    tokens: int = 2048
    chunk: int = 512
    buffers: int = 3
    engine: EngineName = EngineName.HOST
    fault: Fault | None = None
    seed: int = 0
    timeout: float = 120.0
    sabotage: Sabotage | None = None

    @property
    def blocks_per_request(self) -> int:
        """Blocks of one prompt; the last may be partial."""
        return -(-self.tokens // self.block_size)

    @property
    def decode_engines(self) -> int:
        """Decode engines: with ``kill-decode`` one must remain."""
        return 2 if self.fault is Fault.KILL_DECODE else 1

    @property
    def processes(self) -> int:
        """Processes that the run starts."""
        return self.prefill_tp + self.decode_tp * self.decode_engines


def check_options(options: DemoOptions) -> None:
    """Refuse what makes no sense.

    Raises:
        OptionError: one line that names the option, the value, and what would do.
    """
    for name in ("layers", "latent", "block_size", "requests", "tokens", "chunk", "buffers"):
        _within(options, name, 1, MAX_NUMBER)
    for name in ("rope", "indexer_dim", "no_indexer_every"):
        _within(options, name, 0, MAX_NUMBER)
    _within(options, "seed", 0, (1 << 64) - 1)
    try:
        TpMapping(options.prefill_tp, options.decode_tp)
    except TopologyError as error:
        raise OptionError(f"--prefill-tp and --decode-tp: {error}") from None
    for name, value, most in (
        ("--layers", options.layers, MAX_LAYERS),
        ("--requests", options.requests, MAX_REQUESTS),
        ("--tokens / --block-size", options.blocks_per_request, MAX_BLOCKS),
    ):
        if value > most:
            raise OptionError(f"{name} is {value}; the demo goes up to {most}")
    if not 5 <= options.timeout <= MAX_TIMEOUT:
        raise OptionError(
            f"--timeout is {options.timeout:g}; it is at least 5 and at most {MAX_TIMEOUT} seconds"
        )
    if options.lic8 and not options.indexer_dim:
        raise OptionError("--lic8 quantises the indexer, and --indexer-dim 0 has none")
    hurting = (Fault.KILL_DECODE, Fault.KILL_PREFILL, Fault.ABORT)
    if options.fault in hurting and options.requests < 2:
        raise OptionError(
            f"--fault {options.fault} needs --requests 2 or more: some are hurt, the others must "
            f"not be"
        )
    if options.fault is Fault.KILL_PREFILL and options.layers < 2:
        raise OptionError("--fault kill-prefill needs --layers 2 or more, to kill between them")
    if options.fault is Fault.SLOW_DECODE and options.layers <= options.buffers:
        raise OptionError(
            f"--fault slow-decode needs more --layers than --buffers {options.buffers}: Prefill "
            f"waits only for memory that it uses again"
        )
    if options.sabotage is Sabotage.SWAP and min(options.chunk, options.tokens) < (
        2 * options.block_size
    ):
        raise OptionError("--sabotage swap needs two blocks in the first chunk")


def _within(options: DemoOptions, name: str, least: int, most: int) -> None:
    value: int = getattr(options, name)
    if not least <= value <= most:
        option = "--" + name.replace("_", "-")
        bound = f"at least {least}" if value < least else f"at most {most}"
        raise OptionError(f"{option} is {value}; it is {bound}")
