"""Run the HAProxy configurations of docs/reliability.md with other addresses."""

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
    backend: str, port: int, addresses: Mapping[str, str], folder: Path
) -> AsyncIterator[None]:
    """Run the configuration that defines `backend`, at `port`, until the block ends.

    The keys of `addresses` are replaced by their values. Each key occurs once in the configuration.
    """
    haproxy = program("haproxy", "haproxy")
    page = (ROOT / "docs" / "reliability.md").read_text()
    configs = re.findall(r"```haproxy\n(.*?)```", page, re.DOTALL)
    (config,) = [config for config in configs if f"\nbackend {backend}\n" in config]
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
