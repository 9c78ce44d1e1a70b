"""A private PostgreSQL server for the journal of two ServeCores. Needs Debian's packages."""

import importlib.util
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

PASSWORD = "not to be shown"
_USER = "postgres"  # The server refuses to run as root.
_SETTINGS = """
listen_addresses = '127.0.0.1'
fsync = off
"""


class Database:
    """A running server, which can be killed and started again. Each user gets its own database."""

    def __init__(self, folder: Path, bin_folder: Path, log_folder: Path | None = None) -> None:
        """`log_folder` is the folder of the write-ahead log, whose files have 1 MB each."""
        self._folder = folder
        self._bin = bin_folder
        self._data = folder / "data"
        self.owner = _USER if os.geteuid() == 0 else None
        self._who: dict[str, Any] = {"user": self.owner, "cwd": folder}
        self._num_databases = 0
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = int(listener.getsockname()[1])
        password = folder / "password"
        password.write_text(PASSWORD)
        _give_away(folder, password)
        made = [str(bin_folder / "initdb"), "-N", "-D", str(self._data), "-U", "admin"]
        made += ["-A", "scram-sha-256", f"--pwfile={password}"]
        if log_folder is not None:
            made += [f"--waldir={log_folder}", "--wal-segsize=1"]
        subprocess.run(made, **self._who, check=True, stdout=subprocess.DEVNULL, timeout=60)
        with (self._data / "postgresql.conf").open("a") as config:
            config.write(f"{_SETTINGS}port = {self.port}\nunix_socket_directories = '{folder}'\n")
        self.start()

    def start(self) -> None:
        """Start the server, and return when it accepts connections."""
        self._process = subprocess.Popen(
            [str(self._bin / "postgres"), "-D", str(self._data)],
            **self._who,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        log = self._process.stderr
        assert log is not None
        lines: list[str] = []
        for line in log:
            lines.append(line)
            if "ready to accept connections" in line:
                self._reader = threading.Thread(target=log.read)
                self._reader.start()
                return
        raise RuntimeError("".join(lines))

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def kill(self) -> None:
        """`kill -9` the server and its connection processes."""
        self.signal(signal.SIGKILL)
        self.await_end()

    def await_end(self) -> None:
        self._process.wait()
        self._reader.join()
        assert self._process.stderr is not None
        self._process.stderr.close()

    def signal(self, signum: signal.Signals) -> None:
        """Send a signal to the server and to the processes of all its connections."""
        children = ["pgrep", "-P", str(self._process.pid)]
        found = subprocess.run(children, capture_output=True, text=True).stdout
        for pid in [self._process.pid, *map(int, found.split())]:
            with suppress(ProcessLookupError):
                os.kill(pid, signum)

    def give(self, *paths: Path) -> None:
        """Make the user of the server the owner of the paths."""
        _give_away(*paths)

    def database(self, tablespace: str = "pg_default") -> str:
        """Create a database, and return its address."""
        import psycopg

        self._num_databases += 1
        name = f"journal{self._num_databases}"
        with psycopg.connect(self.address("postgres"), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name} TABLESPACE {tablespace}".encode())
        return self.address(name)

    def address(self, database: str) -> str:
        password = PASSWORD.replace(" ", "%20")
        return f"postgresql://admin:{password}@127.0.0.1:{self.port}/{database}"


@contextmanager
def running_database(log_folder: Path | None = None) -> Iterator[Database]:
    """Run a server. Raises `LookupError` with the missing package if there is no PostgreSQL."""
    bin_folder = _bin_folder()
    folder = Path(tempfile.mkdtemp(prefix="parrot-postgres-"))
    try:
        server = Database(folder, bin_folder, log_folder)
        try:
            yield server
        finally:
            server.kill()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _bin_folder() -> Path:
    """Return the folder of the newest version's programs. Debian does not put them into PATH."""
    if importlib.util.find_spec("psycopg") is None:
        raise LookupError("needs psycopg: pip install 'parrot-serve[postgres]'")
    found = shutil.which("initdb")
    versions = Path("/usr/lib/postgresql").glob("*/bin/initdb")
    programs = [Path(found)] if found is not None else sorted(versions)
    if not programs or (os.geteuid() == 0 and not _has_user()):
        raise LookupError("needs a PostgreSQL server: apt-get install postgresql")
    return programs[-1].parent


def _has_user() -> bool:
    try:
        pwd.getpwnam(_USER)
    except KeyError:
        return False
    return True


def _give_away(*paths: Path) -> None:
    if os.geteuid() == 0:
        for path in paths:
            shutil.chown(path, _USER, _USER)
