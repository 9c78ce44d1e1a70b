"""The table of tenants and their API keys, the keys file, and the salts of tenants' caches."""

import hashlib
import hmac
import os
import stat
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from parrot.protocol.errors import AuthenticationFailed, PermissionDenied
from parrot.serve.config import CoreConfig
from parrot.utils.config import ConfigError, ConfigModel, parse_config, parse_config_object
from parrot.utils.ids import new_token

PUBLIC_ID = "public"
"""The tenant of requests without a key, if no key is required."""

MIN_WEIGHT, MAX_WEIGHT = 0.001, 1000.0

Limit = Annotated[int, Field(ge=1, le=2**40)]


class Scope(StrEnum):
    """The permissions of a key."""

    USER = "user"  # its own sessions and requests
    ADMIN = "admin"  # the operator's routes
    METRICS = "metrics"  # the metrics of the whole service


class TenantLimits(ConfigModel):
    """Limits of one tenant. null: as `tenant_quota`. A request beyond a limit gets 429 and changes
    nothing."""

    sessions: Limit | None = Field(None, description="Live sessions.")
    calls_in_flight: Limit | None = Field(
        None,
        description="Queued and running calls. At the limit, requests that start work are "
        "rejected. Calls that an accepted read starts are not.",
    )
    variables: Limit | None = Field(
        None, description="Variables of its live sessions; null: `tenant_quota.variables`."
    )
    text_bytes: Limit | None = Field(
        None, description="Bytes of text in its live sessions. null: `tenant_quota.text_bytes`."
    )
    tokens_per_minute: Limit | None = Field(
        None,
        description="Prompt and output tokens of its calls, including cached ones. The budget "
        "of one minute may be used at once. A call is charged its expected tokens when it is "
        "queued, and its actual tokens when it finishes. Reused results are free.",
    )
    requests_per_minute: Limit | None = Field(
        None,
        description="Requests that may start work. The budget of one minute may be used at once.",
    )

    @property
    def has_any(self) -> bool:
        """Whether any limit is set."""
        return any(value is not None for _, value in self)

    @property
    def amounts(self) -> dict[str, int]:
        """The limits that are set of the live sessions' usage."""
        given = {
            "sessions": self.sessions,
            "variables": self.variables,
            "text_bytes": self.text_bytes,
        }
        return {name: limit for name, limit in given.items() if limit is not None}


_NO_LIMITS = TenantLimits()


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant, the holder of an API key."""

    id: str
    weight: float = 1.0  # of its share of the service, relative to other tenants
    share_group: str | None = None  # tenants with the same name share caches; None: no sharing
    scopes: frozenset[Scope] = frozenset({Scope.USER})
    limits: TenantLimits = _NO_LIMITS
    history: bool = True  # finished runs are kept

    def require(self, scope: Scope) -> None:
        """Raises `PermissionDenied`."""
        if scope not in self.scopes:
            raise PermissionDenied(f"the key of {self.id} does not have the scope `{scope}`")


_PUBLIC = Tenant(PUBLIC_ID)


def id_of_key(api_key: str) -> str:
    """The tenant's id for an invented key. Also the id for a key of `api_keys` in journals of
    schema version 1."""
    return hashlib.sha256(api_key.encode("utf-8", "surrogatepass")).hexdigest()[:16]


MAX_KEYS = 1024  # Keys in a file.
_MAX_FILE_BYTES = 2**18  # Size of a keys file.
_RESERVED_IDS = frozenset({PUBLIC_ID, "operator", "other"})

_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,62}$")]


class KeyEntry(ConfigModel):
    """One API key and its tenant. `parrot keys` adds and removes entries."""

    id: _Name = Field(description="The tenant's name, as logs, metrics and the page show it.")
    sha256: str = Field(
        pattern=r"^[0-9a-f]{64}$", description="The SHA-256 of the key, in hexadecimal."
    )
    scopes: tuple[Scope, ...] = Field(
        (Scope.USER,),
        min_length=1,
        description="The rights of the key: `user`, its own sessions and requests; `admin`, the "
        "operator's routes; `metrics`, those of the whole service.",
    )
    weight: float = Field(
        1.0,
        ge=MIN_WEIGHT,
        le=MAX_WEIGHT,
        description="The tenant's weight when engines are shared with other tenants.",
    )
    share_group: _Name | None = Field(
        None,
        description="Tenants with the same `share_group` share cached prompts and results, so each "
        "may learn what the others sent. null: no sharing.",
    )
    limits: TenantLimits = Field(TenantLimits(), description="Limits of the tenant.")
    history: bool = Field(
        True,
        description="Keep finished runs of the tenant, with their prompts and values, for the "
        "page. false: they are deleted, including earlier ones.",
    )

    def tenant(self) -> Tenant:
        scopes = frozenset(self.scopes)
        return Tenant(self.id, self.weight, self.share_group, scopes, self.limits, self.history)


def read_keys(path: str) -> list[KeyEntry]:
    """The entries of a keys file, `{"keys": [...]}`, in JSON or (by its name) YAML. Raises
    `ConfigError` with all problems of the file, and if other users can write it."""
    return parse_keys(_read_file(path), path)


def parse_keys(raw: bytes, path: str) -> list[KeyEntry]:
    """The entries in the bytes of a keys file. Raises `ConfigError`."""
    if len(raw) > _MAX_FILE_BYTES:
        raise ConfigError(f"{path}: has more than {_MAX_FILE_BYTES} bytes")
    payload = parse_config_object(raw, path)
    given = payload.pop("keys", None)
    if payload or not isinstance(given, list) or len(given) > MAX_KEYS:
        raise ConfigError(f"{path}: must contain only `keys`, a list of at most {MAX_KEYS} entries")
    entries: list[KeyEntry] = []
    problems: list[str] = []
    taken: set[str] = set()
    for number, fields in enumerate(given):
        try:
            entry = _entry(f"{path}: keys.{number}", fields)
        except ConfigError as error:
            problems.append(str(error))
        else:
            problems += _clashes(f"{path}: keys.{number}", entry, taken)
            taken |= {entry.id, entry.sha256}
            entries.append(entry)
    if problems:
        raise ConfigError("\n".join(problems))
    return entries


def facts_of(path: str) -> object:
    """A value that differs after each change of the file; None if the file does not exist."""
    try:
        facts = os.stat(path)
    except OSError:
        return None
    return facts.st_mtime_ns, facts.st_size, facts.st_ino, facts.st_mode


def _read_file(path: str) -> bytes:
    try:
        with Path(path).open("rb") as file:
            facts = os.fstat(file.fileno())
            if not stat.S_ISREG(facts.st_mode):
                raise ConfigError(f"{path}: is not a regular file")
            if stat.S_IMODE(facts.st_mode) & 0o022:
                raise ConfigError(
                    f"{path}: other users can write it and add keys: run chmod go-w {path}"
                )
            return file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


def _entry(place: str, fields: Any) -> KeyEntry:
    if not isinstance(fields, dict):
        raise ConfigError(f"{place}: must be an object with `id` and `sha256`")
    return parse_config(KeyEntry, fields, place)


def _clashes(place: str, entry: KeyEntry, taken: Set[str]) -> list[str]:
    """The entry's conflicts with earlier ones. `taken`: ids and digests, which differ in length."""
    problems = []
    if entry.id in _RESERVED_IDS:
        problems.append(f"{place}: `id`: {entry.id} is reserved")
    if entry.id in taken:
        problems.append(f"{place}: `id`: {entry.id} appears twice")
    if entry.sha256 in taken:
        problems.append(f"{place}: `sha256`: another entry has this key")
    return problems


_SALT_LEN = 32  # Hexadecimal digits of a salt.


class KeysChange(NamedTuple):
    """The ids of changed tenants. Tenants in `rekeyed` have a new key."""

    added: list[str]
    removed: list[str]
    rekeyed: list[str]
    changed: list[str]


class TenantTable:
    """The tenants with keys, from the config's `api_keys` and `keys_file`. Without both,
    `is_closed` is false. Then each key that a client invents is a tenant, and requests without a
    key belong to the tenant `public`."""

    def __init__(self, config: CoreConfig) -> None:
        """Raises `ConfigError` for the keys file."""
        self.path = config.keys_file
        self.is_closed = config.needs_keys
        """Whether requests need a key."""
        # The token makes the same salts after a restart, so engines' caches can be used again.
        self._has_token = config.cluster_token is not None
        secret = (config.cluster_token or new_token()).encode("utf-8", "surrogatepass")
        self._secret = _salt_secret(secret)
        self._keys = config.api_keys
        self.names_secret = hmac.digest(secret, b"tenant names", "sha256")
        """The secret of the ids of tenants in `api_keys`."""
        self._name_keys()
        self._by_digest: Mapping[bytes, Tenant] = {}
        self._by_id: Mapping[str, tuple[bytes, Tenant]] = {}
        self.replace([] if self.path is None else read_keys(self.path))

    def restored(self, secret: bytes, names_secret: bytes) -> None:
        """Derive salts from the journal's secret, if there is no cluster token. Use the journal's
        secret of names, so that ids stay the same if the token changes. Call it before the first
        session and the first change of keys."""
        if not self._has_token:
            self._secret = _salt_secret(secret)
        self.names_secret = names_secret
        fixed = self._fixed
        of_file = {one: tenant for one, tenant in self._by_digest.items() if one not in fixed}
        self._name_keys()
        self._index(of_file)

    def _name_keys(self) -> None:
        """Name the tenants of `api_keys`. Without the secret, an id is no help to guess a key."""
        ids = {key: self._id_of_own_key(key) for key in self._keys}
        self._fixed = {_digest(key): Tenant(name) for key, name in ids.items()}
        names = {name: f"key {number}" for number, name in enumerate(ids.values(), 1)}
        self._names = {PUBLIC_ID: PUBLIC_ID} | names
        self._renamed = {id_of_key(key): name for key, name in ids.items()}

    def _id_of_own_key(self, api_key: str) -> str:
        return hmac.digest(self.names_secret, _digest(api_key), "sha256").hex()[:16]

    def current_id(self, tenant_id: str) -> str:
        """The present id of a tenant in a journal."""
        return self._renamed.get(tenant_id, tenant_id) if self.is_closed else tenant_id

    def replace(self, entries: Sequence[KeyEntry]) -> KeysChange:
        """Replace the keys of the file. Raises `ConfigError`, and then nothing has changed."""
        of_file: dict[bytes, Tenant] = {}
        for entry in entries:
            digest = bytes.fromhex(entry.sha256)
            if digest in self._fixed:
                raise ConfigError(f"{self.path}: the key of {entry.id} is also in `api_keys`")
            of_file[digest] = entry.tenant()
        before = self._by_id
        after = self._index(of_file)
        both = [name for name in after if name in before]
        return KeysChange(
            added=[name for name in after if name not in before],
            removed=[name for name in before if name not in after],
            rekeyed=[name for name in both if before[name][0] != after[name][0]],
            changed=[name for name in both if before[name][1] != after[name][1]],
        )

    def _index(self, of_file: Mapping[bytes, Tenant]) -> Mapping[str, tuple[bytes, Tenant]]:
        """Index all tenants, by their digests and ids."""
        self._by_digest = by_digest = {**self._fixed, **of_file}
        self._by_id = {one.id: (digest, one) for digest, one in by_digest.items()}
        # Tenants with invented keys have no place here, because their number is unlimited.
        self._salts = {one.id: self._new_salt(one) for one in (_PUBLIC, *by_digest.values())}
        return self._by_id

    def __iter__(self) -> Iterator[Tenant]:
        return iter(list(self._by_digest.values()))

    def find(self, tenant_id: str) -> Tenant | None:
        known = self._by_id.get(tenant_id)
        return None if known is None else known[1]

    def get(self, tenant_id: str) -> Tenant:
        """The tenant with this id. Without a key it has default limits."""
        known = self._by_id.get(tenant_id)
        if known is not None:
            return known[1]
        return _PUBLIC if tenant_id == PUBLIC_ID else Tenant(tenant_id)

    def is_served(self, tenant_id: str) -> bool:
        """Whether the tenant may have sessions now."""
        tenant = self.get(tenant_id) if not self.is_closed else self.find(tenant_id)
        return tenant is not None and Scope.USER in tenant.scopes

    def keeps_runs(self, tenant_id: str) -> bool:
        """Whether finished runs of the tenant may be kept."""
        tenant = self.find(tenant_id)
        if tenant is None:
            return not self.is_closed
        return tenant.history and Scope.USER in tenant.scopes

    def cache_salt(self, tenant_id: str) -> str:
        """The salt that separates the tenant's caches. Tenants of one share group have the same
        salt. Clients cannot compute it."""
        known = self._salts.get(tenant_id)
        return self._new_salt(self.get(tenant_id)) if known is None else known

    def _new_salt(self, tenant: Tenant) -> str:
        group = tenant.share_group
        whose = f"tenant {tenant.id}" if group is None else f"group {group}"
        return hmac.digest(self._secret, whose.encode(), "sha256").hex()[:_SALT_LEN]

    def weigh(self, tenant_id: str) -> float:
        """The weight of the tenant's share."""
        return self.get(tenant_id).weight

    def is_named(self, tenant_id: str) -> bool:
        """Whether metrics have the tenant's name. Invented keys have no metrics of their own,
        because their number is unlimited."""
        return tenant_id == PUBLIC_ID or tenant_id in self._by_id

    def name_of(self, tenant_id: str) -> str:
        """The tenant's name for people, without a digest of its key. All tenants with an invented
        key have the same name."""
        is_unnamed = not self.is_closed and not self.is_named(tenant_id)
        return "key “any”" if is_unnamed else self._names.get(tenant_id, tenant_id)

    def of_key(self, api_key: str | None) -> Tenant:
        """The tenant of a key. Raises `AuthenticationFailed`."""
        if not self.is_closed:
            return self.get(id_of_key(api_key) if api_key else PUBLIC_ID)
        tenant = self.find_by_key(api_key or "")
        if tenant is None:
            raise AuthenticationFailed("missing or wrong api_key (`Authorization: Bearer KEY`)")
        return tenant

    def user_of_key(self, api_key: str | None) -> Tenant:
        """Like `of_key`, for requests of programs. Also raises `PermissionDenied`."""
        tenant = self.of_key(api_key)
        tenant.require(Scope.USER)
        return tenant

    def find_by_key(self, api_key: str) -> Tenant | None:
        """The tenant with this key. The time of the lookup reveals nothing about keys: it depends
        on their digests, whose hash values differ in each process."""
        return self._by_digest.get(_digest(api_key))

    def digest_of(self, tenant_id: str) -> bytes | None:
        """The digest of the tenant's key; None if the tenant has no key now."""
        known = self._by_id.get(tenant_id)
        return None if known is None else known[0]


def _salt_secret(secret: bytes) -> bytes:
    return hmac.digest(secret, b"cache salts", "sha256")


def _digest(api_key: str) -> bytes:
    return sha256(api_key.encode("utf-8", "surrogatepass")).digest()
