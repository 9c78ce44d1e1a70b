"""Trials: a call is attempted several times, or replaced by its fallback, until one succeeds.

    out = f(x)        out: a variable that the program sets; other calls may depend on it
      |- attempt 1    fails, or its text is not valid for the type
      |- attempt 2    succeeds: the program sets `out` to its text
      `- attempt 3    the last attempt would produce `out` itself: its value or its error is final

Except for the last attempt, a value goes through the program before dependent calls receive it.
Dependent calls receive the value or the error of the last attempt directly."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from parrot.frontend.pfunc.attempts import is_final, may_succeed_again
from parrot.frontend.pfunc.batch import Batch
from parrot.frontend.pfunc.call import BasicCall, PyNativeCall, SemanticCall
from parrot.frontend.pfunc.definitions import SemanticDefinition
from parrot.frontend.pfunc.function_body import Parameter, ParamType, Signature
from parrot.frontend.pfunc.metadata import SemanticFuncMetadata
from parrot.frontend.pfunc.read_options import read_options
from parrot.frontend.pfunc.semantic_variable import SemanticVariable, cancel, id_of
from parrot.frontend.pfunc.session import Session
from parrot.protocol.errors import (
    AlreadySet,
    InvalidRequest,
    ParrotError,
    QuotaExceeded,
    TimedOut,
    Unavailable,
    ValidationFailed,
)
from parrot.protocol.fields import PerformanceCriteria
from parrot.protocol.template import placeholder

logger = logging.getLogger("parrot.frontend.pfunc")

_OVERLOADED = (Unavailable, QuotaExceeded)  # Temporary errors after which an attempt is delayed.
_PAUSE_S, _MAX_PAUSE_S = 0.25, 4.0  # First and longest delay in seconds. The delay doubles.
_LEAST_S = 1e-3  # Seconds for an output after the attempt's timeout: it may already be ready.
_PROBLEM = "That is not valid: {}. Write it again, correctly and completely."


async def submit_trial(session: Session, call: SemanticCall, batch: Batch | None) -> None:
    """Submit the first attempt of a call and declare its output variables. Further attempts run in
    the background."""
    trial = Trial(session, call)
    sending = batch or Batch(session)
    for out in trial.outs:
        if out.session not in (None, session):
            raise InvalidRequest(f"the variable `{out.name}` belongs to another session")
        if out.is_ready:
            raise AlreadySet(f"the variable `{out.name}` is already set")
        if out.session is None:
            await sending.declare(out)
    await sending.add(trial.attempt)
    if batch is None:
        await sending.send()
    _supervise(session, trial.outs, trial.run)


def _supervise(
    session: Session,
    variables: Sequence[SemanticVariable],
    work: Callable[[], Coroutine[Any, Any, None]],
) -> None:
    """Run `work`, which sets the variables, in the background. If `work` fails or one variable is
    cancelled, all variables are cancelled."""
    task = asyncio.ensure_future(_supervised(session, variables, work))
    session.trials.add(task)
    for var in variables:
        var.on_cancel = partial(_cancel_all, session, variables, task)

    def done(_: object) -> None:
        session.trials.discard(task)
        for var in variables:
            var.on_cancel = None

    task.add_done_callback(done)


async def _supervised(
    session: Session,
    variables: Sequence[SemanticVariable],
    work: Callable[[], Coroutine[Any, Any, None]],
) -> None:
    try:
        async with session.trial_slots:
            await work()
    except Exception as error:  # noqa: BLE001 - readers must get an error
        names = ", ".join(var.name for var in variables)
        logger.warning("the attempts to generate %s failed: %s", names, error)
        for var in variables:
            with suppress(ParrotError):
                await session.cancel(await id_of(var))


async def _cancel_all(
    session: Session, variables: Sequence[SemanticVariable], task: asyncio.Task[None]
) -> None:
    for var in variables:
        await session.cancel(await id_of(var))
    task.cancel()


def _attempts_of(func: Signature) -> list[list[Signature]]:
    """The functions to call until one succeeds: a list of attempts for the function, then one for
    each fallback."""
    if not isinstance(func, SemanticDefinition):
        return [[func]]
    again = func.with_metadata(reuse=False)
    rest = func.attempts.fallback
    return [[func, *[again] * func.attempts.retries], *(_attempts_of(rest) if rest else ())]


class Trial:
    """The attempts of one call. Use it only on the session's loop."""

    def __init__(self, session: Session, call: SemanticCall) -> None:
        self.outs = call.output_vars
        self._session = session
        self._inputs = {param.name: call.bindings[param.name] for param in call.func.inputs}
        self._criteria = call.func.metadata.output_criteria or PerformanceCriteria.THROUGHPUT
        self._groups = _attempts_of(
            call.func
        )  # Remaining attempts: the function's, its fallbacks'.
        self.attempt = self._call(self._groups[0].pop(0))
        self._pause_s = _PAUSE_S

    async def run(self) -> None:
        """Run attempts until one succeeds. The last attempt produces the variables itself."""
        error = await self._outcome()
        while error is not None:
            if is_final(error):
                raise error
            func, is_again = self._next(error)
            if is_again and isinstance(error, _OVERLOADED):
                await asyncio.sleep(self._pause_s)
                self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)
            is_last = len(self._groups) == 1 and not self._groups[0]
            try:
                await self._try(func, error, is_again=is_again, is_last=is_last)
            except ParrotError as refused:
                if is_last:
                    raise
                error = refused
                continue
            if is_last:
                return
            error = await self._outcome()
        await self._settle()

    def _next(self, error: ParrotError) -> tuple[Signature, bool]:
        """The function to call next, and whether it is the function that failed."""
        own = self._groups[0]
        if len(self._groups) > 1 and not (own and may_succeed_again(error)):
            self._groups.pop(0)
            return self._groups[0].pop(0), False
        func = own.pop(0)
        if not may_succeed_again(error):
            own.clear()  # The last attempt fails again, and readers receive its error.
        return func, True

    async def _outcome(self) -> ParrotError | None:
        """Wait for the attempt. Returns its error, or None if it succeeded."""
        made, func = self.attempt.output_vars, self.attempt.func
        timeout = func.attempts.timeout if isinstance(func, SemanticDefinition) else None
        clock = asyncio.get_running_loop()
        try:
            for var in made:
                if var.draft is not None:
                    await var.draft.sent.wait()
            began = clock.time()
            for var, out in zip(made, self.outs, strict=True):
                left = None if timeout is None else max(_LEAST_S, began + timeout - clock.time())
                options = read_options(self._criteria, left, None)
                var.settle(await self._session.watch(await id_of(var), var.name, options))
                var.model = out.model
                var.get()  # The value is known. `get` validates it.
        except TimedOut as error:
            for var in made:
                with suppress(ParrotError):  # The next attempt runs in any case.
                    await cancel(self._session, var)
            return error
        except ParrotError as error:
            return error
        return None

    async def _settle(self) -> None:
        for out, var in zip(self.outs, self.attempt.output_vars, strict=True):
            out.settle(var)
            await self._session.set_again(await id_of(out), str(var))

    async def _try(
        self,
        func: Signature,
        error: ParrotError,
        *,
        is_again: bool,
        is_last: bool,
    ) -> None:
        before, overrides = self.attempt.request_id, dict[str, Any]()
        outputs = self.outs if is_last else ()
        is_repair = is_again and isinstance(error, ValidationFailed) and before is not None
        if is_repair and isinstance(func, SemanticDefinition) and func.attempts.feed_back:
            made = _repair(func)
            given = dict(zip(_names(made.outputs), outputs, strict=False))
            self.attempt = SemanticCall(made, (_PROBLEM.format(error.message),), given)
            overrides = {"successor_of": before, "system": None}
        else:
            self.attempt = self._call(func, outputs)
        if is_last and not overrides:
            # ServeCore rejects a single call whose model is not served. In a graph request the call
            # fails instead, and the readers of `outs` receive the error.
            graph = Batch(self._session)
            await graph.add(self.attempt)
            await graph.send()
        else:
            await self.attempt.submit(self._session, overrides)

    def _call(self, func: Signature, outputs: Sequence[SemanticVariable] = ()) -> BasicCall:
        inputs = {name: self._inputs[name] for name in _names(func.inputs) if name in self._inputs}
        given = dict(zip(_names(func.outputs), outputs, strict=False))
        kind = SemanticCall if isinstance(func, SemanticDefinition) else PyNativeCall
        return kind(func, (), inputs | given)


def _repair(func: SemanticDefinition) -> SemanticDefinition:
    """The function that continues after an invalid output and asks for a correction."""
    problem = Parameter("problem", ParamType.INPUT_LOC)
    (output,) = func.outputs
    while problem.name == output.name:
        problem = replace(problem, name=problem.name + "_")
    mark, out = placeholder(problem.name), placeholder(output.name)
    template = f"{mark}{out}" if func.metadata.chat else f"\n{mark}\n{out}"
    made = SemanticDefinition(func.name, [problem, output], template, SemanticFuncMetadata())
    made.metadata, made.attempts = func.metadata, func.attempts
    return made


def _names(params: Iterable[Parameter]) -> list[str]:
    return [param.name for param in params]
