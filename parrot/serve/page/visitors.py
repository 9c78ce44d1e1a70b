"""Who looks at the page, and what they may see."""

import secrets
from hashlib import blake2b
from typing import NamedTuple

from parrot.protocol.errors import AuthenticationFailed
from parrot.serve.tenants.table import TenantTable
from parrot.utils.clock import Clock
from parrot.utils.heaps import LruDict
from parrot.utils.ids import tokens_equal

VISIT_S = 12 * 3600.0
_MAX_VISITORS = 1024


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
    too."""

    tenant: str | None
    sees_values: bool

    @property
    def name(self) -> str:
        return "operator" if self.tenant is None else f"tenant {self.tenant}"


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
        `AuthenticationFailed`."""
        if self._page_key is not None and tokens_equal(key, self._page_key):
            visitor = self.operator
        elif self._tenants.is_closed:
            visitor = Visitor(self._tenants.of_key(key).id, sees_values=True)
        else:
            raise AuthenticationFailed("this is not the key of the page")
        cookie = secrets.token_urlsafe(32)
        self._known.put(cookie, (visitor, self._clock.now() + VISIT_S))
        return cookie

    def leave(self, cookie: str) -> None:
        self._known.pop(cookie)

    def of(self, cookie: str | None) -> Visitor:
        """Raises `AuthenticationFailed`."""
        if self._page_key is None and not self._tenants.is_closed:
            return self.operator  # the operator wants no secrets: `insecure`
        found = None if cookie is None else self._known.peek(cookie)
        if found is None or found[1] < self._clock.now():
            raise AuthenticationFailed("show the key of the page, or an API key, first")
        return found[0]
