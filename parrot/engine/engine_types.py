"""Creates the service of each engine type. Imports only the packages that the type needs."""

import gc
import logging
import os
import time
from typing import TYPE_CHECKING

from parrot.engine.config import (
    AnyEngineConfig,
    BuiltinConfig,
    HuggingFaceConfig,
    OpenAIConfig,
    SimConfig,
)
from parrot.engine.core.engine_core import EngineCore
from parrot.engine.core.output import Language
from parrot.engine.core.steps import DividedRunner, StepRunner
from parrot.engine.service import EngineService, RunnerService, ThreadDriver
from parrot.protocol.sampling import NEUTRAL_SAMPLING
from parrot.utils.clock import MonotonicClock
from parrot.utils.config import ConfigError
from parrot.utils.gpus import visible_gpus
from parrot.utils.installation import MODEL_PACKAGES, how_to_install, lines_for_models

if TYPE_CHECKING:
    from parrot.engine.models.checkpoint import LoadedModel

logger = logging.getLogger(__name__)


def create_service(config: AnyEngineConfig) -> EngineService:
    """The service for a config. It loads nothing before `start`."""
    if isinstance(config, SimConfig):
        from parrot.engine.sim import SimService

        return SimService(config)
    if isinstance(config, OpenAIConfig):
        from parrot.engine.openai.service import OpenAIService

        return OpenAIService(config)
    driver = ThreadDriver(lambda: _load(config, driver))
    return RunnerService(config, driver, warm_up=True, pooling=config.instance.pooling)


def _load(config: BuiltinConfig | HuggingFaceConfig, driver: ThreadDriver) -> EngineCore:
    began = time.monotonic()
    logger.info("loading %s (device %s, dtype %s)", config.model, config.device, config.dtype)
    # Nearly all objects that imports and loading create stay alive. Searching them for garbage
    # would take a fifth of the loading time. `freeze` also excludes them from later collections.
    gc.disable()
    try:
        runner, language = _load_model(config)
    finally:
        gc.freeze()
        gc.enable()
    if isinstance(runner, DividedRunner):
        runner.on_lost(driver.lose)
        driver.at_end(runner.close)
    info = runner.info
    logger.info(
        "loaded %s in %.1f s: %.0f MiB of weights, %.0f MiB of KV for %d tokens",
        config.model,
        time.monotonic() - began,
        info.model_mem,
        info.cache_mem,
        info.num_blocks * info.block_size,
    )
    return EngineCore(config, runner, language, MonotonicClock())


def _load_model(config: BuiltinConfig | HuggingFaceConfig) -> tuple[StepRunner, Language]:
    """Raises `ConfigError` if a package for running models is not installed."""
    try:
        from parrot.engine.grammar.compiler import GrammarCompiler

        runner, tokenizer, of_model = _load_runner(config)
        grammars = GrammarCompiler.of(tokenizer, runner.info.vocab_size)
        sampling = config.default_sampling.over(of_model).over(NEUTRAL_SAMPLING)
        return runner, Language.of(tokenizer, grammars, sampling)
    except ModuleNotFoundError as error:
        if error.name not in MODEL_PACKAGES:
            raise
        raise ConfigError(
            f"an engine of type {config.engine_type} needs {error.name}, which is not installed; "
            + how_to_install(lines_for_models(visible_gpus(os.environ) > 0, embedded=False))
        ) from None


def _load_runner(config: BuiltinConfig | HuggingFaceConfig) -> "LoadedModel[StepRunner]":
    if isinstance(config, BuiltinConfig):
        from parrot.engine.runner.load import load_runner

        return load_runner(config)
    from parrot.engine.huggingface import load_runner as load_huggingface_runner

    return load_huggingface_runner(config)
