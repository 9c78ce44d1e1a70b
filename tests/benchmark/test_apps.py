"""`python -m benchmark.apps`, from launched processes to the result file."""

import json

import pytest
from tokenizers import Tokenizer

from benchmark.apps.__main__ import main
from benchmark.apps.metrics import ratios
from benchmark.apps.settings import features, parse_setting
from benchmark.apps.text import one_token_words
from benchmark.simulated import changed
from parrot.cli.bench.mixes import UNKNOWN_LIMIT
from parrot.cli.bench.text import TextSource
from parrot.engine.config import SimConfig
from parrot.engine.models.tokenizers import word_tokenizer
from parrot.serve.config import GlobalSchedulerConfig
from tests.support.byte_tokenizer import byte_tokenizer


def test_settings_in_turns_on_launched_servers(tmp_path, capsys):
    engine = tmp_path / "engine.json"
    engine.write_text('{"engine_type": "sim", "instance": {"step_s": 0.001}}')
    output = tmp_path / "result.json"
    where = ["run", "--launch", str(engine), "--engines", "2", "--output", str(output)]
    what = ["--workloads", "map_reduce:document_tokens=4000", "--scale", "0.01"]
    how = ["--compare", "parrot:on", "requests:all-off", "--client-rtt", "lan", "--learn", "2"]
    main([*where, *what, *how])
    result = json.loads(output.read_text())
    assert [run["setting"] for run in result["runs"]] == ["parrot:on", "requests:all-off"]
    for run in result["runs"]:
        assert run["figures"]["num_errors"] == 0
        tokens = run["figures"]["tokens"]
        assert tokens["calls_done"] == tokens["calls"] == 5
        assert tokens["prompt"] == tokens["prompt_planned"]
    (ratio,) = result["ratios"]
    assert ratio["jct_map_reduce_mean"][0] > 0
    assert result["provenance"]["command"].startswith("python -m benchmark.apps run --launch")
    assert "jct_map_reduce_mean" in capsys.readouterr().out


def test_settings_name_features_that_exist():
    known = features()
    assert {"policy", "app_fifo", "graph_group", "ctx_group", "ctx_aware"} <= known.keys()
    off = parse_setting("requests:all-off")
    assert dict(off.overrides) == known
    GlobalSchedulerConfig.model_validate(dict(off.overrides))
    assert parse_setting("parrot").overrides == ()
    mixed = dict(parse_setting("parrot:all-off,policy=las,app_fifo=true").overrides)
    assert (mixed["policy"], mixed["app_fifo"], mixed["ctx_aware"]) == ("las", True, False)
    smaller = parse_setting("parrot:-policy,engine.instance.shared_prefix=false,engine.dtype=auto")
    assert [name for name, _ in smaller.overrides] == ["policy"]
    assert smaller.engine == (("instance.shared_prefix", False), ("dtype", "auto"))
    for wrong in ("vllm", "parrot:-speed", "parrot:fast"):
        with pytest.raises(ValueError, match=wrong.partition(":")[2] or "vllm"):
            parse_setting(wrong)


def test_a_setting_changes_the_simulated_engines():
    config = changed(SimConfig(), **{"scheduler.max_batch_size": 7, "tasks_capacity": 3})
    assert (config.scheduler.max_batch_size, config.tasks_capacity) == (7, 3)
    with pytest.raises(ValueError, match="speed"):
        changed(SimConfig(), **{"instance.speed": 2})


def test_outputs_that_end_by_chance_are_shorter_than_their_limit(tmp_path):
    output = tmp_path / "result.json"
    what = ["--workloads", "job_mix:jobs=4,rate=9,learnt=true", "--learn", "0"]
    main(["run", "--sim", "--scale", "0.05", "--output", str(output), *what])
    (run,) = json.loads(output.read_text())["runs"]
    tokens = run["figures"]["tokens"]
    assert run["figures"]["num_errors"] == 0
    assert tokens["output"] < tokens["calls"] * UNKNOWN_LIMIT / 4
    assert run["figures"]["jct_all_s"]["count"] == 4


def test_wrong_arguments_end_the_command(capsys):
    for arguments in (
        ["--sim", "--workloads", "chess"],
        ["--sim", "--workloads", "chain:colour=3"],
        ["--sim", "--workloads", "chain", "--compare", "parrot:-nothing"],
    ):
        with pytest.raises(SystemExit):
            main(["run", *arguments])
        assert arguments[-1].partition(":")[2].partition("=")[0] in capsys.readouterr().err


def test_ratios_are_over_the_first_setting_of_the_same_repetition():
    def run(setting: str, repeat: int, mean: float, errors: int = 0) -> dict:
        figures = {
            "seconds": 2 * mean,
            "num_errors": errors,
            "timed_out": False,
            "jct_s": {"job": {"mean": mean, "p99": mean}},
        }
        return {"case": "c", "setting": setting, "repeat": repeat, "figures": figures}

    runs = [run("a", 0, 1.0), run("b", 0, 2.0), run("a", 1, 2.0), run("b", 1, 3.0)]
    runs += [run("a", 2, 1.0), run("b", 2, 9.0, errors=1)]
    (row,) = ratios(runs)
    assert (row["setting"], row["over"], row["repeats"]) == ("b", "a", 2)
    assert row["jct_job_mean"] == [1.75, 1.5, 2.0]


def test_results_become_a_picture(tmp_path):
    output = tmp_path / "result.json"
    what = ["--workloads", "mixed:chats=2,applications=1", "map_reduce", "--scale", "0.02"]
    how = ["--compare", "parrot", "requests:all-off", "--repeat", "2", "--open-sessions"]
    main(["run", "--sim", "--output", str(output), *what, *how])
    picture = tmp_path / "result.svg"
    main(["plot", str(output), "--output", str(picture)])
    assert "mixed" in picture.read_text()


def test_other_servers_get_the_same_random_model(tmp_path):
    main(["model", "llama-2-7b", str(tmp_path)])
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert (
        tokenizer.get_vocab_size()
        == json.loads((tmp_path / "config.json").read_text())["vocab_size"]
    )
    with pytest.raises(SystemExit):
        main(["model", "llama-9", str(tmp_path)])


DEFINITIONS = {
    "words": word_tokenizer(3000).tokenizer_json,
    "bytes": byte_tokenizer().tokenizer_json,
}


@pytest.mark.parametrize("name", DEFINITIONS)
def test_pieces_have_their_tokens_alone_and_joined(name):
    tokenizer = Tokenizer.from_str(DEFINITIONS[name])
    text = TextSource(one_token_words(DEFINITIONS[name]))
    pieces = [text.constant(7, "a"), text.data(500, "b"), *text.document(0, 100, 33)]
    assert [piece.tokens for piece in pieces] == [7, 500, 33, 33, 33, 1]
    assert [len(tokenizer.encode(p.content).ids) for p in pieces] == [p.tokens for p in pieces]
    assert len(tokenizer.encode("".join(p.content for p in pieces)).ids) == 607


def test_a_tokenizer_without_words_is_rejected():
    with pytest.raises(ValueError, match="too few"):
        one_token_words(word_tokenizer(5).tokenizer_json)
