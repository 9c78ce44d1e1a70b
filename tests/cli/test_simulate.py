"""`parrot simulate` on a trace of a small simulated cluster."""

import asyncio
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from parrot.cli.app import app
from parrot.engine.config import SimConfig
from parrot.observe.recorder import TraceFile
from parrot.protocol.public import SemanticCallRequest
from parrot.simulation import SimCluster, run_virtual

COSTS = Path(__file__).parents[2] / "sample_configs" / "engine" / "sim_llama_3_1_8b.json"


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Record 12 chains of 3 calls on one engine."""
    path = tmp_path_factory.mktemp("traces") / "trace.jsonl"

    async def chain(cluster: SimCluster, n: int) -> None:
        client = cluster.client()
        scope = (await client.create_session()).model_dump()
        var_id = await client.create_var(**scope, var_name="text", content=f"{n} " * 100)
        for _ in range(3):
            sampling = {"max_gen_length": 20 + n}
            call = {
                "template": "Go on: {{text}} {{out}}",
                "parameters": [
                    {"name": "text", "var_id": var_id},
                    {"name": "out", "is_output": True, "sampling_config": sampling},
                ],
            }
            response = await client.semantic_call(SemanticCallRequest.model_validate(scope | call))
            var_id = response.param_info[-1].var_id
        await client.get_var(**scope, var_id=var_id)

    async def main() -> None:
        sink = TraceFile(str(path))
        engine = SimConfig(scheduler={"max_batch_size": 2})
        async with SimCluster(1, engine=engine, trace=sink) as cluster:
            await asyncio.gather(*(chain(cluster, n) for n in range(12)))
        sink.close()

    run_virtual(main())
    return path


def test_the_recorded_and_the_simulated_figures_are_shown(trace: Path, tmp_path: Path):
    output = tmp_path / "out.json"
    options = ["--against", "engines=4", "--against", "policy=fcfs,kv_tokens=2000"]
    costs = ["--engine_config", str(COSTS), "--output", str(output)]
    result = CliRunner(env={"COLUMNS": "200"}).invoke(
        app, ["simulate", str(trace), *options, *costs]
    )
    assert result.exit_code == 0, result.output
    for word in ("recorded", "simulated", "engines=4", "JCT p99", "tokens evicted", "ratio"):
        assert word in result.output
    assert "sessions are faster" in result.output
    figures = json.loads(output.read_text())
    assert figures["recorded"]["num_answered"] == 12
    tokens = {figures[name]["output_tokens"] for name in figures}
    assert tokens == {3 * sum(20 + n for n in range(12))}
    assert figures["engines=4"]["jct_mean_s"] < figures["simulated"]["jct_mean_s"]
    assert len(figures["engines=4"]["jct_s"]) == 12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--against", "engines"], "is not KEY=VALUE"),
        (["--against", "engines=0"], "whole number"),
        (["--against", "colour=blue"], "unknown key `colour`"),
        (["--policy", "magic"], "`policy`"),
        (["--engine_config", "nowhere.json"], "cannot be read"),
        (["--engine_config", str(COSTS.with_name("embedded.json"))], "must be sim"),
    ],
)
def test_wrong_settings_are_named(trace: Path, options: list[str], message: str):
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["simulate", str(trace), *options])
    assert result.exit_code == 1
    assert message in result.output


def test_invalid_traces_are_errors():
    result = CliRunner().invoke(app, ["simulate", __file__])
    assert result.exit_code == 1
    assert "error" in result.output
