"""A program's requests: each is sent until it is answered, and recorded."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from parrot.protocol.errors import Cancelled, ParrotError
from parrot.protocol.failover_client import client_of
from parrot.protocol.transport import TIMEOUT_S
from tests.nemesis.history import TRANSIENT, Asked, History, Read, Submit

T = TypeVar("T")
PAUSE_S = 0.03  # between attempts


class Caller:
    """Sends each request until it is answered."""

    def __init__(self, program: int, tenant: str, urls: Sequence[str], history: History) -> None:
        self.program = program
        self._tenant = tenant
        self._history = history
        self.http = client_of(urls, bearer_token=tenant)
        self._is_closed = False
        self.has_models = False  # whether there are engines of two models

    async def close(self) -> None:
        """What is still asked ends."""
        self._is_closed = True
        await self.http.close()

    async def persistently(
        self,
        ask: Callable[[], Awaitable[T]],
        told: Callable[[Asked, T | None], None],
        *,
        is_once: bool = False,
    ) -> T:
        """The first answer, unless it `is_once`, that is not an error of this request alone. `told`
        hears of each attempt. Raises the error, and `Cancelled` once the client is closed."""
        while True:
            if self._is_closed:
                raise Cancelled("the program has ended")
            invoked = time.monotonic()
            try:
                answer = await ask()
            except ParrotError as error:
                told(self._asked(invoked, error), None)
                if is_once or error.type not in TRANSIENT:
                    raise
            except asyncio.CancelledError:
                told(Asked(program=self.program, invoked=invoked), None)
                raise
            else:
                told(self._asked(invoked), answer)
                return answer
            await asyncio.sleep(PAUSE_S)

    def _asked(self, invoked: float, error: ParrotError | None = None) -> Asked:
        kind = "" if error is None else error.type
        now = time.monotonic()
        return Asked(program=self.program, invoked=invoked, answered=now, error=kind)

    async def vendor(
        self, key: str, path: str, body: Mapping[str, Any], *, stored: bool = False
    ) -> dict[str, Any]:
        """The answer of a route of OpenAI's; if it is `stored`, its texts are a value from now
        on."""

        def told(asked: Asked, answer: Any) -> None:
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

        answer: dict[str, Any] = await self.persistently(ask, told)
        return answer

    async def stored(self, response_id: str) -> dict[str, Any]:
        """A response that was stored, as it is now."""

        def told(asked: Asked, answer: Any) -> None:
            has_ended = answer is not None and answer["status"] in ("completed", "incomplete")
            text = texts(answer) if has_ended else None
            self._history.reads.append(
                Read(**fields_of(asked), var=response_id, limit_s=TIMEOUT_S, text=text)
            )

        async def ask() -> Any:
            return await self.http.request("GET", f"/v1/responses/{response_id}")

        answer: dict[str, Any] = await self.persistently(ask, told)
        return answer


def texts(response: Mapping[str, Any]) -> str:
    """All that a response of OpenAI's says."""
    return "|".join(part["text"] for item in response["output"] for part in item["content"])


def fields_of(asked: Asked) -> dict[str, Any]:
    return {name: getattr(asked, name) for name in ("program", "invoked", "answered", "error")}
