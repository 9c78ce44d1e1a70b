"""Sandboxes for native functions on virtual time."""

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack

from pydantic_monty import Monty, MontyError

from parrot.protocol.errors import NativeFunctionFailed
from parrot.serve.graph.nodes import NativeCall
from parrot.serve.tasks import drop_output, explain, inputs_of, script_of

NATIVE_S = 2e-3  # Virtual seconds of a native function: a short one's time in the real sandbox.


class BlockingSandbox:
    """Runs each function while virtual time stands still, then advances time by `NATIVE_S`."""

    def __init__(self) -> None:
        self._pool: Monty | None = None
        self._exit = ExitStack()

    async def evaluate(self, call: NativeCall) -> Sequence[object]:
        if self._pool is None:
            self._pool = self._exit.enter_context(Monty(max_processes=1))
        checkout = self._pool.checkout(
            script_name=f"{call.func_name}.py", limits={"max_feed_duration_secs": call.timeout_s}
        )
        try:
            with checkout as sandbox:
                values: list[object] = sandbox.feed_run(
                    script_of(call), inputs=inputs_of(call), print_callback=drop_output
                )
        except MontyError as error:
            raise NativeFunctionFailed(explain(call, error)) from None
        await asyncio.sleep(NATIVE_S)
        return values

    async def close(self) -> None:
        self._exit.close()


class RecordedSandbox:
    """Returns the expected outputs of recorded native functions after the recorded seconds."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], tuple[float, list[str]]] = {}

    def expect(self, session_id: int, request_id: int, seconds: float, texts: list[str]) -> None:
        self._known[session_id, request_id] = (seconds, texts)

    async def evaluate(self, call: NativeCall) -> Sequence[object]:
        seconds, texts = self._known.pop((call.session_id, call.request_id))
        await asyncio.sleep(seconds)
        return texts

    async def close(self) -> None:
        """Holds no resources."""
