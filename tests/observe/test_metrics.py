"""ServeCore's and engines' metrics after a program has run."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from parrot.engine.metrics import EngineMetrics, observe_request
from parrot.protocol.engine_api import (
    FinishReason,
    GenerateRequest,
    GenerateResponse,
    RuntimeInfo,
    Usage,
)
from parrot.protocol.public import FunctionCosts
from parrot.simulation import SimCluster
from parrot.utils.metrics import OTHER, SeriesByName
from tests.observe.program import in_cluster, semantic, write_and_review
from tests.observe.promtool import promtool

_REQUEST = GenerateRequest(context_id=0)
PRICES = {"m": {"input": 10.0, "cached": 1.0, "output": 100.0}}
Samples = Mapping[tuple[str, frozenset[str]], float]


def samples(page: bytes) -> Samples:
    """Return the values of samples by name and label values."""
    return {
        (sample.name, frozenset(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }


async def scrape(cluster: SimCluster) -> bytes:
    scope = await write_and_review(cluster.client(), ["essay"])
    await cluster.client().delete_session(**scope)
    return b"".join(cluster.core.metrics())


@pytest.fixture(scope="module")
def page() -> bytes:
    return in_cluster(scrape, prices=PRICES)


def test_promtool_finds_nothing_in_the_metrics_of_servecore(page: bytes) -> None:
    promtool("metrics", stdin=page)


def test_promtool_finds_nothing_in_the_metrics_of_an_engine() -> None:
    promtool("metrics", stdin=engine_page())


def engine_page() -> bytes:
    metrics = EngineMetrics("e", "m")
    with observe_request(_REQUEST, [metrics.count]) as answered:
        answered(
            GenerateResponse(
                generated_text="ab",
                generated_ids=[1, 2],
                finish_reason=FinishReason.LENGTH,
                usage=Usage(computed_tokens=3, output_tokens=2, queue_s=1.0, decode_s=0.5, steps=2),
            )
        )
    for error in (ValueError, GeneratorExit):
        with pytest.raises(error), observe_request(_REQUEST, [metrics.count]):
            raise error
    return metrics.render(RuntimeInfo(num_max_blocks=4, num_free_blocks=1, num_total_jobs=2))


def test_an_engine_counts_its_requests_under_the_fields_names() -> None:
    found = samples(engine_page())
    own = frozenset({"e", "m"})
    assert found["parrot_engine_kv_cache_usage_perc", own] == 0.75
    assert found["parrot_engine_num_requests_waiting", own] == 2
    assert found["parrot_engine_time_to_first_token_seconds_sum", own] == 1.0
    assert found["parrot_engine_request_time_per_output_token_seconds_sum", own] == 0.5
    assert found["parrot_engine_generation_tokens_total", own] == 2
    for reason in ("length", "error", "abort"):
        assert found["parrot_engine_request_success_total", own | {reason}] == 1


def test_every_function_and_application_has_durations(page: bytes) -> None:
    found = samples(page)
    for name in (
        "e2e_seconds",
        "dependency_wait_seconds",
        "queue_seconds",
        "time_to_first_token_seconds",
        "time_per_output_token_seconds",
    ):
        assert found[f"parrot_app_call_{name}_count", frozenset({"essay"})] == 2, name
        for function in ("write", "review"):
            assert found[f"parrot_call_{name}_count", frozenset({function})] == 1, name
    assert found["parrot_session_e2e_seconds_count", frozenset({"essay"})] == 1
    assert found["parrot_function_seconds_count", frozenset({"join"})] == 1
    waited = found["parrot_call_dependency_wait_seconds_sum", frozenset({"review"})]
    made = found["parrot_call_e2e_seconds_sum", frozenset({"write"})]
    assert waited >= made > 0
    assert found["parrot_call_dependency_wait_seconds_sum", frozenset({"write"})] == 0


def test_the_parts_of_a_request_add_up(page: bytes) -> None:
    found = samples(page)

    def total(name: str) -> float:
        return sum(value for (key, _), value in found.items() if key == f"parrot_{name}_sum")

    queue, prefill = total("request_queue_time_seconds"), total("request_prefill_time_seconds")
    decode = total("request_decode_time_seconds")
    assert total("time_to_first_token_seconds") == pytest.approx(queue + prefill)
    assert total("request_inference_time_seconds") == pytest.approx(prefill + decode)
    assert total("e2e_request_latency_seconds") == pytest.approx(queue + prefill + decode)
    assert min(prefill, decode) > 0


def test_tokens_are_priced_by_function_and_by_tenant(page: bytes) -> None:
    found = samples(page)

    def tokens(tenant: str, direction: str) -> float:
        family = "parrot_tenant_tokens_total" if tenant == "public" else "parrot_call_tokens_total"
        return found[family, frozenset({tenant, direction})]

    for tenant, family in (
        ("write", "parrot_call_cost_total"),
        ("review", "parrot_call_cost_total"),
        ("public", "parrot_tenant_cost_total"),
    ):
        computed = tokens(tenant, "prompt") - tokens(tenant, "cached")
        cost = (10 * computed + tokens(tenant, "cached") + 100 * tokens(tenant, "generation")) / 1e6
        assert found[family, frozenset({tenant})] == pytest.approx(cost)
        assert tokens(tenant, "generation") == (10 if tenant == "public" else 5)


def test_a_session_shows_its_costs_by_function() -> None:
    async def view(cluster: SimCluster) -> list[FunctionCosts]:
        client = cluster.client()
        info = await client.session_info(**await write_and_review(client, []))
        return info.costs

    costs = {one.func_name: one for one in in_cluster(view, prices={"*": PRICES["m"]})}
    assert list(costs) == ["write", "review"]
    for one in costs.values():
        assert (one.calls, one.output_tokens, one.cached_tokens) == (1, 5, 0)
        assert one.cost == pytest.approx((10 * one.prompt_tokens + 100 * 5) / 1e6)


def test_excess_function_names_share_a_series() -> None:
    async def many(cluster: SimCluster) -> bytes:
        client = cluster.client()
        scope = (await client.create_session(apps=["first", "second"])).model_dump()
        for n in range(9):
            call = await client.semantic_call(semantic(scope, f"made_up_{n}", f"Say {n}."))
            await client.get_var(**scope, var_id=call.param_info[-1].var_id)
        return b"".join(cluster.core.metrics())

    found = samples(in_cluster(many, max_metric_names=3))
    counts = {
        key: value for key, value in found.items() if key[0] == "parrot_call_e2e_seconds_count"
    }
    assert len(counts) == 4
    assert counts["parrot_call_e2e_seconds_count", frozenset({OTHER})] == 6
    assert found["parrot_app_call_e2e_seconds_count", frozenset({"first"})] == 9


class Count:
    def __init__(self) -> None:
        self.value = 0

    def add(self, other: "Count") -> None:
        self.value += other.value


@given(st.lists(st.sampled_from(["a", "b", "c", "d", "e", OTHER])), st.integers(1, 4))
def test_no_sample_is_lost_when_names_are_replaced(names: list[str], limit: int) -> None:
    series = SeriesByName(limit, Count)
    before = 0
    for number, name in enumerate(names, start=1):
        series.use(name).value += 1
        values = dict(series.items())
        assert sum(count.value for count in values.values()) == number
        assert len(values.keys() - {OTHER}) <= limit
        other = values[OTHER].value if OTHER in values else 0
        assert other >= before
        before = other


def test_a_frequent_name_replaces_a_rare_one() -> None:
    series = SeriesByName(2, Count)
    for name in ["rare", "common", "common"]:
        series.use(name)
    for _ in range(3):
        series.use("late")
    assert [name for name, _ in series.items()] == ["common", "late", OTHER]
    for n in range(5000):
        series.use(f"once {n}")
    assert {name for name, _ in series.items()} == {"common", "late", OTHER}
    assert len(series._candidates) <= 1024
