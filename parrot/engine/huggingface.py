"""Runs the steps of the huggingface engine: transformers computes, and Parrot's pool holds the KV.

In each layer a transformers model passes new keys and values to its cache and gets all keys and
values back. Parrot's cache writes the new ones to a pool of slots and gathers the result from it.
The sequences of one forward pass have equal numbers of new tokens and are padded on the left:

    row 0    _ _ _ x x x n          _  the zero slot, hidden by the attention mask
    row 1    x x x x x x n          x  computed before      n  new
"""

import inspect
import logging
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache, DynamicLayer

from parrot.engine.config import HuggingFaceConfig
from parrot.engine.core.steps import (
    BlockCopy,
    RunnerInfo,
    ScoreSpec,
    SequenceStep,
    StateRead,
    StepPlan,
    StepResult,
    TokenScores,
)
from parrot.engine.models.checkpoint import (
    EMBEDDED,
    Checkpoint,
    LoadedModel,
    open_checkpoint,
    open_default_sampling,
    open_tokenizer,
    resolve_device,
    resolve_dtype,
)
from parrot.engine.runner.device import StepReads, detect_device_loss, device_name
from parrot.engine.runner.log_probabilities import as_logprobs, score_tokens
from parrot.engine.runner.sampling import sample
from parrot.protocol.errors import ParrotError
from parrot.protocol.sampling import Logprobs
from parrot.utils.config import ConfigError

_MIB = 2**20
_MAX_ROWS = 64  # Most sequences in one forward pass.
_PROBE_TOKENS = 12  # Prompt length of the check whether a model can be served.
_SCORED_TOKENS = 64  # Most scored tokens in one forward pass, which holds all of their logits.


class HuggingFaceRunner:
    """`Runner` over any transformers model whose only state is the KV of its layers.

    Sequences with equal numbers of new tokens share a forward pass. These include all decodes."""

    def __init__(self, model: Any, *, num_blocks: int, block_size: int, max_seq_len: int) -> None:
        """Raises `ConfigError` for a model with state outside its KV."""
        config = model.config.get_text_config(decoder=True)
        self._model = model
        self._device = next(model.parameters()).device
        self._block_size = block_size
        self._cache = PagedCache(config.num_hidden_layers, num_blocks * block_size)
        parameters = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in parameters
        self._takes_kept = "logits_to_keep" in parameters
        # transformers 5.24 renamed the parameter, and removes the old name in 5.40.
        self._cache_parameter = "cache" if "cache" in parameters else "past_key_values"
        vocab_size = self._probe(num_blocks, config.vocab_size)
        self._info = RunnerInfo(
            num_blocks=num_blocks,
            block_size=block_size,
            max_seq_len=max_seq_len,
            vocab_size=vocab_size,
            model_mem=sum(p.nbytes for p in model.parameters()) / _MIB,
            cache_mem=self._cache.num_bytes / _MIB,
            device=device_name(self._device),
        )

    @property
    def info(self) -> RunnerInfo:
        return self._info

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        with detect_device_loss(self._device):
            return self._run(plan)

    def _run(self, plan: StepPlan) -> StepResult:
        for copy in plan.copies:
            self._copy(copy)
        tokens: dict[int, int] = {}
        errors: dict[int, ParrotError] = {}
        scores: dict[int, TokenScores] = {}
        read: dict[int, StateRead] = {}
        for batch in _batches(s for s in plan.sequences if not isinstance(s.read, ScoreSpec)):
            reads = StepReads.of(batch)
            logits = self._forward(batch, reads)[:, -1]
            read |= {} if reads is None else reads.landed()
            wanted = [(row, s.sample) for row, s in enumerate(batch) if s.sample is not None]
            if wanted:
                rows = logits[[row for row, _ in wanted]].float()
                result = sample(rows, [spec for _, spec in wanted])
                tokens |= result.tokens
                errors |= result.errors
                scores |= result.scores
        for sequence in plan.sequences:
            if isinstance(spec := sequence.read, ScoreSpec):
                read[spec.job_id] = self._score(sequence, spec)
        return StepResult(tokens, errors, scores=scores, read=read)

    def _score(self, sequence: SequenceStep, spec: ScoreSpec) -> Logprobs:
        """Score a prompt in passes of `_SCORED_TOKENS` tokens."""
        # Models compute logits from hidden states differently, so each pass computes the logits of
        # all its tokens.
        found = Logprobs(1 + spec.num_top)
        for first in range(0, len(sequence.token_ids), _SCORED_TOKENS):
            part = sequence.token_ids[first : first + _SCORED_TOKENS]
            one = sequence._replace(token_ids=part, start=sequence.start + first, read=None)
            logits = self._forward([one], num_kept=len(part))[0, -len(part) :]
            begin = max(first, spec.start)  # Tokens before `spec.start` have no targets.
            targets = spec.targets[begin - spec.start : first + len(part) - spec.start]
            if not targets:
                continue
            wanted = logits[begin - first : begin - first + len(targets)]
            ids = torch.tensor(targets, dtype=torch.long, device=self._device)
            scores = score_tokens(wanted, ids, spec.num_top)
            found.extend(as_logprobs(scores.cpu().numpy(), spec.num_top))
        return found

    def _forward(
        self, batch: Sequence[SequenceStep], reads: StepReads | None = None, num_kept: int = 1
    ) -> torch.Tensor:
        """Logits [rows, tokens, vocab], at least of the last `num_kept` tokens of each row."""
        num_new = len(batch[0].token_ids)
        table, mask = self._slots(batch)
        self._cache.place(Slots(self._tensor(table), num_new))
        options: dict[str, Any] = {self._cache_parameter: self._cache}
        if self._takes_kept:
            options["logits_to_keep"] = num_kept
        if self._takes_positions:
            starts = np.array([[s.start] for s in batch])
            options["position_ids"] = self._tensor(starts + np.arange(num_new))
        output = self._model(
            input_ids=self._tensor(np.array([s.token_ids for s in batch], dtype=np.int64)),
            attention_mask=self._tensor(mask),
            use_cache=True,
            output_hidden_states=reads is not None,
            **options,
        )
        if reads is not None:
            reads.take(output.hidden_states[-1].flatten(0, 1), self._model.get_output_embeddings())
        logits: torch.Tensor = output.logits
        return logits

    def _slots(self, batch: Sequence[SequenceStep]) -> tuple[Any, Any]:
        """Slots and attention mask, int64 [rows, longest context], padded on the left."""
        longest = max(s.end for s in batch)
        table = np.full((len(batch), longest), self._cache.zero_slot, dtype=np.int64)
        mask = np.zeros((len(batch), longest), dtype=np.int64)
        within = np.arange(self._block_size)
        for row, sequence in enumerate(batch):
            blocks = np.asarray(sequence.block_ids, dtype=np.int64)[:, None]
            slots = (blocks * self._block_size + within).reshape(-1)
            table[row, longest - sequence.end :] = slots[: sequence.end]
            mask[row, longest - sequence.end :] = 1
        return table, mask

    def _copy(self, copy: BlockCopy) -> None:
        within = torch.arange(copy.num_tokens, device=self._device)
        self._cache.copy(
            within + copy.source * self._block_size, within + copy.target * self._block_size
        )

    def _tensor(self, array: Any) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)

    @torch.inference_mode()
    def _probe(self, num_blocks: int, vocab_size: int) -> int:
        """Compute a prompt in three parts, and compare its logits with a run without a cache.

        Also creates the pools. Returns the number of columns of the logits."""
        num_tokens = min(_PROBE_TOKENS, num_blocks * self._block_size)
        token_ids = [(7 * i + 1) % vocab_size for i in range(num_tokens)]
        blocks = range(-(-num_tokens // self._block_size))
        cuts = sorted({0, num_tokens // 2, num_tokens - 1, num_tokens})
        try:
            for start, end in pairwise(cuts):
                part = SequenceStep(0, token_ids[start:end], start, blocks, None)
                logits = self._forward([part])[:, -1]
        except (TypeError, ValueError, AttributeError, NotImplementedError, RuntimeError) as error:
            raise self._unsuitable(str(error)) from error
        ids = self._tensor(np.array([token_ids], dtype=np.int64))
        expected = self._model(input_ids=ids, use_cache=False).logits[:, -1].double()
        difference = (logits.double() - expected).norm() / expected.norm().clamp_min(1e-30)
        tolerance = 1e-3 if logits.dtype == torch.float32 else 0.1
        if not all(layer.pools for layer in self._cache.layers):
            raise self._unsuitable("some layers keep no keys and values")
        if not difference <= tolerance:
            raise self._unsuitable(f"in parts, its logits differ by {float(difference):.1%}")
        return int(logits.shape[-1])

    def _unsuitable(self, reason: str) -> ConfigError:
        return ConfigError(
            f"{type(self._model).__name__} cannot be served by the huggingface engine, which needs "
            f"a model whose only state is the keys and values of its layers: {reason[:300]}"
        )


def _batches(sequences: Iterable[SequenceStep]) -> Iterator[list[SequenceStep]]:
    """Batches of sequences with equal numbers of new tokens, of which at most half is padding."""

    def size(sequence: SequenceStep) -> tuple[int, int]:
        return len(sequence.token_ids), sequence.end

    ordered = sorted((s for s in sequences if len(s.token_ids)), key=size)
    for _, equal in groupby(ordered, key=lambda s: len(s.token_ids)):
        batch: list[SequenceStep] = []
        for sequence in equal:
            if batch and (len(batch) == _MAX_ROWS or sequence.end > 2 * batch[0].end):
                yield batch
                batch = []
            batch.append(sequence)
        if batch:
            yield batch


@dataclass(frozen=True, slots=True)
class Slots:
    """The slots of one forward pass in the pools."""

    table: torch.Tensor  # int64 [rows, columns].
    num_new: int  # The last `num_new` columns are the new tokens.

    @property
    def num_past(self) -> int:
        return int(self.table.shape[1]) - self.num_new


class PagedLayer(DynamicLayer):  # type: ignore[misc]
    """The keys and values of one layer as pools [slots, heads, dim]. The last slot is always zero.

    The pools are created at the first update, which shows their shape."""

    def __init__(self, num_slots: int) -> None:
        super().__init__()
        self._num_slots = num_slots
        self.slots: Slots | None = None
        self.pools: tuple[torch.Tensor, ...] = ()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new states [rows, heads, new tokens, dim]. Returns them after the past states."""
        slots = self.slots
        assert slots is not None, "a forward pass without slots"
        states = (key_states, value_states)
        if not self.pools:
            self.pools = tuple(self._make_pool(state) for state in states)
        new = slots.table[:, slots.num_past :]
        for pool, state in zip(self.pools, states, strict=True):
            pool[new] = state.transpose(1, 2)
        keys, values = (pool[slots.table].transpose(1, 2) for pool in self.pools)
        return keys, values

    def _make_pool(self, state: torch.Tensor) -> torch.Tensor:
        # Slots are written before they are read. Without filling, memory is allocated at first use.
        pool = state.new_empty((self._num_slots + 1, state.shape[1], state.shape[3]))
        pool[-1] = 0
        return pool

    def get_seq_length(self) -> int:
        return 0 if self.slots is None else self.slots.num_past


class PagedCache(Cache):  # type: ignore[misc]
    """One pool per layer of a model."""

    def __init__(self, num_layers: int, num_slots: int) -> None:
        self.zero_slot = num_slots
        super().__init__(layers=[PagedLayer(num_slots) for _ in range(num_layers)])

    def place(self, slots: Slots) -> None:
        """Set the slots of the next forward pass."""
        for layer in self.layers:
            layer.slots = slots

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy slots to other slots in every layer."""
        for layer in self.layers:
            for pool in layer.pools:
                pool[target] = pool[source]

    @property
    def num_bytes(self) -> int:
        return sum(pool.nbytes for layer in self.layers for pool in layer.pools)


logger = logging.getLogger(__name__)

_BLOCK_SIZE = 16  # Tokens per block.
_UNKNOWN_MAX_LEN = 2048  # Longest context, in tokens, of a model whose config has no limit.


def load_runner(config: HuggingFaceConfig) -> LoadedModel[HuggingFaceRunner]:
    """Load the configured model, which takes seconds to minutes. Runs no code of its repository.

    Raises `ConfigError` for a model that is missing or cannot be served."""
    device = resolve_device(config.device)
    if device.type == "cpu":
        torch.set_num_threads(os.cpu_count() or 1)
    dtype = resolve_dtype(config.dtype, device)
    started = time.perf_counter()
    if config.model == EMBEDDED or Path(config.model).suffix == ".gguf":
        checkpoint = open_checkpoint(config.model)
        model, tokenizer = _from_gguf(checkpoint, dtype), checkpoint.load_tokenizer()
        default_sampling = checkpoint.default_sampling
    else:
        model, tokenizer = _from_pretrained(config.model, dtype), None
        default_sampling = open_default_sampling(config.model)
    if config.tokenizer or tokenizer is None:
        tokenizer = open_tokenizer(config.tokenizer or config.model)
    runner = HuggingFaceRunner(
        model.to(device).eval(),
        num_blocks=-(-config.instance.max_cached_tokens // _BLOCK_SIZE),
        block_size=_BLOCK_SIZE,
        max_seq_len=_max_seq_len(model, config.instance.max_seq_len),
    )
    logger.info("loaded %s in %.1f s", config.model, time.perf_counter() - started)
    return LoadedModel(runner, tokenizer, default_sampling)


def _from_pretrained(name: str, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(
            name, dtype=dtype, trust_remote_code=False, use_safetensors=True
        )
    except MemoryError:
        raise
    except Exception as error:
        logger.debug("%s", name, exc_info=True)
        raise ConfigError(f"{name}: transformers cannot load it: {error}") from None


def _from_gguf(checkpoint: Checkpoint, dtype: torch.dtype) -> Any:
    """Load a GGUF file with the builtin engine's reader."""
    # The reader of transformers needs another package and takes 13 s for 135M parameters.
    import transformers

    given = dict(checkpoint.config)
    rope = given["rope_parameters"]
    if rope["rope_type"] == "factors":
        raise ConfigError(f"{checkpoint.source}: transformers cannot take this file's rope factors")
    if rope["rope_type"] == "default":
        given["rope_parameters"] = {key: rope[key] for key in ("rope_type", "rope_theta")}
    model_class = getattr(transformers, given["architectures"][0])
    return model_class.from_pretrained(
        None,
        config=model_class.config_class(**given),
        trust_remote_code=False,
        state_dict={name: checkpoint.take(name) for name in checkpoint.plans},
        dtype=dtype,
    )


def _max_seq_len(model: Any, wanted: int | None) -> int:
    own = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if own is None:
        return wanted or _UNKNOWN_MAX_LEN
    return min(wanted or own, int(own))
