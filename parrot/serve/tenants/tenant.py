"""A tenant: whose work a request is."""

import hashlib
from dataclasses import dataclass

PUBLIC_ID = "public"
"""The tenant of requests without a key, where none is needed."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """`weight`: its share of the service, beside other tenants'. `share_group`: the name of those
    whose caches it shares; None: it shares them with nobody."""

    id: str
    weight: float = 1.0
    share_group: str | None = None


def id_of_key(api_key: str) -> str:
    """The id of the tenant of a key that has no other name."""
    return hashlib.sha256(api_key.encode("utf-8", "surrogatepass")).hexdigest()[:16]
