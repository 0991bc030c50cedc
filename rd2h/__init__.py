"""rd2h: the KV-cache hand-off from a Prefill engine to a Decode engine of vLLM.

The rooms of the package, and which may import which, stand in ``docs/architecture.md``.
This module imports nothing, so that ``import rd2h.wire`` stays cheap for every program that
only speaks the protocol.
"""

__all__ = ["__version__"]

__version__ = "0.1.0"
