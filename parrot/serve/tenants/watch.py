"""Looks after the file of keys, which operators change while ServeCore runs."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from parrot.serve.tenants.keys_file import facts_of, read_keys
from parrot.serve.tenants.table import KeysChange, TenantTable
from parrot.utils.clock import Clock
from parrot.utils.config import ConfigError

logger = logging.getLogger(__name__)

PERIOD_S = 2.0
"""Between two looks at the file: one call of the system each, which reads nothing."""


class KeysWatch:
    """Takes in a changed file. One that is bad changes nothing, and is told of once."""

    def __init__(
        self,
        table: TenantTable,
        clock: Clock,
        on_change: Callable[[KeysChange], Awaitable[None]],
        on_trouble: Callable[[str], None],
    ) -> None:
        self._table = table
        self._clock = clock
        self._on_change = on_change
        self._on_trouble = on_trouble
        self._trouble = ""

    async def run(self) -> None:
        """Until it is cancelled; at once where there is no such file."""
        path = self._table.path
        if path is None:
            return
        seen: object = None  # the table may have been read long ago
        while True:
            facts = facts_of(path)
            if facts != seen:
                seen = facts
                try:
                    await self._take_in(path)
                except Exception:  # or no key could be withdrawn any more
                    logger.exception("the keys of %s were not taken in", path)
                    self._on_trouble("internal error")
            await self._clock.sleep(PERIOD_S)

    async def _take_in(self, path: str) -> None:
        try:
            change = self._table.replace(await asyncio.to_thread(read_keys, path))
        except ConfigError as error:
            if str(error) != self._trouble:
                self._trouble = str(error)
                logger.error("the keys stay as they are: %s", error)
                self._on_trouble(str(error))
        else:
            self._trouble = ""
            if any(change):
                logger.info("keys changed: %s", change)
                await self._on_change(change)
