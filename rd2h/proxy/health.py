"""Probes: one task for each engine, which sleeps until its next probe is due or its state changes.

Owner: the event loop.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rd2h.proxy.pool import Engine
from rd2h.proxy.services import Services

__all__ = ["probing"]


@asynccontextmanager
async def probing(services: Services) -> AsyncIterator[None]:
    """Probe every engine once, then keep doing so while the context lasts."""
    engines = [*services.prefill.engines, *services.decode.engines]
    await asyncio.gather(*(services.probe(engine) for engine in engines))
    wakes = {engine: asyncio.Event() for engine in engines}

    def changed(engine: Engine) -> None:
        wakes[engine].set()

    services.prefill.changed = services.decode.changed = changed
    tasks = [asyncio.create_task(_watch(services, engine, wakes[engine])) for engine in engines]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _watch(services: Services, engine: Engine, wake: asyncio.Event) -> None:
    while True:
        wake.clear()
        try:
            async with asyncio.timeout_at(engine.next_probe):
                await wake.wait()
        except TimeoutError:
            await services.probe(engine)
