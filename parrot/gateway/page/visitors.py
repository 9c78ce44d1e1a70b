"""Visitors of the page: their keys, their cookies, and the sessions that they may see."""

import secrets
from hashlib import blake2b
from typing import NamedTuple

from parrot.protocol.errors import AuthenticationFailed
from parrot.serve.tenants.table import Scope, Tenant, TenantTable
from parrot.utils.clock import Clock
from parrot.utils.heaps import LruDict
from parrot.utils.ids import tokens_equal

VISIT_S = 12 * 3600.0  # Seconds that a sign-in is valid.
_MAX_VISITORS = 1024  # Sign-ins that are kept. The oldest is dropped first.
_MAX_COOKIES = 64  # Sign-ins of one visitor, so that one visitor cannot displace all others.


def page_key(cluster_token: str) -> str:
    """The operator's key for the page, derived from the cluster token. It is valid only here, and
    the token cannot be computed from it."""
    return blake2b(
        b"page", digest_size=16, key=blake2b(cluster_token.encode()).digest()
    ).hexdigest()


def page_url(core_url: str, cluster_token: str | None) -> str:
    """The address that signs an operator in. Without a cluster token the page needs no key."""
    key = "" if cluster_token is None else f"#key={page_key(cluster_token)}"
    return f"{core_url.rstrip('/')}/ui/{key}"


class Visitor(NamedTuple):
    """The rights of a signed-in visitor."""

    tenant: str | None  # the tenant whose sessions are visible; None: all tenants
    sees_values: bool  # prompts and values are visible
    key_id: str | None = None  # the tenant id of an operator's API key; None: the page's key
    key: bytes | None = None  # the digest of the API key; None: the page's key

    @property
    def name(self) -> str:
        if self.tenant is not None:
            return f"tenant {self.tenant}"
        return "operator" if self.key_id is None else f"operator {self.key_id}"


class Visitors:
    """Signed-in visitors, by the secret in their cookie."""

    def __init__(self, cluster_token: str | None, tenants: TenantTable, clock: Clock) -> None:
        self._tenants = tenants
        self._clock = clock
        self._page_key = None if cluster_token is None else page_key(cluster_token)
        self._known: LruDict[str, tuple[Visitor, float]] = LruDict(_MAX_VISITORS)  # with the expiry

    @property
    def operator(self) -> Visitor:
        """The operator. If API keys are required, the operator does not see values."""
        return Visitor(tenant=None, sees_values=not self._tenants.is_closed)

    def enter(self, key: str) -> str:
        """A new cookie's secret for this key: the page's key or an API key. Raises
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
        """The visitor of a cookie. Raises `AuthenticationFailed` if the sign-in has expired or its
        key is no longer valid."""
        if self._page_key is None and not self._tenants.is_closed:
            return self.operator  # Without a cluster token and API keys the page is open.
        found = None if cookie is None else self._known.peek(cookie)
        if found is None or found[1] < self._clock.now():
            raise AuthenticationFailed("sign in with the key of the page or an API key")
        self.require(found[0])
        return found[0]

    def require(self, visitor: Visitor) -> None:
        """Raise `AuthenticationFailed` if the visitor's key was removed or lost its scope."""

        if visitor.key is None:
            return
        tenant_id = visitor.tenant or visitor.key_id or ""
        tenant = self._tenants.find(tenant_id)
        scope = Scope.USER if visitor.tenant else Scope.ADMIN
        is_same = self._tenants.digest_of(tenant_id) == visitor.key
        if tenant is None or not is_same or scope not in tenant.scopes:
            raise AuthenticationFailed("the key of this sign-in is no longer valid; sign in again")
