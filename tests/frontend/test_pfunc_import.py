import json
import subprocess
import sys

import pytest

import parrot
from parrot import P

HEAVY = ("torch", "transformers", "numpy", "aiohttp", "fastapi", "stamina", "uvicorn")


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout


def test_import_loads_nothing_heavy() -> None:
    loaded = json.loads(
        run_python("import json, sys; from parrot import P; print(json.dumps(sorted(sys.modules)))")
    )
    assert not set(HEAVY) & {name.partition(".")[0] for name in loaded}


def test_import_is_fast() -> None:
    """The test uses the CPU time and the best of three runs, because the machine may be busy. On an
    idle machine, the import takes about 0.12 s."""
    code = (
        "import time; t = time.process_time(); from parrot import P; print(time.process_time()-t)"
    )
    assert min(float(run_python(code)) for _ in range(3)) < 0.5


def test_the_servers_do_not_load_the_front_end() -> None:
    code = "import sys, parrot.protocol; print(any('frontend' in m for m in sys.modules))"
    assert run_python(code).strip() == "False"


def test_all_documented_names_exist() -> None:
    names = """VirtualMachine Input Output semantic_function native_function variable Parameter
        ParamType SamplingConfig PerformanceCriteria standard_formatter allowing_newline
        vicuna_template chat_template"""
    assert set(names.split()) <= set(P.__all__)
    assert not [name for name in P.__all__ if not hasattr(P, name)]


def test_module_paths_of_earlier_programs() -> None:
    from parrot.frontend.pfunc.function import (
        Constant,
        ParameterLoc,
        PyNativeCall,
        SemanticCall,
    )
    from parrot.frontend.pfunc.transforms.conversation_template import (
        ConversationTemplate,
        SeparatorStyle,
        vicuna_template,
    )
    from parrot.frontend.pfunc.transforms.prompt_formatter import (
        AlwaysOneSpace,
        PyIndentRemover,
        SquashIntoOneLine,
    )
    from parrot.testing.multiproc_manager import MultiProcessManager
    from parrot.utils.cprofile import cprofile

    assert isinstance(vicuna_template, ConversationTemplate)
    assert all(
        (
            Constant,
            ParameterLoc,
            PyNativeCall,
            SemanticCall,
            SeparatorStyle,
            AlwaysOneSpace,
            PyIndentRemover,
            SquashIntoOneLine,
            MultiProcessManager,
            cprofile,
        )
    )


def test_errors_can_be_imported_from_the_package() -> None:
    from parrot.protocol import errors

    assert parrot.errors is errors
    assert P.errors is errors


def test_unknown_attributes_are_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        parrot.nonsense  # noqa: B018


def test_a_session_loads_no_second_http_client_and_no_requests_of_engines() -> None:
    """aiohttp takes 0.1 s to import, and the models of engines take 10 ms."""
    code = (
        "import json, sys\n"
        "from parrot import P\n"
        "from parrot.protocol.errors import Unavailable\n"
        "try:\n"
        "    P.VirtualMachine('http://127.0.0.1:9').run(print)\n"
        "except Unavailable:\n"
        "    print(json.dumps(sorted(sys.modules)))\n"
    )
    loaded = json.loads(run_python(code))
    assert "parrot.protocol.serve_client" in loaded
    assert not {*HEAVY, "parrot.protocol.engine_api"}.intersection(loaded)
