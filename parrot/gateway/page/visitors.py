"""Who looks at the page, and what they may see."""

import secrets
from hashlib import blake2b
from typing import NamedTuple

from parrot.protocol.errors import AuthenticationFailed
from parrot.serve.tenants.table import Scope, Tenant, TenantTable
from parrot.utils.clock import Clock
from parrot.utils.heaps import LruDict
from parrot.utils.ids import tokens_equal

VISIT_S = 12 * 3600.0
_MAX_VISITORS = 1024
_MAX_COOKIES = 64  # of one visitor, who shuts nobody else out with more


def page_key(cluster_token: str) -> str:
    """The operator's key for the page: whoever has the cluster token can make it, and it is no use
    for anything else."""
    return blake2b(
        b"page", digest_size=16, key=blake2b(cluster_token.encode()).digest()
    ).hexdigest()


def page_url(core_url: str, cluster_token: str | None) -> str:
    """The address that lets an operator in; without a token nobody is asked for a key."""
    key = "" if cluster_token is None else f"#key={page_key(cluster_token)}"
    return f"{core_url.rstrip('/')}/ui/{key}"


class Visitor(NamedTuple):
    """`tenant`: whose sessions they see; None: everybody's. `sees_values`: prompts and values,
    too. `key_id`: the id of the tenant whose key they showed, if it was an operator's, and `key`
    its digest; None: it was the page's key."""

    tenant: str | None
    sees_values: bool
    key_id: str | None = None
    key: bytes | None = None

    @property
    def name(self) -> str:
        if self.tenant is not None:
            return f"tenant {self.tenant}"
        return "operator" if self.key_id is None else f"operator {self.key_id}"


class Visitors:
    """Visitors who have shown a key, by the secret of the cookie that they got for it."""

    def __init__(self, cluster_token: str | None, tenants: TenantTable, clock: Clock) -> None:
        self._tenants = tenants
        self._clock = clock
        self._page_key = None if cluster_token is None else page_key(cluster_token)
        self._known: LruDict[str, tuple[Visitor, float]] = LruDict(_MAX_VISITORS)  # until when

    @property
    def operator(self) -> Visitor:
        """Who runs the service; with API keys the programs are other people's."""
        return Visitor(tenant=None, sees_values=not self._tenants.is_closed)

    def enter(self, key: str) -> str:
        """The secret for a cookie of whoever has this key: the page's, or an API key. Raises
        `AuthenticationFailed`, `PermissionDenied`."""
        if self._page_key is not None and tokens_equal(key, self._page_key):
            visitor = self.operator
        elif self._tenants.is_closed:
            visitor = self._visitor(self._tenants.of_key(key))
        else:
            raise AuthenticationFailed("this is not the key of the page")
        cookie = secrets.token_urlsafe(32)
        known = zip(self._known, self._known.values(), strict=True)
        own = [other for other, (who, _) in known if who.name == visitor.name]
        if len(own) >= _MAX_COOKIES:
            self._known.pop(own[0])
        self._known.put(cookie, (visitor, self._clock.now() + VISIT_S))
        return cookie

    def _visitor(self, tenant: Tenant) -> Visitor:
        key = self._tenants.digest_of(tenant.id)
        if Scope.ADMIN in tenant.scopes:
            return self.operator._replace(key_id=tenant.id, key=key)
        tenant.require(Scope.USER)
        return Visitor(tenant.id, sees_values=True, key=key)

    def leave(self, cookie: str) -> None:
        self._known.pop(cookie)

    def of(self, cookie: str | None) -> Visitor:
        """The visitor, as long as the key that they showed is one. Raises
        `AuthenticationFailed`."""
        if self._page_key is None and not self._tenants.is_closed:
            return self.operator  # the operator wants no secrets: `insecure`
        found = None if cookie is None else self._known.peek(cookie)
        if found is None or found[1] < self._clock.now():
            raise AuthenticationFailed("show the key of the page, or an API key, first")
        self.require(found[0])
        return found[0]

    def require(self, visitor: Visitor) -> None:
        """Raise `AuthenticationFailed` if their key is none any more, or not for as much."""
        if visitor.key is None:
            return
        tenant_id = visitor.tenant or visitor.key_id or ""
        tenant = self._tenants.find(tenant_id)
        scope = Scope.USER if visitor.tenant else Scope.ADMIN
        is_same = self._tenants.digest_of(tenant_id) == visitor.key
        if tenant is None or not is_same or scope not in tenant.scopes:
            raise AuthenticationFailed("the key of this sign-in is no longer valid; sign in again")
