"""The costs of completions, by the operator's prices, and who pays for them."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import Metric

from parrot.serve.config import TokenPrices
from parrot.serve.graph.nodes import RunStats
from parrot.serve.telemetry.by_name import OTHER, SeriesByName
from parrot.serve.telemetry.calls import Measured
from parrot.serve.tenants.table import TenantTable
from parrot.utils.metrics import counter

ANY_MODEL = "*"
_PER_PRICE = 1e6  # prices are those of a million tokens


class PriceTable:
    """Prices by model; those of `*` are for every model that is not named."""

    def __init__(self, prices: Mapping[str, TokenPrices]) -> None:
        self._prices = prices

    def cost(self, stats: RunStats) -> float:
        """In the prices' currency. Zero for a result that an identical call made, and for a model
        without a price."""
        prices = self._prices.get(stats.model or "") or self._prices.get(ANY_MODEL)
        if prices is None or stats.is_reused:
            return 0.0
        return (
            prices.input * stats.computed_tokens
            + prices.cached * stats.cached_tokens
            + prices.output * stats.output_tokens
        ) / _PER_PRICE


@dataclass(slots=True)
class Usage:
    """The completions that ran, and their tokens; those of prompts that were there are in `cached`
    and in `prompt`. `cost`: in the prices' currency. `service_s`: of engines' time."""

    calls: int = 0
    prompt: int = 0
    cached: int = 0
    generation: int = 0
    cost: float = 0.0
    service_s: float = 0.0

    def count(self, call: Measured) -> None:
        self.calls += 1
        self.prompt += call.num_prompt
        self.cached += call.num_cached
        self.generation += call.num_output
        self.cost += call.cost
        self.service_s += call.service_s

    def add(self, other: "Usage") -> None:
        self.calls += other.calls
        self.prompt += other.prompt
        self.cached += other.cached
        self.generation += other.generation
        self.cost += other.cost
        self.service_s += other.service_s


class Accounts:
    """The use of each tenant, by function. Tenants without a key of the config are one, `other`,
    and so are, for each tenant, the functions that are used least."""

    def __init__(self, tenants: TenantTable, max_names: int) -> None:
        self._tenants = tenants
        self._max_names = max_names
        self._usage: dict[str, SeriesByName[Usage]] = {}

    def count(self, tenant: str, function: str, call: Measured) -> None:
        label = tenant if self._tenants.is_named(tenant) else OTHER
        if (functions := self._usage.get(label)) is None:
            functions = self._usage[label] = SeriesByName(self._max_names, Usage)
        functions.use(function).count(call)

    def __iter__(self) -> Iterator[tuple[str, str, Usage]]:
        """Yield tenants and their functions."""
        for tenant, functions in self._usage.items():
            for function, usage in functions.items():
                yield tenant, function, usage

    def families(self) -> Iterator[Metric]:
        tenants: defaultdict[str, Usage] = defaultdict(Usage)
        for tenant, _, usage in self:
            tenants[tenant].add(usage)
        directions = ("prompt", "cached", "generation")
        tokens = {(t, name): getattr(u, name) for t, u in tenants.items() for name in directions}
        text = "Tokens of completions; `cached` are of the prompts'."
        yield counter("parrot_tenant_tokens", text, tokens, "tenant", "direction")
        costs = {(tenant,): usage.cost for tenant, usage in tenants.items()}
        yield counter("parrot_tenant_cost", "Price of the tokens, by `prices`.", costs, "tenant")
        service = {(tenant,): usage.service_s for tenant, usage in tenants.items()}
        text = "Engines' time that completions had, by what their tokens cost: what is shared."
        yield counter("parrot_tenant_service_seconds", text, service, "tenant")
