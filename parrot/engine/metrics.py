"""An engine's state as metrics."""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from parrot.protocol.engine_api import HostTierInfo, RuntimeInfo

_MIB = 2**20
_NS = 1e-9


def engine_families(info: RuntimeInfo) -> Iterable[Metric]:
    gauges = {
        "kv_blocks": ("Blocks of the KV pool.", info.num_max_blocks),
        "kv_blocks_free": ("Blocks of the KV pool that hold nothing.", info.num_free_blocks),
        "kv_block_size_tokens": ("Tokens in one block.", info.block_size),
        "cached_tokens": ("Tokens of the blocks in use.", info.num_cached_tokens),
        "jobs_running": ("Jobs that have room for their KV.", info.num_running_jobs),
        "requests": ("Requests that have not ended.", info.num_total_jobs),
        "cache_bytes": ("Memory of the KV pool.", info.cache_mem * _MIB),
        "model_bytes": ("Memory of the weights.", info.model_mem * _MIB),
        "step_seconds": ("Recent average of a step.", info.recent_average_latency * _NS),
    }
    for name, (text, value) in gauges.items():
        yield GaugeMetricFamily(f"parrot_engine_{name}", text, value=value)
    steps = info.num_steps or 0
    yield CounterMetricFamily("parrot_engine_steps", "Steps run.", value=steps)
    tokens = CounterMetricFamily(
        "parrot_engine_prompt_tokens",
        "Tokens of prompts, by where their KV was found.",
        labels=["found"],
    )
    for found, count in info.prompt_tokens.model_dump().items():
        tokens.add_metric([found], count)
    yield tokens
    if info.host_tier is not None:
        yield from _host_families(info.host_tier)


def _host_families(host: HostTierInfo) -> Iterable[Metric]:
    gauges = {
        "host_kv_blocks": ("Blocks of KV that the host holds at most.", host.num_max_blocks),
        "host_kv_blocks_free": ("Of these, those that hold nothing.", host.num_free_blocks),
    }
    for name, (text, value) in gauges.items():
        yield GaugeMetricFamily(f"parrot_engine_{name}", text, value=value)
    text = "Bytes of KV copied between the device and the host."
    copied = CounterMetricFamily("parrot_engine_kv_copied_bytes", text, labels=["to"])
    copied.add_metric(["host"], host.stored_bytes)
    copied.add_metric(["device"], host.returned_bytes)
    yield copied
    text = "Copies of KV that failed."
    yield CounterMetricFamily("parrot_engine_kv_copies_failed", text, value=host.failed_transfers)
