"""The costs of completions, by the operator's prices."""

from collections.abc import Mapping

from parrot.serve.config import TokenPrices
from parrot.serve.graph.nodes import RunStats

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
