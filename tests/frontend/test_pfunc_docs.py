"""docs/python.md and docs/python_api.md agree with the code."""

import inspect
import re
from pathlib import Path

from parrot import P
from parrot.frontend.pfunc.interface import semantic_function
from parrot.frontend.pfunc.metadata import SemanticFuncMetadata
from parrot.protocol.errors import ParrotError
from tests.support.fake_serve import FakeServe

DOCS = Path(__file__).resolve().parents[2] / "docs"
GUIDE = (DOCS / "python.md").read_text("utf-8")
# The part that is not generated.
REFERENCE = (DOCS / "python_api.md").read_text("utf-8").partition("<!-- Generated")[0]


def test_the_first_program_runs(url: str, serve: FakeServe, tmp_path: Path, capsys: object) -> None:
    code = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)[0]
    path = tmp_path / "program.py"
    path.write_text(code.replace("http://localhost:9000", url))
    exec(compile(path.read_text(), str(path), "exec"), {"__name__": "program"})
    assert [call.func_name for call in serve.calls] == ["tell_a_joke", "rate"]


def test_the_error_tree_is_complete() -> None:
    tree = re.search(r"```\nParrotError\n(.*?)```", REFERENCE, re.DOTALL)
    assert tree is not None
    rows = re.findall(r"[|`]-- (\w+) +(\d+)", tree.group(1))
    for name, status in rows:
        error = P.MaxTurnsExceeded if name == "MaxTurnsExceeded" else getattr(P.errors, name)
        assert error.status == int(status), name
    public = {
        name
        for name, cls in vars(P.errors).items()
        if isinstance(cls, type) and issubclass(cls, ParrotError)
    }
    unseen = {"ParrotError", "StaleCore"}  # the root, and an answer of engines to a ServeCore
    assert {name for name, _ in rows} == public - unseen | {"MaxTurnsExceeded"}


def test_every_option_is_documented() -> None:
    rows = re.findall(r"^\| (`[a-z_`, ]+`) \|", REFERENCE, re.MULTILINE)
    named = {name.strip("` ") for group in rows for name in group.split(",")}
    assert set(P.SamplingConfig.model_fields) <= named
    options = set(SemanticFuncMetadata.model_fields) - {"chat", "system"}  # set by chat_template
    options |= set(inspect.signature(semantic_function).parameters) - {"metadata"}
    assert options <= named
    semantic_function(fuse_fill=True, model_type="text", try_register=True)
