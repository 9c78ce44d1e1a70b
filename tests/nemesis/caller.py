"""Send the requests of a program with retries, and record each attempt."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from parrot.protocol.errors import Cancelled, ParrotError
from parrot.protocol.failover_client import client_of
from parrot.protocol.transport import TIMEOUT_S
from tests.nemesis.history import TRANSIENT, Attempt, History, Read, Submit

T = TypeVar("T")
PAUSE_S = 0.03  # between attempts


class Caller:
    """Repeats each request until it gets a final answer."""

    def __init__(self, program: int, tenant: str, urls: Sequence[str], history: History) -> None:
        self.program = program
        self._tenant = tenant
        self._history = history
        self.http = client_of(urls, bearer_token=tenant)
        self._is_closed = False
        self.has_models = False  # whether there are engines of two models

    async def close(self) -> None:
        """Stop retries and close the connections."""
        self._is_closed = True
        await self.http.close()

    async def persistently(
        self,
        ask: Callable[[], Awaitable[T]],
        record: Callable[[Attempt, T | None], None],
        *,
        is_once: bool = False,
    ) -> T:
        """Repeat a request until it succeeds or fails with an error that is not transient. With
        `is_once`, try only once. `record` is called for each attempt. Raises the last error, or
        `Cancelled` after `close`."""
        while True:
            if self._is_closed:
                raise Cancelled("the program has ended")
            invoked = time.monotonic()
            try:
                answer = await ask()
            except ParrotError as error:
                record(self._asked(invoked, error), None)
                if is_once or error.type not in TRANSIENT:
                    raise
            except asyncio.CancelledError:
                record(Attempt(program=self.program, invoked=invoked), None)
                raise
            else:
                record(self._asked(invoked), answer)
                return answer
            await asyncio.sleep(PAUSE_S)

    def _asked(self, invoked: float, error: ParrotError | None = None) -> Attempt:
        kind = "" if error is None else error.type
        now = time.monotonic()
        return Attempt(program=self.program, invoked=invoked, answered=now, error=kind)

    async def vendor(
        self, key: str, path: str, body: Mapping[str, Any], *, stored: bool = False
    ) -> dict[str, Any]:
        """Send a request to an OpenAI route. If the response is `stored`, its text is recorded as a
        value that must not change."""

        def record(asked: Attempt, answer: Any) -> None:
            is_begun = answer is not None and body.get("background")
            outputs = (answer["id"],) if is_begun else ()
            self._history.submits.append(Submit(**fields_of(asked), key=key, outputs=outputs))
            if stored and answer is not None:
                self._history.reads.append(
                    Read(
                        **fields_of(asked), var=answer["id"], limit_s=TIMEOUT_S, text=texts(answer)
                    )
                )

        async def ask() -> Any:
            return await self.http.request("POST", path, body=body)

        answer: dict[str, Any] = await self.persistently(ask, record)
        return answer

    async def stored(self, response_id: str) -> dict[str, Any]:
        """Get the current state of a stored response."""

        def record(asked: Attempt, answer: Any) -> None:
            has_ended = answer is not None and answer["status"] in ("completed", "incomplete")
            text = texts(answer) if has_ended else None
            self._history.reads.append(
                Read(**fields_of(asked), var=response_id, limit_s=TIMEOUT_S, text=text)
            )

        async def ask() -> Any:
            return await self.http.request("GET", f"/v1/responses/{response_id}")

        answer: dict[str, Any] = await self.persistently(ask, record)
        return answer


def texts(response: Mapping[str, Any]) -> str:
    """Return the concatenated texts of an OpenAI response."""
    return "|".join(part["text"] for item in response["output"] for part in item["content"])


def fields_of(asked: Attempt) -> dict[str, Any]:
    return {name: getattr(asked, name) for name in ("program", "invoked", "answered", "error")}
