"""Parrot must not execute or unpickle external data. The test checks the syntax tree, so it accepts
`model.eval()` and finds `from pickle import loads as x`."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import parrot
from tests.support.syntax import parsed, statements, walk

PACKAGE = Path(parrot.__file__).parent
MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
FUNCTIONS = {
    *("torch.load", "torch.hub.load", "torch.jit.load", "numpy.load", "pandas.read_pickle"),
    *("yaml.load", "yaml.unsafe_load", "yaml.full_load"),
    *("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"),
}
TRUE_KEYWORDS = {"shell", "allow_pickle", "trust_remote_code"}

# (module, forbidden name): why it is safe.
ALLOWED: dict[tuple[str, str], str] = {
    ("parrot/frontend/pfunc/annotations.py", "eval"): "a program's own postponed annotations",
}


def find_forbidden(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and name of every forbidden import, call or reference."""
    tree = parsed(source)
    names = _imported_names(tree)
    for node in walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for module in _modules(node):
                if module.partition(".")[0] in MODULES:
                    yield node.lineno, f"import {module.partition('.')[0]}"
        elif isinstance(node, ast.Name) and node.id in BUILTINS:
            yield node.lineno, node.id
        elif isinstance(node, ast.Name | ast.Attribute):
            name = _dotted(node, names)
            if name in FUNCTIONS:
                yield node.lineno, name
            if name.startswith("builtins.") and name.partition(".")[2] in BUILTINS:
                yield node.lineno, name
        elif isinstance(node, ast.Call) and _may_trust(node):
            yield node.lineno, "no trust_remote_code=False"
        elif isinstance(node, ast.keyword) and node.arg in TRUE_KEYWORDS and not _is_false(node):
            yield node.value.lineno, f"{node.arg}=True"


def _may_trust(node: ast.Call) -> bool:
    """Whether the call loads a transformers model without `trust_remote_code`. Transformers may
    then ask the user at a terminal whether to run code of the model."""
    is_load = isinstance(node.func, ast.Attribute) and node.func.attr == "from_pretrained"
    return is_load and "trust_remote_code" not in {keyword.arg for keyword in node.keywords}


def _is_false(node: ast.keyword) -> bool:
    return isinstance(node.value, ast.Constant) and node.value.value is False


def _modules(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    return [alias.name for alias in node.names]


def _imported_names(tree: ast.AST) -> dict[str, str]:
    """Return the full names of imported names: {"np": "numpy", "load": "torch.load"}."""
    names = {}
    for node in statements(tree):
        if isinstance(node, ast.Import):
            names.update({a.asname: a.name for a in node.names if a.asname})
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update({a.asname or a.name: f"{node.module}.{a.name}" for a in node.names})
    return names


def _dotted(node: ast.expr, names: dict[str, str]) -> str:
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value, names)}.{node.attr}"
    return "?"


def test_nothing_forbidden_in_the_package() -> None:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        module = path.relative_to(PACKAGE.parent).as_posix()
        for line, what in find_forbidden(path.read_text()):
            if (module, what) not in ALLOWED:
                found[f"{module}:{line}"] = what
    assert not found


def test_the_allow_list_is_not_longer_than_needed() -> None:
    for module, what in ALLOWED:
        source = (PACKAGE.parent / module).read_text()
        assert what in {found for _, found in find_forbidden(source)}, f"{module} has no {what}"


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("import pickle", "import pickle"),
        ("import os, dill.source", "import dill"),
        ("from marshal import loads as x", "import marshal"),
        ("eval('1')", "eval"),
        ("run = exec", "exec"),
        ("import builtins\nbuiltins.eval('1')", "builtins.eval"),
        ("import torch\ntorch.load(p)", "torch.load"),
        ("import torch as t\nt.load(p)", "torch.load"),
        ("from torch import load\nload(p)", "torch.load"),
        ("import yaml\nyaml.load(f)", "yaml.load"),
        ("import numpy as np\nnp.load(f)", "numpy.load"),
        ("subprocess.run(c, shell=True)", "shell=True"),
        ("subprocess.run(c, shell=flag)", "shell=True"),
        ("AutoModel.from_pretrained(m, trust_remote_code=True)", "trust_remote_code=True"),
        ("AutoTokenizer.from_pretrained(m)", "no trust_remote_code=False"),
        ("import os\nos.system('x')", "os.system"),
    ],
)
def test_the_check_sees(source: str, what: str) -> None:
    assert what in {found for _, found in find_forbidden(source)}


@pytest.mark.parametrize(
    "source",
    [
        "model.eval()",
        "subprocess.run(c, shell=False)",
        "re.compile('x')",
        "yaml.safe_load(f)",
        "'eval(1)  # pickle'",
        "triton.compile(kernel)",
        "AutoModel.from_pretrained(m, trust_remote_code=False)",
    ],
)
def test_the_check_lets_pass(source: str) -> None:
    assert list(find_forbidden(source)) == []
