"""The HAProxy of a page, with other addresses."""

import asyncio
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from tests.docs.pages import ROOT
from tests.docs.test_proxy import answers
from tests.support.programs import program


@asynccontextmanager
async def haproxy_of(
    page: str, port: int, addresses: Mapping[str, str], folder: Path
) -> AsyncIterator[None]:
    """Run it for the block, with `addresses` in the place of the page's, each of which stands there
    once. It listens at `port`."""
    haproxy = program("haproxy", "haproxy")
    (config,) = re.findall(r"```haproxy\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
    for old, new in addresses.items():
        assert config.count(old) == 1
        config = config.replace(old, new)
    (folder / "haproxy.cfg").write_text(config)
    process = await asyncio.create_subprocess_exec(
        haproxy, "-q", "-db", "-f", str(folder / "haproxy.cfg")
    )
    try:
        await answers(port)
        yield
    finally:
        process.terminate()
        await process.wait()
