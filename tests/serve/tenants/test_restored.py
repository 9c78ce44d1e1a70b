"""Restored sessions belong to their tenants, which are identified by id."""

from pathlib import Path

import pytest

from parrot.journal.log import Journal
from parrot.journal.replay import restore
from parrot.protocol.errors import QuotaExceeded, SessionGone
from parrot.protocol.public import SessionCreateRequest
from parrot.serve.config import CoreConfig
from parrot.serve.core import ServeCore
from tests.journal.replayed import MemoryFile
from tests.serve.tenants.keys import entry, write_keys
from tests.support.manual_clock import ManualClock


def started(path: str, storage: MemoryFile) -> tuple[ServeCore, Journal]:
    journal = Journal(storage, ManualClock(start=1e6))
    core = ServeCore(
        CoreConfig(keys_file=path, cluster_token="t"),
        clock=journal.clock,
    )
    restore(core, journal, {})
    return core, journal


async def test_sessions_of_removed_tenants_end_and_others_continue(tmp_path: Path) -> None:
    keys = [entry("a", "key a"), entry("b", "key b")]
    path = write_keys(tmp_path / "keys.json", *keys)
    first, journal = started(path, MemoryFile())
    a, b = (
        first.create_session(SessionCreateRequest(api_key=f"key {name}")).model_dump()
        for name in "ab"
    )
    salt = next(iter(first.sessions)).graph.cache_salt
    await journal.durable()
    records = list(journal._file.records)  # type: ignore[attr-defined]
    for record in records:
        assert b"key a" not in record.payload
        assert salt.encode() not in record.payload
    await first.close()
    await journal.close()

    keys = [entry("a", "a new key", share_group="g", limits={"sessions": 1}), entry("c", "key c")]
    second, journal = started(write_keys(tmp_path / "keys.json", *keys), MemoryFile(records))
    second.session_info(**a)
    with pytest.raises(SessionGone):
        second.session_info(**b)
    (session,) = second.sessions
    assert session.graph.cache_salt == second.tenants.cache_salt("a") != salt
    with pytest.raises(QuotaExceeded, match=r"limits\.sessions"):
        second.create_session(SessionCreateRequest(api_key="a new key"))
    second.check_integrity()
    await second.close()
    await journal.close()
