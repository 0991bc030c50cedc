"""The P/D proxy and metaserver: one OpenAI-compatible address before many engines.

A request goes to a Decode engine first. When that engine has blocks for the prompt it posts its
rendezvous to the proxy, which then sends the prompt to a Prefill engine, once. Decode's bytes go
to the client as they come.

Everything runs on one event loop, which owns all state: no locks, no threads. What decides
(`rendezvous`, `pool`, `ids`, `body`, `sse`) does no I/O and is told the time; what does I/O
(`decode`, `prefill`, `health`, `app`, `server`) decides nothing. Of rd2h only `rd2h.wire` is
imported.

Importing this package needs msgspec alone; `rd2h.proxy.server` needs the extra ``rd2h[proxy]``.
"""

from rd2h.proxy.config import ConfigError, Options, load

__all__ = ["ConfigError", "Options", "load"]
