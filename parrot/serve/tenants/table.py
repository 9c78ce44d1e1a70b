"""The tenants, by their ids and by the digests of their keys."""

import hmac
from collections.abc import Iterator, Mapping
from hashlib import sha256

from parrot.protocol.errors import AuthenticationFailed
from parrot.serve.config import CoreConfig
from parrot.serve.tenants.tenant import PUBLIC_ID, Tenant, id_of_key


class TenantTable:
    """The tenants that have keys. Without any (`is_closed` is false), whoever makes up a key is a
    tenant, and all requests without one are those of another."""

    def __init__(self, config: CoreConfig) -> None:
        self._by_id: dict[str, Tenant] = {}
        self._digests: dict[bytes, str] = {}
        for key in config.api_keys:
            tenant = Tenant(id_of_key(key))
            self._by_id[tenant.id] = tenant
            self._digests[_digest(key)] = tenant.id

    @property
    def is_closed(self) -> bool:
        """Whether requests need a key."""
        return bool(self._digests)

    def __iter__(self) -> Iterator[Tenant]:
        return iter(list(self._by_id.values()))

    def find(self, tenant_id: str) -> Tenant | None:
        return self._by_id.get(tenant_id)

    def is_named(self, tenant_id: str) -> bool:
        """Whether metrics name it. Those of keys that anyone may make up they do not: there is no
        end of them."""
        return tenant_id == PUBLIC_ID or tenant_id in self._by_id

    def get(self, tenant_id: str) -> Tenant:
        """The tenant with this id; one with all defaults if it has no key."""
        return self._by_id.get(tenant_id) or Tenant(tenant_id)

    def of_key(self, api_key: str | None) -> Tenant:
        """Whose work a request with this key is. Raises `AuthenticationFailed`."""
        if self.is_closed:
            tenant = self.find_by_key(api_key or "")
            if tenant is None:
                raise AuthenticationFailed("missing or wrong api_key (`Authorization: Bearer KEY`)")
            return tenant
        return self.get(id_of_key(api_key) if api_key else PUBLIC_ID)

    def find_by_key(self, api_key: str) -> Tenant | None:
        """The tenant that has this key."""
        found = _matching(self._digests, _digest(api_key))
        return None if found is None else self._by_id[found]


def _matching(digests: Mapping[bytes, str], given: bytes) -> str | None:
    """The id by a digest. All are compared: the time says nothing about which it is."""
    found = None
    for digest, tenant_id in digests.items():
        if hmac.compare_digest(digest, given):
            found = tenant_id
    return found


def _digest(api_key: str) -> bytes:
    return sha256(api_key.encode("utf-8", "surrogatepass")).digest()
