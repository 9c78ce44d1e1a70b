"""docs/python.md tells the truth."""

import re
from pathlib import Path

from parrot import P
from parrot.frontend.pfunc.interface import semantic_function
from parrot.protocol.errors import ParrotError
from tests.support.fake_serve import FakeServe

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "python.md").read_text("utf-8")


def test_the_first_program_runs(url: str, serve: FakeServe, tmp_path: Path, capsys: object) -> None:
    code = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)[0]
    path = tmp_path / "program.py"
    path.write_text(code.replace("http://localhost:9000", url))
    exec(compile(path.read_text(), str(path), "exec"), {"__name__": "program"})
    assert [call.func_name for call in serve.calls] == ["tell_a_joke", "rate"]


def test_the_error_tree_is_complete() -> None:
    tree = re.search(r"```\nParrotError\n(.*?)```", TEXT, re.DOTALL)
    assert tree is not None
    rows = re.findall(r"[|`]-- (\w+) +(\d+)", tree.group(1))
    for name, status in rows:
        assert getattr(P.errors, name).status == int(status), name
    public = {
        name
        for name, cls in vars(P.errors).items()
        if isinstance(cls, type) and issubclass(cls, ParrotError)
    }
    unseen = {"ParrotError", "MethodNotAllowed", "StaleCore"}  # by programs
    assert {name for name, _ in rows} == public - unseen


def test_every_option_is_there() -> None:
    for name in P.SamplingConfig.model_fields:
        assert name in TEXT or name in ("length_penalty", "n", "best_of"), name
    options = re.findall(r"^\| (`[a-z_`, ]+`) \|", TEXT, re.MULTILINE)
    named = {name.strip("` ") for group in options for name in group.split(",")}
    assert {"formatter", "conversation_template", "models", "cache_prefix"} <= named
    semantic_function(fuse_fill=True, model_type="text", try_register=True)
