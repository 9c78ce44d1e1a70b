import orjson
import pytest

from parrot.engine.config import (
    BuiltinConfig,
    OpenAIConfig,
    SimConfig,
    load_engine_config,
    parse_engine_config,
)
from parrot.utils.config import ConfigError

ORIGINAL_LOCAL = {
    "engine_name": "vicuna-7b-v1.3_local",
    "model": "lmsys/vicuna-7b-v1.3",
    "host": "localhost",
    "port": 9001,
    "engine_type": "builtin",
    "random_seed": 0,
    "tokenizer": "hf-internal-testing/llama-tokenizer",
    "fill_chunk_size": -1,
    "tasks_capacity": 256,
    "instance": {"num_kv_cache_blocks": 8000, "attn_func": "xformers_with_buffer"},
    "scheduler": {
        "max_batch_size": 256,
        "max_num_batched_tokens": 2560,
        "max_total_tokens": 8192,
    },
    "serve_core": {"host": "localhost", "port": 9000},
}
ORIGINAL_OPENAI = {
    "model": "gpt35turobo4k",
    "engine_name": "Azure-OpenAI-GPT-3.5-Turbo-4K",
    "host": "localhost",
    "port": 9001,
    "engine_type": "openai",
    "random_seed": 0,
    "tasks_capacity": 64,
    "instance": {
        "api_key": "xxx",
        "api_endpoint": "completion",
        "is_azure": True,
        "azure_api_version": "2023-07-01-preview",
        "azure_endpoint": "xxx",
    },
    "scheduler": {
        "max_batch_size": 256,
        "max_num_batched_tokens": 99999999,
        "max_total_tokens": 99999999,
    },
    "serve_core": {"host": "localhost", "port": 9000},
}


def test_the_local_config_of_the_original_parrot_loads():
    config = parse_engine_config(ORIGINAL_LOCAL, "original")
    assert isinstance(config, BuiltinConfig)
    assert config.instance.attn_func == "auto"
    assert config.instance.num_kv_cache_blocks * config.instance.block_size == 8000
    assert config.fill_chunk_size is None
    assert config.scheduler.max_num_batched_tokens == 2560


def test_attention_functions_of_the_original_parrot_keep_their_block_size():
    instance = {
        "num_kv_cache_blocks": 1000,
        "block_size": 16,
        "attn_func": "xformers_fill_vllm_paged_attention_generate",
        "dtype": "float16",
        "device": "cuda",
    }
    config = parse_engine_config({**ORIGINAL_LOCAL, "instance": instance}, "original")
    assert isinstance(config, BuiltinConfig)
    assert config.instance.num_kv_cache_blocks == 1000
    assert config.instance.block_size == 16
    assert (config.dtype, config.device) == ("float16", "cuda")


@pytest.mark.parametrize("policy", ["fifo", "tgi"])
def test_policies_of_the_original_parrot_mean_first_come_first_served(policy):
    scheduler = {**ORIGINAL_LOCAL["scheduler"], "policy": policy}
    config = parse_engine_config({**ORIGINAL_LOCAL, "scheduler": scheduler}, "original")
    assert config.scheduler.policy == "fcfs"


def test_the_openai_config_of_the_original_parrot_loads():
    config = parse_engine_config(ORIGINAL_OPENAI, "original")
    assert isinstance(config, OpenAIConfig)
    assert config.instance.is_azure
    assert "xxx" not in repr(config).replace("azure_endpoint='xxx'", "")


def test_an_empty_config_runs_the_embedded_model():
    config = parse_engine_config({}, "empty")
    assert isinstance(config, BuiltinConfig)
    assert config.model == "embedded"
    assert config.engine_name == "embedded:9001"
    assert config.host == "localhost"


def test_an_engine_without_a_name_gets_the_same_name_at_each_start():
    payload = {"engine_type": "sim", "model": "org/name", "port": 9005}
    names = {parse_engine_config(payload, "x").engine_name for _ in range(2)}
    assert names == {"name:9005"}


@pytest.mark.parametrize(
    ("payload", "parts"),
    [
        ({"prot": 1}, ["file.json", "`prot`", "unknown key", "port"]),
        ({"port": "9001"}, ["`port`", "integer"]),
        ({"port": 0}, ["`port`"]),
        ({"engine_type": "mlcllm"}, ["`engine_type`", "builtin, openai, huggingface, sim"]),
        ({"engine_type": []}, ["`engine_type`"]),
        ({"scheduler": {"max_batch": 1}}, ["`scheduler.max_batch`", "max_batch_size"]),
        ({"scheduler": {"policy": ["fifo"]}}, ["`scheduler.policy`", "'priority' or 'fcfs'"]),
        ({"scheduler": {"policy": "best"}}, ["`scheduler.policy`", "'priority' or 'fcfs'"]),
        ({"instance": {"attn_func": "magic"}}, ["`instance.attn_func`", "'auto'"]),
        ({"instance": {"block_sz": 1}}, ["`instance.block_sz`", "block_size"]),
        ({"instance": 3}, ["`instance`"]),
        ({"dtype": "int8"}, ["`dtype`", "'bfloat16'"]),
        ({"device": "tpu"}, ["`device`"]),
        ({"fill_chunk_size": 0}, ["`fill_chunk_size`"]),
        ({"heartbeat_interval": 0}, ["`heartbeat_interval`"]),
        ({"engine_type": "openai"}, ["`model`", "required"]),
        (
            {"engine_type": "openai", "model": "m", "instance": {"is_azure": True}},
            ["azure_endpoint"],
        ),
        ({"engine_type": "sim", "instance": {"step_s": -1.0}}, ["`instance.step_s`"]),
    ],
)
def test_errors_name_file_key_and_allowed_values(payload, parts):
    with pytest.raises(ConfigError) as error:
        parse_engine_config(payload, "file.json")
    for part in ["file.json", *parts]:
        assert part in str(error.value)


def test_configs_are_frozen():
    config = SimConfig()
    with pytest.raises(ValueError, match="frozen"):
        config.port = 1


def test_files_and_overrides(tmp_path):
    path = tmp_path / "engine.json"
    path.write_bytes(orjson.dumps({"engine_type": "sim", "port": 9100}))
    config = load_engine_config(str(path), {"port": 9200, "engine_name": "a"})
    assert (config.port, config.engine_name) == (9200, "a")


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"a": NaN}'])
def test_invalid_config_files_are_refused(tmp_path, content):
    path = tmp_path / "engine.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"engine\.json"):
        load_engine_config(str(path))
    with pytest.raises(ConfigError, match="cannot be read"):
        load_engine_config(str(tmp_path / "none.json"))
