"""Result files record the origin of their figures, and the commands that they name exist."""

import json
import sys
from types import ModuleType

import pytest

from benchmark import results
from benchmark.apps.measure import parse_case
from benchmark.apps.settings import parse_setting
from benchmark.results import HISTORY, UNKNOWN, Report, check_command, load, names, run

HISTORY_OF = json.loads(HISTORY.read_text())


@pytest.mark.parametrize("name", names())
def test_a_result_file_records_its_origin(name):
    provenance = load(name)["provenance"]
    if "source" in provenance:
        return
    assert {"command", "commit", "configs", "when", "device"} <= provenance.keys()
    if name in HISTORY_OF:
        assert UNKNOWN in provenance.values()
        assert provenance["changed_in"]
    else:
        assert provenance["commit"] != UNKNOWN
        assert provenance["configs"]
        assert "dirty" in provenance


def test_the_history_has_only_files_without_an_origin():
    old = [name for name in names() if "provenance" not in json.loads(results_text(name))]
    assert sorted(HISTORY_OF) == old


def results_text(name: str) -> str:
    return (results.RESULTS / name).read_text()


@pytest.mark.parametrize("name", names())
def test_the_command_of_a_result_file_exists(name):
    provenance = load(name)["provenance"]
    if "source" not in provenance:
        args = check_command(provenance.get("again", provenance["command"]))
        for setting in getattr(args, "compare", None) or []:
            parse_setting(setting)
        for workload in getattr(args, "workloads", []):
            parse_case(workload, args.scale)


def test_a_command_that_does_not_exist_is_noticed():
    for wrong in ("python -m benchmark.serve.bench_kv --speed 3", "python -m benchmark.apps run"):
        with pytest.raises(ValueError, match="is not a command of"):
            check_command(wrong)


def benchmark_module(measure) -> ModuleType:
    module = ModuleType("bench_made_up")
    module.__doc__ = "Nothing."
    module.__file__ = str(results.ROOT / "benchmark" / "bench_made_up.py")
    module.arguments = lambda parser: parser.add_argument("--size", type=int)
    module.measure = measure
    sys.modules[module.__name__] = module
    return module


def test_a_benchmark_that_fails_keeps_its_results(tmp_path):
    def measure(args, report):
        report.uses("size", args.size)
        report.add("rows", {"step": 1})
        raise RuntimeError("the device is gone")

    name, path = benchmark_module(measure).__name__, tmp_path / "new" / "result.json"
    arguments = ["--size", "3", "--output", str(path), "--commit", "abc"]
    with pytest.raises(RuntimeError, match="gone"):
        run(name, arguments)
    content = json.loads(path.read_text())
    assert content["rows"] == [{"step": 1}]
    assert content["provenance"]["commit"] == "abc"
    assert content["provenance"]["command"].startswith("python -m benchmark.bench_made_up --size 3")


def test_another_config_has_another_hash(tmp_path):
    path = tmp_path / "engine.json"
    hashes = []
    for content in ("{}", '{"seed": 1}'):
        path.write_text(content)
        report = Report(None, "command")
        report.uses("file", path)
        report.uses("value", json.loads(content))
        hashes.append(report["provenance"]["configs"])
    assert hashes[0]["file"] != hashes[1]["file"]
    assert hashes[0]["value"] != hashes[1]["value"]


def test_a_changed_tree_is_marked(monkeypatch):
    answers = {"rev-parse": "abc", "status": ""}
    monkeypatch.setattr(
        results, "_output", lambda *command: "".join(answers.get(word, "") for word in command)
    )
    assert Report(None, "command")["provenance"]["dirty"] is False
    answers["status"] = " M parrot/serve/core.py"
    assert Report(None, "command")["provenance"]["dirty"] is True
