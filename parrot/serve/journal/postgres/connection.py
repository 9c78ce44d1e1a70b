"""Connections to the server of a journal, and the journal's tables there."""

from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict

from parrot.utils.config import ConfigError

Connection = psycopg.Connection[tuple[Any, ...]]

SCHEMA = 1
# A server that is gone is noticed within some seconds, whatever the operating system's defaults.
_OPTIONS: dict[str, Any] = {
    "application_name": "parrot",
    "connect_timeout": 5,
    "keepalives_idle": 2,
    "keepalives_interval": 1,
    "keepalives_count": 3,
    "tcp_user_timeout": 5000,
}
# Who waited for the lease's row must look at it again; what is acknowledged must be on disk.
_SETTINGS = """
SET default_transaction_isolation = 'read committed';
SELECT set_config('synchronous_commit', 'on', false)
WHERE current_setting('synchronous_commit') = 'off';
"""
_ONE_AT_A_TIME = 0x50727274
_TABLES = f"""
CREATE TABLE parrot_records (
    seq bigint PRIMARY KEY, at double precision NOT NULL, subject text NOT NULL, kind text NOT NULL,
    payload bytea NOT NULL, checksum bigint NOT NULL
);
CREATE INDEX parrot_records_subject ON parrot_records (subject, seq);
CREATE INDEX parrot_records_ended ON parrot_records (subject) WHERE kind = 'ended';
CREATE TABLE parrot_facts (name text PRIMARY KEY, value bigint NOT NULL);
INSERT INTO parrot_facts VALUES ('schema', {SCHEMA});
CREATE TABLE parrot_lease (epoch bigint PRIMARY KEY, expires timestamptz NOT NULL);
INSERT INTO parrot_lease VALUES (0, '-infinity');
""".encode()


def connect(address: str) -> Connection:
    """Each statement is a transaction. Raises `psycopg.Error`."""
    options = _OPTIONS | conninfo_to_dict(address)
    connection = psycopg.connect(**options, autocommit=True)
    try:
        connection.execute(_SETTINGS)
    except BaseException:
        connection.close()
        raise
    return connection


def prepare(address: str) -> None:
    """Make the tables if they are missing. Raises `ConfigError` if the journal cannot be had: the
    server cannot be reached, or the tables are a newer version's."""
    try:
        conninfo_to_dict(address)
    except psycopg.Error:  # its message may have the password
        raise ConfigError(
            "journal: is no address like postgresql://USER:PASSWORD@HOST:PORT/DATABASE"
        ) from None
    try:
        with connect(address) as connection, connection.transaction():
            connection.execute("SELECT pg_advisory_xact_lock(%s)", (_ONE_AT_A_TIME,))
            if connection.execute("SELECT to_regclass('parrot_facts')").fetchone() == (None,):
                connection.execute(_TABLES)
            schema = connection.execute("SELECT value FROM parrot_facts WHERE name = 'schema'")
            if (found := schema.fetchone()) != (SCHEMA,):
                known = None if found is None else found[0]
                raise ConfigError(
                    f"journal: the tables have schema version {known}, and this Parrot writes "
                    f"{SCHEMA}: start the version that wrote them, or name another database"
                )
    except psycopg.Error as error:
        raise ConfigError(f"journal: {error}") from None
