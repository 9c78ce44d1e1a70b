"""Visitors of the page: their keys, their cookies, and the sessions that they may see.

A cookie contains the tenant of its key, the time of its end, and a signature. The signature depends
on the cluster token and on the key. So a cookie survives a restart of ServeCore, but no change of
the token or the key.
"""

import hmac
import secrets
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from hashlib import blake2b
from typing import NamedTuple

from parrot.protocol.errors import AuthenticationFailed, PermissionDenied
from parrot.serve.tenants.table import Scope, Tenant, TenantTable
from parrot.utils.clock import Clock
from parrot.utils.ids import tokens_equal

VISIT_S = 12 * 3600.0  # Seconds that a sign-in is valid.
# Sign-outs of one visitor that are remembered. With more, the oldest one also ends all sign-ins of
# the visitor that are older.
_MAX_LEFT = 64


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


class _Left:
    """The sign-ins of one visitor that have been signed out."""

    def __init__(self) -> None:
        self._ends: dict[str, int] = {}  # by cookie, the first to leave first
        self._newest_dropped = 0

    def add(self, cookie: str, end: int) -> None:
        self._ends[cookie] = end
        if len(self._ends) > _MAX_LEFT:
            oldest = next(iter(self._ends))
            self._newest_dropped = max(self._newest_dropped, self._ends.pop(oldest))

    def has(self, cookie: str, end: int) -> bool:
        return cookie in self._ends or end <= self._newest_dropped


class Visitors:
    """Signed-in visitors, by their cookies."""

    def __init__(self, cluster_token: str | None, tenants: TenantTable, clock: Clock) -> None:
        self._tenants = tenants
        self._clock = clock
        self._epoch = time.time() - clock.now()
        self._page_key = None if cluster_token is None else page_key(cluster_token)
        secret = (cluster_token or secrets.token_hex()).encode("utf-8", "surrogatepass")
        self._secret = hmac.digest(secret, b"page sign-ins", "sha256")
        self._left: dict[str, _Left] = {}  # by the visitor's name

    @property
    def operator(self) -> Visitor:
        """The operator. If API keys are required, the operator does not see values."""
        return Visitor(tenant=None, sees_values=not self._tenants.is_closed)

    def enter(self, key: str) -> str:
        """A new cookie for this key: the page's key or an API key. Raises `AuthenticationFailed`,
        `PermissionDenied`."""
        if self._page_key is not None and tokens_equal(key, self._page_key):
            key_id = ""
        elif self._tenants.is_closed:
            tenant = self._tenants.of_key(key)
            self._visitor(tenant)
            key_id = tenant.id
        else:
            raise AuthenticationFailed("this is not the key of the page")
        encoded = urlsafe_b64encode(key_id.encode()).decode()
        head = f"{int(self._now() + VISIT_S)}.{secrets.token_urlsafe(16)}.{encoded}"
        return f"{head}.{self._signature(head, key_id)}"

    def _now(self) -> float:
        """Unix time."""
        return self._epoch + self._clock.now()

    def _signature(self, head: str, key_id: str) -> str:
        key = (self._tenants.digest_of(key_id) or b"no key") if key_id else b"page"
        signed = key + head.encode("utf-8", "surrogatepass")
        return hmac.digest(self._secret, signed, "sha256").hex()

    def _visitor(self, tenant: Tenant) -> Visitor:
        key = self._tenants.digest_of(tenant.id)
        if Scope.ADMIN in tenant.scopes:
            return self.operator._replace(key_id=tenant.id, key=key)
        tenant.require(Scope.USER)
        return Visitor(tenant.id, sees_values=True, key=key)

    def leave(self, cookie: str) -> None:
        """The cookie is no longer valid, until a restart."""
        if (found := self._read(cookie)) is not None:
            visitor, end = found
            self._left.setdefault(visitor.name, _Left()).add(cookie, end)

    def of(self, cookie: str | None) -> Visitor:
        """The visitor of a cookie. Raises `AuthenticationFailed` if the sign-in has expired or its
        key is no longer valid."""
        if self._page_key is None and not self._tenants.is_closed:
            return self.operator  # Without a cluster token and API keys the page is open.
        found = None if cookie is None else self._read(cookie)
        if found is None:
            raise AuthenticationFailed("sign in with the key of the page or an API key")
        return found[0]

    def _read(self, cookie: str) -> tuple[Visitor, int] | None:
        """The visitor of a cookie and the end of the sign-in; None if the cookie is not valid."""
        head, _, signature = cookie.rpartition(".")
        try:
            written_end, _, encoded = head.split(".")
            key_id, end = urlsafe_b64decode(encoded).decode(), int(written_end)
        except ValueError:
            return None
        if end < self._now() or not tokens_equal(signature, self._signature(head, key_id)):
            return None
        tenant = self._tenants.find(key_id) if key_id else None
        if key_id and tenant is None:
            return None
        try:
            visitor = self.operator if tenant is None else self._visitor(tenant)
        except PermissionDenied:
            return None  # The key has lost its scopes.
        left = self._left.get(visitor.name)
        return None if left is not None and left.has(cookie, end) else (visitor, end)

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
