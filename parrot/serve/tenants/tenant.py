"""A tenant: whose work a request is, what it may do, and what it may have."""

import hashlib
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from parrot.protocol.errors import PermissionDenied
from parrot.utils.config import ConfigModel

PUBLIC_ID = "public"
"""The tenant of requests without a key, where none is needed."""

MIN_WEIGHT, MAX_WEIGHT = 0.001, 1000.0

Limit = Annotated[int, Field(ge=1, le=2**40)]


class Scope(StrEnum):
    """The uses of a key."""

    USER = "user"  # its own sessions and requests
    ADMIN = "admin"  # the operator's routes
    METRICS = "metrics"  # those of the whole service


class TenantLimits(ConfigModel):
    """The limits of one tenant; null: as much as the server's config allows each. The request that
    would exceed one gets 429, and nothing is lost."""

    sessions: Limit | None = Field(None, description="Live sessions.")
    calls_in_flight: Limit | None = Field(
        None,
        description="Calls that are queued or running. With so many, nothing is accepted that sets "
        "work going; what a read sets going is not cut, however many calls that are.",
    )
    variables: Limit | None = Field(
        None, description="Variables of its live sessions; null: `tenant_quota.variables`."
    )
    text_bytes: Limit | None = Field(
        None, description="Bytes of text that these keep; null: `tenant_quota.text_bytes`."
    )
    tokens_per_minute: Limit | None = Field(
        None,
        description="Prompt and output tokens of its calls, cached ones included. As many may come "
        "at once; a call is charged what it is expected to have when it is queued, and what it had "
        "when it ends. Results that an identical call made cost nothing.",
    )
    requests_per_minute: Limit | None = Field(
        None, description="Requests that may set work going. As many may come at once."
    )

    @property
    def amounts(self) -> dict[str, int]:
        """The limits of what live sessions keep, of those that there are."""
        given = {
            "sessions": self.sessions,
            "variables": self.variables,
            "text_bytes": self.text_bytes,
        }
        return {name: limit for name, limit in given.items() if limit is not None}


@dataclass(frozen=True, slots=True)
class Tenant:
    """`weight`: its share of the service, beside other tenants'. `share_group`: the name of those
    whose caches it shares; None: it shares them with nobody."""

    id: str
    weight: float = 1.0
    share_group: str | None = None
    scopes: frozenset[Scope] = frozenset({Scope.USER})
    limits: TenantLimits = field(default_factory=TenantLimits)

    def require(self, scope: Scope) -> None:
        """Raises `PermissionDenied`."""
        if scope not in self.scopes:
            raise PermissionDenied(f"the key of {self.id} has not the scope `{scope}`")


def id_of_key(api_key: str) -> str:
    """The id of the tenant of a key that has no other name."""
    return hashlib.sha256(api_key.encode("utf-8", "surrogatepass")).hexdigest()[:16]
