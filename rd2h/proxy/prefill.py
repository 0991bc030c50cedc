"""The way to P: wait for D's rendezvous, then dispatch the prompt, once.

Owner: the task that serves the request.
"""

import asyncio
import logging

import httpx

from rd2h.proxy.body import Call, Dispatch
from rd2h.proxy.errors import Answer, ErrorKind, PassOn, ProxyError
from rd2h.proxy.pool import Engine, Lease, NoEngineError
from rd2h.proxy.rendezvous import Waiter
from rd2h.proxy.services import InFlight, Services
from rd2h.proxy.transport import Headers, explain, for_client, for_engine

__all__ = ["Prefill"]

log = logging.getLogger("rd2h.proxy")


class Prefill:
    """Sends the prompts of one attempt to P as D asks for them.

    Args:
        services: Shared state.
        call: The request.
        headers: The client's.
        waiter: Where D's rendezvous come in.
        entry: The request; its id is the attempt's.
    """

    def __init__(
        self,
        services: Services,
        call: Call,
        headers: Headers,
        waiter: Waiter,
        entry: InFlight,
    ) -> None:
        self._services = services
        self._call = call
        self._headers = headers
        self._waiter = waiter
        self._entry = entry

    async def run(self) -> None:
        """Dispatch until every prompt that D asks for has been computed by some P.

        Raises:
            ProxyError: if D asked for nothing in time, or no P could do it.
            PassOn: if P refused the request.
        """
        started = self._services.now()
        number = 0
        try:
            async with asyncio.TaskGroup() as group:
                async for send in self._waiter.batches():
                    if send.whole:
                        dispatch = self._call.whole(self._entry.request_id, send.arrived)
                    else:
                        number += 1
                        dispatch = self._call.part(self._entry.request_id, number, send.arrived)
                    self._services.metrics.rendezvous_seconds.observe(
                        self._services.now() - started
                    )
                    self._count("whole" if send.whole else "part")
                    group.create_task(self._dispatch(dispatch))
        except BaseExceptionGroup as failures:
            # Either this task was cancelled or a dispatch failed; the others were cancelled then.
            raise failures.exceptions[0] from None

    def _count(self, kind: str) -> None:
        self._services.metrics.dispatches.labels(kind).inc()

    async def _dispatch(self, dispatch: Dispatch) -> None:
        services, options = self._services, self._services.options
        # D may be answering earlier prompts of the list by now.
        if self._entry.stage != "answering":
            self._entry.stage = "prefill"
        deadline = services.now() + options.prefill_deadline
        tried: list[Engine] = []
        error = ProxyError(ErrorKind.PREFILL_UNAVAILABLE, "no Prefill engine is in")
        while True:
            try:
                with services.prefill.lease(dispatch.tokens, tried) as lease:
                    tried.append(lease.engine)
                    if len(tried) > 1:
                        services.metrics.retries.labels("prefill").inc()
                        self._count("retry")
                    self._entry.prefill.append(lease.engine.url)
                    try:
                        error_now = await self._post(dispatch, lease)
                    finally:
                        self._entry.prefill.remove(lease.engine.url)
            except NoEngineError:
                raise error from None
            if error_now is None:
                # P's may be working on other prompts of the list still.
                if self._entry.stage == "prefill" and not self._entry.prefill:
                    self._entry.stage = "decode"
                return
            error = error_now
            if len(tried) >= options.attempts or services.now() >= deadline:
                raise error

    async def _post(self, dispatch: Dispatch, lease: Lease) -> ProxyError | None:
        """Send it to one P. None if that P did it; an error if another one may be tried.

        Raises:
            PassOn: if P refused it: so would any other.
        """
        services, engine, path = self._services, lease.engine, self._call.endpoint.path
        limit = services.options.prefill_timeout
        started = services.now()
        try:
            async with asyncio.timeout(limit):
                headers = for_engine(self._headers, dispatch.request_id)
                response = await services.transport.send(
                    "POST", engine.url, path, headers, dispatch.body
                )
                try:
                    body = b"".join([chunk async for chunk in response.aiter_raw()])
                finally:
                    await response.aclose()
        except TimeoutError:
            reason = f"no answer within {limit:g} s"
            services.failed(engine, reason, down=False)
            return ProxyError(
                ErrorKind.PREFILL_TIMEOUT, f"the Prefill engine {engine.url} gave {reason}"
            )
        except httpx.HTTPError as failure:
            reason, down = explain(failure)
            services.failed(engine, reason, down=down)
            return ProxyError(
                ErrorKind.PREFILL_UNAVAILABLE,
                f"the Prefill engine {engine.url} could not be reached or left: {reason}",
            )
        status = response.status_code
        if 200 <= status < 300:
            services.prefill.succeeded(engine)
            services.metrics.prefill_seconds.observe(services.now() - started)
            return None
        if 400 <= status < 500:
            services.prefill.succeeded(engine)
            log.info(
                "request %s: %s refused it with %d", self._entry.request_id, engine.url, status
            )
            raise PassOn(Answer(status, for_client(response.headers.raw), body))
        services.failed(engine, f"it answered {status}", down=False)
        return ProxyError(
            ErrorKind.PREFILL_UNAVAILABLE,
            f"the Prefill engine {engine.url} answered {status}",
        )
