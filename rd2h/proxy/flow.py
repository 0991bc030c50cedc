"""One request's life: D first, then its rendezvous, then P, and D's answer to the client.

Each attempt is two tasks: `Decode`, which talks to D and the client, and `Prefill`, which waits for
D's rendezvous and talks to P. Whichever ends the attempt cancels the other. Nothing outlives the
request: tasks are awaited, and loads, registrations and connections are context managers'.

Owner: the task that serves the request.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager

from rd2h.proxy.body import Call
from rd2h.proxy.decode import Decode, DecodeFailedError
from rd2h.proxy.errors import ErrorKind, PassOn, ProxyError
from rd2h.proxy.ids import attempt_id
from rd2h.proxy.pool import Engine, Lease, NoEngineError
from rd2h.proxy.prefill import Prefill
from rd2h.proxy.responder import Responder
from rd2h.proxy.services import InFlight, Services
from rd2h.proxy.transport import Headers

__all__ = ["cancelled", "serve"]


async def serve(
    services: Services,
    call: Call,
    headers: Headers,
    request_id: str,
    entry: InFlight,
    responder: Responder,
) -> None:
    """Serve one request until its answer is complete.

    Args:
        services: Shared state.
        call: The request.
        headers: The client's.
        request_id: What the engines' ids are made of.
        entry: For the status page.
        responder: Where the answer goes.

    Raises:
        ProxyError: what the client is to be told.
    """
    if call.remote and services.prefill.up == 0:
        # D would only hold blocks for a prompt that nobody can compute.
        raise ProxyError(ErrorKind.PREFILL_UNAVAILABLE, "no Prefill engine is in")
    tried: list[Engine] = []
    failure = DecodeFailedError(ProxyError(ErrorKind.DECODE_UNAVAILABLE, "no Decode engine is in"))
    while len(tried) < services.options.attempts and not responder.started:
        try:
            with services.decode.lease(call.sequences, tried) as lease:
                tried.append(lease.engine)
                if len(tried) > 1:
                    services.metrics.retries.labels("decode").inc()
                entry.request_id = attempt_id(request_id, len(tried))
                entry.decode = lease.engine.url
                await _attempt(services, call, headers, entry, responder, lease)
                return
        except NoEngineError:
            break
        except DecodeFailedError as failed:
            failure = failed
    if failure.answer is not None and not responder.started:
        await responder.answer(failure.answer)
        return
    raise failure.error


async def _attempt(
    services: Services,
    call: Call,
    headers: Headers,
    entry: InFlight,
    responder: Responder,
    lease: Lease,
) -> None:
    """Try one D, until the answer is complete.

    Raises:
        DecodeFailedError: if another D may be tried.
        ProxyError: what the client is to be told.
    """
    options = services.options
    ids = call.expected_ids(entry.request_id)
    entry.expected = len(ids)
    entry.stage = "waiting for the rendezvous" if ids else "decoding alone"
    with services.registry.expect(
        ids, timeout=options.rendezvous_timeout, batch_wait=options.batch_wait
    ) as waiter:
        entry.waiter = waiter
        decode = Decode(services, call, headers, waiter, entry, responder)
        prefill = Prefill(services, call, headers, waiter, entry)
        async with cancelled(decode.run(lease), prefill.run()) as (to_decode, to_prefill):
            await asyncio.wait({to_decode, to_prefill}, return_when=asyncio.FIRST_COMPLETED)
            error = None if to_decode.done() else to_prefill.exception()
            if error is None or (decode.answering and len(ids) == 1):
                # If P failed after all was sent, D has what it needs all the same.
                await asyncio.wait({to_decode})
                to_decode.result()
                # P's answer is on its way; to cancel it now would look like an abort to P.
                entry.stage = "finishing prefill"
                await asyncio.wait({to_prefill}, timeout=options.linger)
                return
    # D's request is cancelled now, and nothing else writes to the client.
    if not responder.finished:
        await _prefill_failed(services, responder, lease, error)


async def _prefill_failed(
    services: Services, responder: Responder, lease: Lease, error: BaseException
) -> None:
    """D will not get its prompt: tell the client, or try another D if this one never asked.

    Raises:
        DecodeFailedError: if another D may be tried.
        ProxyError: what the client is to be told.
    """
    if isinstance(error, PassOn):
        if not responder.started:
            await responder.answer(error.answer, counted=False)
            return
        error = ProxyError(
            ErrorKind.PREFILL_UNAVAILABLE,
            f"a Prefill engine refused a part of the prompts with {error.answer.status}",
        )
    elif isinstance(error, ProxyError) and error.kind is ErrorKind.RENDEZVOUS_TIMEOUT:
        services.failed(lease.engine, error.message, down=False)
        raise DecodeFailedError(error)
    raise error


@asynccontextmanager
async def cancelled(*work: Coroutine[None, None, None]) -> AsyncIterator[list[asyncio.Task[None]]]:
    """Run tasks; when the context ends, those that still run are cancelled and awaited."""
    tasks = [asyncio.create_task(coroutine) for coroutine in work]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        # Never raises what the tasks raised; a second cancellation may end it early.
        await asyncio.gather(*tasks, return_exceptions=True)
