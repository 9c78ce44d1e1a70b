"""The tenants, by their ids and by the digests of their keys."""

import hmac
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from typing import NamedTuple

from parrot.protocol.errors import AuthenticationFailed
from parrot.serve.config import CoreConfig
from parrot.serve.tenants.keys_file import KeyEntry, read_keys
from parrot.serve.tenants.tenant import PUBLIC_ID, Scope, Tenant, id_of_key
from parrot.utils.config import ConfigError
from parrot.utils.ids import new_token

_SALT_LEN = 32  # hexadecimal digits


class KeysChange(NamedTuple):
    """The ids of tenants, by what became of them; `rekeyed` have another key."""

    added: list[str]
    removed: list[str]
    rekeyed: list[str]
    changed: list[str]


class TenantTable:
    """The tenants that have keys: in the config's `api_keys`, and in its `keys_file`. With neither
    (`is_closed` is false), whoever makes up a key is a tenant, and all requests without one are
    those of another."""

    def __init__(self, config: CoreConfig) -> None:
        """Raises `ConfigError` for the file."""
        self.path = config.keys_file
        self.is_closed = config.needs_keys
        """Whether requests need a key."""
        # The same after a restart: what engines have cached can be used again.
        self._has_token = config.cluster_token is not None
        secret = (config.cluster_token or new_token()).encode("utf-8", "surrogatepass")
        self._secret = _salt_secret(secret)
        self._fixed = {_digest(key): Tenant(id_of_key(key)) for key in config.api_keys}
        self._by_digest: Mapping[bytes, Tenant] = {}
        self._by_id: Mapping[str, tuple[bytes, Tenant]] = {}
        self.replace([] if self.path is None else read_keys(self.path))

    def restored(self, secret: bytes) -> None:
        """Make salts by this secret, which is the journal's, if there is no cluster token."""
        if not self._has_token:
            self._secret = _salt_secret(secret)

    def replace(self, entries: Sequence[KeyEntry]) -> KeysChange:
        """Have these keys besides the config's. Raises `ConfigError`, and nothing has changed."""
        by_digest = dict(self._fixed)
        for entry in entries:
            digest = bytes.fromhex(entry.sha256)
            if digest in self._fixed:
                raise ConfigError(f"{self.path}: the key of {entry.id} is one of `api_keys`, too")
            by_digest[digest] = entry.tenant()
        before = self._by_id
        self._by_digest = by_digest
        self._by_id = after = {one.id: (digest, one) for digest, one in by_digest.items()}
        both = [name for name in after if name in before]
        return KeysChange(
            added=[name for name in after if name not in before],
            removed=[name for name in before if name not in after],
            rekeyed=[name for name in both if before[name][0] != after[name][0]],
            changed=[name for name in both if before[name][1] != after[name][1]],
        )

    def __iter__(self) -> Iterator[Tenant]:
        return iter(list(self._by_digest.values()))

    def find(self, tenant_id: str) -> Tenant | None:
        known = self._by_id.get(tenant_id)
        return None if known is None else known[1]

    def get(self, tenant_id: str) -> Tenant:
        """The tenant with this id; one with all defaults if it has no key."""
        return self.find(tenant_id) or Tenant(tenant_id)

    def is_served(self, tenant_id: str) -> bool:
        """Whether it may have sessions now."""
        tenant = self.get(tenant_id) if not self.is_closed else self.find(tenant_id)
        return tenant is not None and Scope.USER in tenant.scopes

    def cache_salt(self, tenant_id: str) -> str:
        """The salt that parts its caches from others': tenants of one share group have one, and
        nobody else can make it."""
        group = self.get(tenant_id).share_group
        whose = f"tenant {tenant_id}" if group is None else f"group {group}"
        return hmac.digest(self._secret, whose.encode(), "sha256").hex()[:_SALT_LEN]

    def weigh(self, tenant_id: str) -> float:
        """The weight of the tenant's share."""
        return self.get(tenant_id).weight

    def is_named(self, tenant_id: str) -> bool:
        """Whether metrics name it. They name none of keys that anyone may make up: there is no end
        of them."""
        return tenant_id == PUBLIC_ID or tenant_id in self._by_id

    def of_key(self, api_key: str | None) -> Tenant:
        """Whose work a request with this key is. Raises `AuthenticationFailed`."""
        if not self.is_closed:
            return self.get(id_of_key(api_key) if api_key else PUBLIC_ID)
        tenant = self.find_by_key(api_key or "")
        if tenant is None:
            raise AuthenticationFailed("missing or wrong api_key (`Authorization: Bearer KEY`)")
        return tenant

    def user_of_key(self, api_key: str | None) -> Tenant:
        """The same, for requests of its own. Raises `PermissionDenied`, too."""
        tenant = self.of_key(api_key)
        tenant.require(Scope.USER)
        return tenant

    def find_by_key(self, api_key: str) -> Tenant | None:
        """The tenant that has this key. The time says nothing about keys: they are looked up by
        their digests, whose hashes in this process nobody outside knows."""
        return self._by_digest.get(_digest(api_key))

    def digest_of(self, tenant_id: str) -> bytes | None:
        """The digest of the tenant's key; None if it has none now."""
        known = self._by_id.get(tenant_id)
        return None if known is None else known[0]


def _salt_secret(secret: bytes) -> bytes:
    return hmac.digest(secret, b"cache salts", "sha256")


def _digest(api_key: str) -> bytes:
    return sha256(api_key.encode("utf-8", "surrogatepass")).digest()
