"""The journal's file: locks, versions, damage, and a full disk."""

import asyncio
import os
import random
import resource
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from parrot.journal.log import ENDED, Journal, Record
from parrot.journal.sqlite import SCHEMA, JournalFile
from parrot.protocol.errors import InsufficientStorage
from parrot.utils.clock import MonotonicClock
from parrot.utils.config import ConfigError

SIZE = 2**30


def record(seq: int, subject: str = "1", kind: str = "call", size: int = 50) -> Record:
    return Record(seq, seq / 8, subject, kind, b'{"x":"%s"}' % (b"y" * size))


def filled(path: Path, count: int = 60, size: int = 50) -> list[Record]:
    records = [record(seq, size=size) for seq in range(1, count + 1)]
    file = JournalFile(str(path), SIZE)
    for begin in range(0, count, 7):
        file.write(records[begin : begin + 7])
    file.close()
    return records


def read(path: Path) -> list[Record]:
    file = JournalFile(str(path), SIZE)
    try:
        return list(file.read())
    finally:
        file.close()


def test_written_records_are_read_and_each_start_has_a_higher_epoch(tmp_path: Path) -> None:
    records = filled(tmp_path / "j")
    assert read(tmp_path / "j") == records
    epochs = []
    for _ in range(3):
        file = JournalFile(str(tmp_path / "j"), SIZE)
        epochs.append(file.epoch)
        file.close()
    assert len(set(epochs)) == 3
    assert epochs == sorted(epochs)
    file = JournalFile(str(tmp_path / "j"), SIZE)
    assert file.last_seq() == 60
    assert [file.fact("first", 7), file.fact("first", 8)] == [7, 7]
    file.close()
    assert (tmp_path / "j").stat().st_mode & 0o077 == 0


def test_ended_sessions_are_not_read_and_are_deleted_in_steps(tmp_path: Path) -> None:
    file = JournalFile(str(tmp_path / "j"), SIZE)
    file.write([record(seq, "old") for seq in range(1, 1200)])
    file.write([record(1200, "new"), record(1201, "old", ENDED)])
    assert [r.subject for r in file.read()] == ["new"]
    file.trim()
    file.close()
    file = JournalFile(str(tmp_path / "j"), SIZE)  # after a kill during trimming
    assert [r.subject for r in file.read()] == ["new"]
    while file.has_ended:
        file.trim()
    count = file._database.execute("SELECT count(*) FROM records").fetchone()
    assert count == (1,)
    file.close()


def test_one_process_locks_the_file(tmp_path: Path) -> None:
    file = JournalFile(str(tmp_path / "j"), SIZE)
    with pytest.raises(ConfigError, match="another ServeCore"):
        JournalFile(str(tmp_path / "j"), SIZE)
    file.close()
    JournalFile(str(tmp_path / "j"), SIZE).close()


def test_other_files_and_versions_are_rejected(tmp_path: Path) -> None:
    filled(tmp_path / "newer")
    with sqlite3.connect(tmp_path / "newer") as database:
        database.execute(f"PRAGMA user_version = {SCHEMA + 1}")
    database.close()
    with sqlite3.connect(tmp_path / "other") as database:
        database.execute("CREATE TABLE t (x)")
    database.close()
    (tmp_path / "text").write_text("no database at all " * 100)
    for name, reason in {
        "newer": f"schema version {SCHEMA + 1}",
        "other": "not a journal",
        "text": "not a database",
        "missing/j": "No such file",
    }.items():
        for _ in range(2):  # the first attempt changed nothing and left no lock
            with pytest.raises(ConfigError, match=reason):
                JournalFile(str(tmp_path / name), SIZE)


def test_a_torn_log_loses_only_uncommitted_records(tmp_path: Path) -> None:
    path = tmp_path / "j"
    file = JournalFile(str(path), SIZE)
    sizes = []
    for seq in range(1, 20):
        file.write([record(seq)])
        sizes.append(Path(f"{path}-wal").stat().st_size)
    log, database = Path(f"{path}-wal").read_bytes(), path.read_bytes()
    file.close()
    for cut in range(sizes[9] - 100, sizes[10] + 100, 150):
        copy = tmp_path / f"copy{cut}"
        copy.write_bytes(database)
        Path(f"{copy}-wal").write_bytes(log[:cut])
        num_whole = sum(size <= cut for size in sizes)
        assert read(copy) == [record(seq) for seq in range(1, num_whole + 1)]


@pytest.mark.parametrize("seed", range(40))
def test_a_flipped_byte_loses_only_later_records(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    path = tmp_path / "j"
    records = filled(path, size=draw.choice([20, 300, 6000]))
    raw = bytearray(path.read_bytes())
    place = draw.randrange(len(raw))
    raw[place] ^= 1 << draw.randrange(8)
    path.write_bytes(raw)
    try:
        found = read(path)
    except ConfigError:
        assert place < 4096  # SQLite's description of the file
        assert len(path.read_bytes()) == len(raw)  # a rejected start changes nothing
        return
    assert found == records[: len(found)]
    asides = list(tmp_path.glob("j.damaged-*"))
    if len(found) < len(records):
        (aside,) = [one for one in asides if not one.name.endswith("-wal")]
        assert aside.read_bytes()[place] == raw[place]
        assert read(path) == found
        file = JournalFile(str(path), SIZE)
        file.write([record(file.last_seq() + 1)])  # the journal can still be written
        file.close()
        assert len(read(path)) == len(found) + 1


@pytest.mark.parametrize("part", ["facts", "sqlite_autoindex_facts_1", "ended"])
def test_damage_outside_of_records_loses_no_record(
    part: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "j"
    filled(path)
    file = JournalFile(str(path), SIZE)
    file.write([record(61, "2"), record(62, "3"), record(63, "2", ENDED)])
    epoch = file.epoch
    file.close()
    with sqlite3.connect(path) as database:
        # Earlier versions had this index.
        database.execute("CREATE INDEX ended ON records (subject) WHERE kind = 'ended'")
        (page,) = database.execute(
            "SELECT rootpage FROM sqlite_schema WHERE name = ?", (part,)
        ).fetchone()
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    database.close()
    raw = bytearray(path.read_bytes())
    raw[4096 * (page - 1) : 4096 * page] = b"\xff" * 4096
    path.write_bytes(raw)
    for is_again in (False, True):
        file = JournalFile(str(path), SIZE)
        assert [r.seq for r in file.read()] == [*range(1, 61), 62]
        assert file.epoch > epoch
        epoch = file.epoch
        assert file.fact("first", 7 + is_again) == 7
        file.write([record(file.last_seq() + 1, "2", ENDED)])
        file.close()
        assert ("damaged" in caplog.text) is not is_again
        caplog.clear()
    assert list(tmp_path.glob("j.damaged-*"))


@pytest.mark.parametrize("value", [2**62, -1, 1.5, "text"])
def test_an_invalid_epoch_is_replaced(value: object, tmp_path: Path) -> None:
    path = tmp_path / "j"
    records = filled(path)
    with sqlite3.connect(path) as database:
        database.execute("UPDATE facts SET value = ?", (value,))
    database.close()
    file = JournalFile(str(path), SIZE)
    assert list(file.read()) == records
    assert 2**40 < file.epoch < 2**42  # milliseconds
    file.close()


@pytest.mark.parametrize("value", [-1, 1.5, "text"])
def test_an_invalid_fact_counts_as_missing(value: object, tmp_path: Path) -> None:
    file = JournalFile(str(tmp_path / "j"), SIZE)
    assert list(file.read()) == []
    assert file.fact("first", 7) == 7
    with file._database as database:
        database.execute("UPDATE facts SET value = ? WHERE name = 'first'", (value,))
    assert file.fact("first", 8) == 8
    file.close()


def test_a_damaged_record_in_the_middle(tmp_path: Path) -> None:
    path = tmp_path / "j"
    records = filled(path)
    with sqlite3.connect(path) as database:
        database.execute("UPDATE records SET payload = '{}' WHERE seq = 31")
    database.close()
    assert read(path) == records[:30]


def test_it_can_be_copied_while_it_is_open(tmp_path: Path) -> None:
    file = JournalFile(str(tmp_path / "j"), SIZE)
    file.write([record(1), record(2)])
    reader, copy = sqlite3.connect(tmp_path / "j"), sqlite3.connect(tmp_path / "copy")
    reader.backup(copy)
    file.write([record(3)])
    reader.close()
    copy.close()
    file.close()
    assert [len(read(tmp_path / name)) for name in ("j", "copy")] == [3, 2]


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """Limit the size of files, like a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def opened(path: Path, size: int = SIZE, max_wait_s: float = 60.0) -> Journal:
    journal = Journal(JournalFile(str(path), size), MonotonicClock(), max_wait_s)
    journal.read(lambda record: None)
    return journal


async def recovered(journal: Journal) -> None:
    while journal.trouble:  # noqa: ASYNC110 - there is no event for the next attempt
        await asyncio.sleep(0.01)


async def test_appended_is_durable_in_order_and_in_groups(tmp_path: Path) -> None:
    journal = await opened(tmp_path / "j")
    assert journal._num_written == 0
    await journal.durable()  # nothing to wait for

    async def append(i: int) -> None:
        journal.append(str(i), "call", {"i": i})
        await journal.durable()

    await asyncio.gather(*[append(i) for i in range(100)])
    await journal.close()
    assert [r.fields()["i"] for r in read(tmp_path / "j")] == list(range(100))
    assert not [t for t in threading.enumerate() if t.name == "journal"]


async def test_records_are_written_although_no_caller_waits(tmp_path: Path) -> None:
    journal = await opened(tmp_path / "j")
    written, write = threading.Event(), journal._file.write

    def note(records: Sequence[Record]) -> None:
        write(records)
        written.set()

    journal._file.write = note  # type: ignore[method-assign]
    journal.append("1", "call", {})
    assert await asyncio.to_thread(written.wait, 60)
    await journal.close()
    assert [r.subject for r in read(tmp_path / "j")] == ["1"]


async def test_records_of_busy_turns_are_written_in_one_transaction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds for any number of turns of the event loop, because no program could continue
    earlier."""
    monkeypatch.setattr("parrot.journal.log._IDLE_S", -1.0)  # every turn counts as busy
    monkeypatch.setattr("parrot.journal.log._GATHER_S", 3600.0)
    monkeypatch.setattr("parrot.journal.log._LAZY_S", 3600.0)
    journal = await opened(tmp_path / "j")
    groups, write = list[int](), journal._file.write

    def note(records: Sequence[Record]) -> None:
        groups.append(len(records))
        write(records)

    journal._file.write = note  # type: ignore[method-assign]
    waiting = []
    for i in range(100):
        journal.append(str(i), "call", {})
        waiting.append(asyncio.create_task(journal.durable()))
        await asyncio.sleep(0)
    monkeypatch.setattr("parrot.journal.log._IDLE_S", 3600.0)
    await asyncio.gather(*waiting)
    assert groups == [100]
    await journal.close()
    assert len(read(tmp_path / "j")) == 100


async def test_an_unreadable_fact_is_a_startup_error(
    tmp_path: Path,
) -> None:
    journal = await opened(tmp_path / "j")

    def lost(name: str, value: int) -> int:
        raise sqlite3.OperationalError("disk I/O error")

    journal._file.fact = lost  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="disk I/O error"):
        journal.fact("secret", 7)
    await journal.close()


async def test_the_event_loop_owns_the_file_until_the_first_write(tmp_path: Path) -> None:
    """Looking up facts does not trim the records that an earlier process should have trimmed."""
    journal = await opened(tmp_path / "j")
    journal.append("1", "call", {})
    journal.end("1")
    journal._file.trim = lambda: None  # type: ignore[method-assign]
    await journal.close()
    journal = await opened(tmp_path / "j")
    assert journal._file.has_ended
    assert not [t for t in threading.enumerate() if t.name == "journal"]
    assert journal.fact("first", 7) == 7
    journal.append("2", "call", {})
    await journal.durable()
    await journal.close()
    assert [r.subject for r in read(tmp_path / "j")] == ["2"]


async def test_records_of_a_block_that_raises_are_not_written(tmp_path: Path) -> None:
    journal = await opened(tmp_path / "j")
    journal.append("1", "a", {})
    with suppress(ValueError), journal.recorded("1", "b", {}):
        journal.append("1", "c", {})
        raise ValueError
    with journal.recorded("1", "d", {}):
        journal.append("1", "e", {})
    await journal.durable()
    await journal.close()
    found = read(tmp_path / "j")
    assert [r.kind for r in found] == ["a", "d", "e"]
    assert [r.seq for r in found] == [1, 2, 3]


async def test_a_full_disk_rejects_and_loses_nothing(tmp_path: Path) -> None:
    journal = await opened(tmp_path / "j")
    journal.append("1", "a", {})
    await journal.durable()
    with file_size_limit(os.stat(f"{tmp_path}/j-wal").st_size + 100):
        journal.append("1", "b", {"text": "x" * 10_000})
        with pytest.raises(InsufficientStorage, match="cannot be written"):
            await journal.durable()
        with pytest.raises(InsufficientStorage):
            journal.require_room()
        journal.append("1", "c", {})  # accepted work continues
        with pytest.raises(InsufficientStorage):
            await journal.durable()
        await journal.published()  # readers do not wait
    await recovered(journal)
    journal.require_room()
    await journal.durable()
    await journal.close()
    assert [r.kind for r in read(tmp_path / "j")] == ["a", "b", "c"]


async def test_a_journal_on_a_full_disk_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "j"
    journal = await opened(path)
    secret, epochs = journal.fact("secret", 7), [journal.epoch]
    journal.append("1", "a", {"text": "x" * 50_000})
    await journal.durable()
    for name in ("j", "j-wal"):  # like after SIGKILL
        (tmp_path / f"{name}.left").write_bytes((tmp_path / name).read_bytes())
    await journal.close()
    for name in ("j", "j-wal"):
        (tmp_path / f"{name}.left").rename(tmp_path / name)
    with file_size_limit(os.stat(f"{tmp_path}/j-wal").st_size):
        found: list[Record] = []
        journal = Journal(JournalFile(str(path), SIZE), MonotonicClock())
        journal.read(found.append)
        assert [r.kind for r in found] == ["a"]
        assert journal.fact("secret", 8) == secret
        epochs.append(journal.epoch)
        journal.append("1", "b", {})
        with pytest.raises(InsufficientStorage):
            await journal.durable()
        waiting = asyncio.ensure_future(journal.writable())
    async with asyncio.timeout(20):
        await waiting
    await journal.durable()
    await journal.close()
    file = JournalFile(str(path), SIZE)
    assert [r.kind for r in file.read()] == ["a", "b"]
    epochs.append(file.epoch)
    assert epochs == sorted(set(epochs))
    file.close()


def test_the_error_for_a_journal_that_cannot_be_created(tmp_path: Path) -> None:
    with file_size_limit(100), pytest.raises(ConfigError, match="free space of its disk"):
        JournalFile(str(tmp_path / "j"), SIZE)


def test_a_temporary_read_error_does_not_truncate_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = filled(tmp_path / "j")
    file = JournalFile(str(tmp_path / "j"), SIZE)
    broken = sqlite3.OperationalError("disk I/O error")
    broken.sqlite_errorcode = sqlite3.SQLITE_IOERR_READ

    class Failing:
        def execute(self, *_: object) -> None:
            raise broken

    with monkeypatch.context() as patch:
        patch.setattr(file, "_database", Failing())
        with pytest.raises(sqlite3.OperationalError, match="disk I/O error"):
            list(file.read())
    assert list(file.read()) == records
    file.close()


async def test_failed_writes_reach_waiting_callers_and_are_retried(tmp_path: Path) -> None:
    journal = await opened(tmp_path / "j")
    write, errors = journal._file.write, [MemoryError("no memory")]

    def fail_once(records: Sequence[Record]) -> None:
        if errors:
            raise errors.pop()
        write(records)

    journal._file.write = fail_once  # type: ignore[method-assign]
    journal.append("1", "a", {})
    async with asyncio.timeout(10):
        with pytest.raises(InsufficientStorage, match="no memory"):
            await journal.durable()
        await recovered(journal)
        await journal.durable()
    await journal.close()
    assert [r.kind for r in read(tmp_path / "j")] == ["a"]


async def test_a_hung_disk_rejects_new_work_and_loses_nothing(tmp_path: Path) -> None:
    journal = await opened(tmp_path / "j", max_wait_s=0.05)
    write, may_write = journal._file.write, threading.Event()

    def wait_and_write(records: Sequence[Record]) -> None:
        assert may_write.wait(10)
        write(records)

    journal._file.write = wait_and_write  # type: ignore[method-assign]
    journal.append("1", "a", {})
    reading = asyncio.ensure_future(journal.published())
    async with asyncio.timeout(10):
        with pytest.raises(InsufficientStorage, match="has waited for"):
            await journal.durable()
        await reading  # readers have their values
        with pytest.raises(InsufficientStorage):
            journal.require_room()
        journal.append("1", "b", {})  # accepted work continues
        await journal.published()
        may_write.set()
        await recovered(journal)
        await journal.durable()
    journal.require_room()
    await journal.close()
    assert [r.kind for r in read(tmp_path / "j")] == ["a", "b"]


async def test_with_a_slow_disk_waits_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each write is fast, but records are appended faster than they are written."""
    monkeypatch.setattr("parrot.journal.log._BYTES_PER_WRITE", 8 * 2**10)
    journal = await opened(tmp_path / "j", max_wait_s=0.1)
    write, num_refused = journal._file.write, 0

    def write_slowly(records: Sequence[Record]) -> None:
        threading.Event().wait(0.03)
        write(records)

    journal._file.write = write_slowly  # type: ignore[method-assign]
    loop = asyncio.get_running_loop()
    for _ in range(6):
        for _ in range(4):
            journal.append("1", "a", {"text": "x" * 9 * 2**10})  # more than fits into one write
        began = loop.time()
        try:
            await journal.durable()
        except InsufficientStorage:
            num_refused += 1
        assert loop.time() - began < 5
    assert num_refused
    is_written = False
    async with asyncio.timeout(20):
        while not is_written:
            await recovered(journal)
            with suppress(InsufficientStorage):
                await journal.durable()
                is_written = True
    await journal.close()
    assert len(read(tmp_path / "j")) == 24


async def test_a_closed_journal_ends_all_waits(tmp_path: Path) -> None:
    journal = await opened(tmp_path / "j")
    journal.append("1", "a", {})
    await journal.durable()
    await journal.close()
    await journal.durable()  # of the appended records
    journal.append("1", "b", {})
    with pytest.raises(InsufficientStorage, match="it was closed"):
        await asyncio.wait_for(journal.durable(), 30)


async def test_a_full_journal_rejects_work_until_a_session_ends(tmp_path: Path) -> None:
    journal = await opened(tmp_path / "j", size=2**20)
    count = 0
    while not journal.trouble:
        count += 1
        journal.append(f"{count % 2}", "call", {"text": "x" * 10_000})
        with suppress(InsufficientStorage):
            await journal.durable()
    assert 50 < count < 120
    journal.end("0")
    await recovered(journal)
    journal.append("1", "call", {"text": "x" * 10_000})
    await journal.durable()
    await journal.close()
    assert {r.subject for r in read(tmp_path / "j")} == {"1"}


async def test_an_unwritable_journal_does_not_block_the_shutdown(
    tmp_path: Path,
) -> None:
    journal = await opened(tmp_path / "j")
    with file_size_limit(1):
        journal.append("1", "b", {"text": "x" * 10_000})
        await journal.close()
    assert read(tmp_path / "j") == []


def test_an_epoch_grows_although_the_clock_was_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise engines would reject the restarted ServeCore."""
    path = str(tmp_path / "j")
    epochs = []
    for hours in (0, -24, -1, 5):
        now_ms = 1_800_000_000_000 + hours * 3_600_000
        with monkeypatch.context() as patch:
            patch.setattr("parrot.journal.sqlite._now_ms", lambda now_ms=now_ms: now_ms)
            file = JournalFile(path, SIZE)
        epochs.append(file.epoch)
        file.close()
    assert epochs == sorted(set(epochs))
    assert epochs[:2] == [1_800_000_000_000, 1_800_000_000_001]
