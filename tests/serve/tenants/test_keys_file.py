"""The keys file: valid and invalid contents, and the commands that change it."""

import json
import stat
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from parrot.cli.app import app
from parrot.serve.config import CoreConfig
from parrot.serve.tenants.table import KeyEntry, Scope, TenantLimits, TenantTable, read_keys
from parrot.server.http_server import main
from parrot.utils.config import ConfigError
from tests.serve.tenants.keys import entry, write_keys

LIMITS = {"sessions": 3, "tokens_per_minute": 1000}


def test_an_entry_names_the_tenant_of_a_key(tmp_path: Path) -> None:
    fields = {"weight": 2, "share_group": "g", "scopes": ["user", "metrics"], "limits": LIMITS}
    path = write_keys(tmp_path / "keys.json", entry("acme", "secret", **fields), entry("b", "x"))
    table = TenantTable(CoreConfig(keys_file=path, api_keys=("short",)))
    acme = table.of_key("secret")
    assert (acme.id, acme.weight, acme.share_group) == ("acme", 2.0, "g")
    assert acme.scopes == {Scope.USER, Scope.METRICS}
    assert (acme.limits.sessions, acme.limits.variables) == (3, None)
    assert {tenant.id for tenant in table} == {"acme", "b", table.of_key("short").id}


def test_yaml_has_the_same_meaning(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    given = entry("acme", "secret")
    path.write_text(f"keys:\n  - id: acme\n    sha256: {given['sha256']}\n")
    assert read_keys(str(path)) == [KeyEntry(**given)]


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([{"id": "a"}], ["keys.0", "`sha256`"]),
        ([entry("a", "k", scope=["user"])], ["unknown key `scope`", "Did you mean `scopes`"]),
        ([entry("a", "k", scopes=["root"])], ["keys.0: `scopes.0`"]),
        ([entry("a", "k", scopes=[])], ["`scopes`"]),
        ([entry("a", "k", weight=1e-310)], ["`weight`"]),
        ([entry("a", "k", limits={"rpm": 1})], ["unknown key `limits.rpm`"]),
        ([entry("a b", "k")], ["`id`"]),
        ([entry("public", "k")], ["public is reserved"]),
        ([entry("a", "k"), entry("a", "l")], ["keys.1", "a appears twice"]),
        ([entry("a", "k"), entry("b", "k")], ["keys.1", "another entry has this key"]),
        ([entry("a", "short")], ["is also in `api_keys`"]),
        (["a"], ["must be an object"]),
    ],
)
def test_errors_name_the_problem(tmp_path: Path, entries: list[Any], words: list[str]) -> None:
    path = write_keys(tmp_path / "keys.json", *entries)
    with pytest.raises(ConfigError) as caught:
        TenantTable(CoreConfig(keys_file=path, api_keys=("short",)))
    for word in ("keys.json", *words):
        assert word in str(caught.value)


def test_a_file_that_others_can_write_is_rejected(tmp_path: Path) -> None:
    path = Path(write_keys(tmp_path / "keys.json", entry("a", "k")))
    for mode in (0o620, 0o602):
        path.chmod(mode)
        with pytest.raises(ConfigError, match="other users can write it"):
            read_keys(str(path))
    path.chmod(0o644)
    assert len(read_keys(str(path))) == 1


@pytest.mark.parametrize("raw", [b"[]", b"{}", b'{"keys": {}}', b'{"keys": [], "x": 1}', b"{", b""])
def test_files_without_keys_are_rejected(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "keys.json").write_bytes(raw)
    with pytest.raises(ConfigError, match=r"keys\.json"):
        read_keys(str(tmp_path / "keys.json"))


def test_a_file_that_is_missing_or_huge_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys(str(tmp_path / "none.json"))
    (tmp_path / "huge.json").write_bytes(b" " * 2**20)
    with pytest.raises(ConfigError, match="more than"):
        read_keys(str(tmp_path / "huge.json"))
    with pytest.raises(ConfigError, match=r"directory|no file"):
        read_keys(str(tmp_path))


@pytest.mark.parametrize("name", ["keys.json", "keys.yaml"])
def test_commands_change_the_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / name

    def keys(*args: str) -> tuple[int, str, str]:
        result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["keys", *args, "--file", str(path)])
        return result.exit_code, result.stdout, result.stderr

    limits = ("--limit", "sessions=3", "--limit", "tokens_per_minute=1000")
    code, key, _ = keys("add", "acme", "--scope", "user", "--scope", "metrics", *limits)
    key = key.strip()
    assert code == 0
    assert len(key) > 40
    assert key not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o640)
    code, other, _ = keys("add", "beta", "--weight", "2.5", "--share_group", "g")
    assert (code, other.strip() != key) == (0, True)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    table = TenantTable(CoreConfig(keys_file=str(path)))
    assert table.of_key(key).limits.model_dump(exclude_none=True) == LIMITS
    assert table.of_key(other.strip()).weight == 2.5

    code, shown, _ = keys("list")
    assert (code, "sessions=3" in shown, "2.5" in shown) == (0, True, True)
    for wrong, words in (
        (("add", "acme"), "acme already has a key"),
        (("add", "c", "--weight", "-1"), "`weight`"),
        (("add", "c", "--limit", "rpm=3"), "`limits.rpm`"),
        (("add", "operator"), "is reserved"),
        (("remove", "c"), "has no key of c"),
    ):
        code, _, said = keys(*wrong)
        assert (code, words in said) == (1, True), said
    assert keys("remove", "acme")[0] == 0
    assert [one.id for one in read_keys(str(path))] == ["beta"]
    assert [each.name for each in tmp_path.iterdir()] == [name]


def test_a_key_that_exceeds_the_file_limit_is_not_added(tmp_path: Path) -> None:
    limits = dict.fromkeys(TenantLimits.model_fields, 2**40)
    entries = [entry(f"{n:060}", f"{n}", limits=limits) for n in range(600)]
    path = Path(write_keys(tmp_path / "keys.json", *entries))
    before = path.read_bytes()
    result = CliRunner().invoke(app, ["keys", "add", "b", "--file", str(path)])
    assert (result.exit_code, path.read_bytes() == before) == (1, True)
    assert len(read_keys(str(path))) == len(entries)


def test_an_invalid_file_is_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"keys": [{"id": "a"}]}))
    result = CliRunner().invoke(app, ["keys", "add", "b", "--file", str(path)])
    assert result.exit_code == 1
    assert path.read_text() == json.dumps({"keys": [{"id": "a"}]})


def test_a_bad_file_stops_the_start(tmp_path: Path) -> None:
    path = Path(write_keys(tmp_path / "keys.json", entry("a", "k")))
    path.chmod(0o666)
    config = tmp_path / "core.json"
    config.write_text(json.dumps({"keys_file": str(path), "cluster_token": "t", "port": 0}))
    with pytest.raises(SystemExit, match=r"error: .*keys\.json: other users can write it"):
        main(["--config_path", str(config)])
