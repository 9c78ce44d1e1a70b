"""The sample board and alerts use only series that servers export."""

import asyncio
import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from prometheus_client.parser import text_string_to_metric_families

from parrot.engine.metrics import EngineMetrics
from parrot.protocol.engine_api import RuntimeInfo
from parrot.simulation import SimCluster
from tests.observe.program import in_cluster, write_and_review
from tests.observe.promtool import promtool

FOLDER = Path(__file__).parents[2] / "sample_configs" / "monitoring"
ALERTS = FOLDER / "alerts.yml"
BEAT_S = 3.0
NOT_LABELS = {"le", "job"}


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_board", FOLDER / "make_board.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    """Return the labels of every exported series of a ServeCore and an engine, by name."""

    async def scrape(cluster: SimCluster) -> str:
        scope = await write_and_review(cluster.client(), ["essay"])
        await cluster.client().delete_session(**scope)
        await asyncio.sleep(BEAT_S)  # engines report their load
        return b"".join(cluster.core.metrics()).decode()

    engine = EngineMetrics("e", "m").render(RuntimeInfo()).decode()
    found: dict[str, set[str]] = {}
    for page in (in_cluster(scrape, engine_heartbeat_timeout=BEAT_S), engine):
        for family in text_string_to_metric_families(page):
            suffix = "_total" if family.type == "counter" else ""
            found.setdefault(family.name + suffix, set())
            for sample in family.samples:
                found.setdefault(sample.name, set()).update(sample.labels)
    return found


def expressions(maker: ModuleType) -> Iterator[str]:
    for panel in maker.board()["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))
    yield maker.board()["templating"]["list"][1]["query"]
    text = re.sub(r">-\n\s+", "", ALERTS.read_text())
    yield from re.findall(r"expr: (.*(?:\n {10}.*)*)", text)


def test_the_board_is_up_to_date(maker: ModuleType) -> None:
    made = json.loads(json.dumps(maker.board()))
    assert json.loads(maker.BOARD.read_text()) == made, "run make_board.py"
    places = [tuple(panel["gridPos"].items()) for panel in made["panels"]]
    assert len(set(places)) == len(places)


def test_every_expression_uses_only_exported_series(
    maker: ModuleType, exported: dict[str, set[str]]
) -> None:
    asked: set[str] = set()
    for expression in expressions(maker):
        names = set(re.findall(r"\bparrot_\w+", expression))
        assert names or "up{" in expression, expression
        assert names <= exported.keys(), expression
        asked |= names
        if not all(exported[name] for name in names):
            continue  # without labels, or without a sample that shows them
        labels = set().union(*(exported[name] for name in names)) | NOT_LABELS
        grouped = re.findall(r"by \(([^)]*)\)", expression)
        wanted = {label.strip() for group in grouped for label in group.split(",")}
        wanted |= set(re.findall(r"[{,](\w+)=", expression))
        assert wanted <= labels, expression
    assert len(asked) > 20


def test_promtool_finds_nothing_in_the_alerts_and_the_configuration(tmp_path: Path) -> None:
    promtool("rules", str(ALERTS))
    for name in ("prometheus.yml", "alerts.yml"):
        (tmp_path / name).write_text((FOLDER / name).read_text())
    (tmp_path / "cluster_token").write_text("a token")
    promtool("config", str(tmp_path / "prometheus.yml"))


def test_promtool_can_parse_every_expression_of_the_board(
    maker: ModuleType, tmp_path: Path
) -> None:
    rules = [
        {"record": f"board:{n}", "expr": expression.replace("$__rate_interval", "1m")}
        for n, expression in enumerate(expressions(maker))
        if not expression.startswith("label_values")
    ]
    path = tmp_path / "board.yml"  # JSON is YAML
    path.write_text(json.dumps({"groups": [{"name": "board", "rules": rules}]}))
    promtool("rules", "--lint=none", str(path))
