"""The sim engine: the real engine core over a runner that simulates the time of each step.

Each token is a function of all tokens before it. The driver can run several steps as one leap, in
real or in virtual time."""

import asyncio
import logging
import math
import random
import zlib
from array import array
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import accumulate

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from parrot.engine.config import SimConfig, SimInstance
from parrot.engine.core.engine_core import EngineCore
from parrot.engine.core.output import Language
from parrot.engine.core.scheduler import Step
from parrot.engine.core.steps import (
    Landed,
    RunnerInfo,
    SequenceStep,
    StepPlan,
    StepResult,
    TokenScores,
    Transfer,
    UniqueKv,
)
from parrot.engine.service import RunnerService, Verb, apply_verbs, deliver
from parrot.protocol.engine_api import RuntimeInfo, SpecialIds, StepCosts, TokenizerResponse
from parrot.protocol.errors import EngineFailed, Unavailable
from parrot.protocol.sampling import NEUTRAL_SAMPLING, SamplingConfig
from parrot.utils.byte_symbols import byte_symbols
from parrot.utils.clock import Clock, MonotonicClock

# A transfer counts as finished up to this time, in seconds, before its end: the clock may round.
_ROUNDING_S = 1e-9


VOCAB_SIZE = 259  # 256 bytes and three special tokens.
_CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
_LEAST_STEP_S = 1e-6  # Smallest step time, in seconds, that the engine reports as its cost.
# The reported cost of a prompt token assumes this number of tokens before the token.
_TYPICAL_DEPTH = 1000
_TOKEN_BYTES = 128 << 10  # Reported bytes of KV per token, as in an 8B model.
_LETTERS = b"etaoin shrdlu cmfwyp vbgkqjxz etaoin "  # All tokens that the engine samples.
LETTER_IDS = frozenset(_LETTERS)
_LOGPROBS = {
    letter: math.log(count / len(_LETTERS)) for letter, count in Counter(_LETTERS).most_common()
}
_AS_BYTES = {letter: array("i", [letter]).tobytes() for letter in LETTER_IDS}


logger = logging.getLogger(__name__)
# If the process oversleeps, later steps are shortened by at most this time, in seconds.
_MAX_CATCH_UP_S = 0.02


def token_after(checksum: int) -> int:
    """The next token of a context. `checksum`: the CRC-32 of its ids as 32-bit numbers."""
    return _LETTERS[checksum % len(_LETTERS)]


def _scores(token: int, num_top: int) -> TokenScores:
    """The log frequency of `token` in `_LETTERS`, and of the `num_top` most frequent letters."""
    ids = [token, *list(_LOGPROBS)[:num_top]]
    return TokenScores(ids, [_LOGPROBS[i] for i in ids])


class SimRunner:
    """Samples letters and spaces by a checksum of the context, and never an end-of-text token.

    Equal contexts get equal outputs in every batch. With `samples`, the checksum of a call with a
    temperature and without a seed starts with a random number."""

    def __init__(self, instance: SimInstance, clock: Clock) -> None:
        self._instance = instance
        self._transfers: SimTransfers | None = None
        if instance.num_host_kv_blocks:
            self._transfers = SimTransfers(instance.block_size * instance.host_token_s, clock)
        self._unique_kv = UniqueKv(instance.block_size)
        # Jobs of the last step: number of tokens and their checksum.
        self._checksums: dict[int, tuple[int, int]] = {}
        self._info = RunnerInfo(
            num_blocks=instance.num_kv_cache_blocks,
            block_size=instance.block_size,
            max_seq_len=instance.max_seq_len,
            vocab_size=VOCAB_SIZE,
            model_mem=0.0,
            cache_mem=0.0,
            costs=StepCosts(
                step_s=max(_LEAST_STEP_S, instance.step_s),
                sequence_s=instance.sequence_s,
                token_s=instance.context_token_s,
                prefill_s=instance.prefill_token_s + _TYPICAL_DEPTH * instance.prefill_pair_s,
            ),
            num_host_blocks=instance.num_host_kv_blocks,
            block_bytes=instance.block_size * _TOKEN_BYTES,
        )

    @property
    def info(self) -> RunnerInfo:
        return self._info

    def transfer(self, transfers: Sequence[Transfer]) -> None:
        assert self._transfers is not None, "there is no host tier"
        self._transfers.begin(transfers)

    def landed(self, *, wait: bool) -> Sequence[Landed]:
        """Ignores `wait`: a caller that waits must sleep until `next_landing`."""
        return [] if self._transfers is None else self._transfers.landed()

    @property
    def next_landing(self) -> float | None:
        """The time at which the next transfer finishes; None if no transfer is in flight."""
        return None if self._transfers is None else self._transfers.next_landing

    def run(self, plan: StepPlan) -> StepResult:
        known, self._checksums = self._checksums, {}
        tokens: dict[int, int] = {}
        scores: dict[int, TokenScores] = {}
        for sequence in plan.sequences:
            if (sample := sequence.sample) is not None:
                if (before := known.get(sample.job_id)) is None:
                    before = 0, self._first_checksum(sample.sampling)
                length, checksum = before
                new = memoryview(sample.context_ids)[length:]  # type: ignore[arg-type]
                checksum = zlib.crc32(new, checksum)
                self._checksums[sample.job_id] = (len(sample.context_ids), checksum)
                tokens[sample.job_id] = token_after(checksum)
                if (num_top := sample.sampling.logprobs) is not None:
                    scores[sample.job_id] = _scores(tokens[sample.job_id], num_top)
        return StepResult(tokens, {}, scores=scores)

    def _first_checksum(self, sampling: SamplingConfig) -> int:
        is_random = self._instance.samples and sampling.temperature and sampling.seed is None
        return random.getrandbits(32) if is_random else 0

    def run_on(self, plan: StepPlan, num_steps: int) -> dict[int, list[int]]:
        """The tokens of each job in `num_steps` steps that start with `plan`.

        All sequences of `plan` must sample."""
        tokens = {job_id: [token] for job_id, token in self.run(plan).tokens.items()}
        for job_id, made in tokens.items():
            length, checksum = self._checksums[job_id]
            for _ in range(num_steps - 1):
                checksum = zlib.crc32(_AS_BYTES[made[-1]], checksum)
                made.append(_LETTERS[checksum % len(_LETTERS)])  # `token_after`, inlined.
            self._checksums[job_id] = (length + num_steps - 1, checksum)
        return tokens

    def cost(self, plan: StepPlan) -> float:
        """The time of a step, in seconds (see `SimInstance`)."""
        costs, sequences = self._instance, plan.sequences
        prompts = [s for s in sequences if len(s.token_ids) > 1]
        (decode_s,) = self.costs(plan, 1)
        if not prompts:
            return decode_s
        return (
            decode_s
            + costs.prefill_token_s * sum(len(s.token_ids) for s in prompts)
            + costs.prefill_pair_s * sum(len(s.token_ids) * (s.start + s.end) / 2 for s in prompts)
        )

    def costs(self, plan: StepPlan, num_steps: int) -> list[float]:
        """The times, in seconds, of `num_steps` decode steps that start with `plan`."""
        count, num_read = len(plan.sequences), self._num_read(plan.sequences)
        first_s = self._instance.step_s + self._instance.sequence_s * count
        token_s = self._instance.context_token_s
        return [first_s + token_s * (num_read + n * count) for n in range(num_steps)]

    def _num_read(self, sequences: Sequence[SequenceStep]) -> int:
        if self._instance.shared_prefix:
            return self._unique_kv.count(sequences)
        return sum(s.end for s in sequences)


class SimService(RunnerService):
    """The service of a sim engine. Create it while an event loop runs.

    Several services on one virtual clock simulate a cluster in one process, faster than real time
    (`parrot.simulation`). `leaps`: see `SimDriver`."""

    def __init__(
        self, config: SimConfig, clock: Clock | None = None, *, leaps: bool = False
    ) -> None:
        clock = clock or MonotonicClock()
        runner = SimRunner(config.instance, clock)
        sampling = config.default_sampling.over(NEUTRAL_SAMPLING)
        language = Language.of(byte_tokenizer_response(), default_sampling=sampling)
        core = EngineCore(config, runner, language, clock)
        self._sim_driver = SimDriver(core, clock, runner, leaps=leaps)
        super().__init__(config, self._sim_driver, warm_up=False)

    def slow_down(self, factor: float) -> None:
        """Multiply the time of each step by `factor`, from the next step on."""
        self._sim_driver.slow_down(factor)

    def runtime_info(self, told: Mapping[int, int] | None = None) -> RuntimeInfo:
        """Also interrupts a leap, so that the next call sees the steps that have finished."""
        self._sim_driver.interrupt()
        info = super().runtime_info(told)
        if info.costs is None:  # The service has not started yet.
            return info
        slowdown = self._sim_driver.slowdown
        costs = {name: slowdown * cost for name, cost in info.costs.model_dump().items()}
        return info.model_copy(update={"costs": StepCosts(**costs)})


class SimDriver:
    """Runs the core on the event loop. A step takes the runner's cost times `slowdown`.

    With `leaps`, steps whose result is certain run as one leap. Answers have the same times and
    tokens; only `runtime_info` may be older. The clock must be the event loop's time."""

    is_lost = False

    def __init__(
        self, core: EngineCore, clock: Clock, runner: SimRunner, *, leaps: bool = False
    ) -> None:
        self._core = core
        self._clock = clock
        self._runner = runner
        self._leaps = leaps
        self.slowdown = 1.0
        self._inbox: deque[Verb] = deque()
        self._wake = asyncio.Event()
        self._interrupted = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._busy_until = 0.0

    async def start(self) -> EngineCore:
        self._task = asyncio.get_running_loop().create_task(self._run(), name="engine-core")
        return self._core

    def post(self, verb: Verb) -> None:
        self._inbox.append(verb)
        self._wake.set()
        self.interrupt()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        apply_verbs(self._inbox, self._core)
        self._core.fail_everything(Unavailable("the engine is shutting down"))
        deliver(self._core.requests.outbox.take())

    def slow_down(self, factor: float) -> None:
        """Multiply the time of each step by `factor`, from the next step on."""
        self.slowdown = factor
        self.interrupt()

    def interrupt(self) -> None:
        """End a leap after its current step."""
        self._interrupted.set()

    async def _run(self) -> None:
        while True:
            try:
                await self._turn()
            except Exception:
                logger.exception("the engine core failed; all its requests fail")
                self._core.fail_everything(EngineFailed("internal error of the engine"))
                deliver(self._core.requests.outbox.take())

    async def _turn(self) -> None:
        core = self._core
        may_leap = self._leaps and not self._inbox and core.has_work
        num_steps = core.max_multi_steps(LETTER_IDS) if may_leap else 0
        apply_verbs(self._inbox, core)
        step = core.plan() if core.has_work else None
        if step is not None and num_steps > 1:
            await self._leap(step, num_steps)
        elif step is not None:
            result = core.run(step)
            await self._spend(self.slowdown * self._runner.cost(step.plan))
            core.deliver(step, result)
        deliver(core.requests.outbox.take())
        if step is None and not self._inbox:
            self._wake.clear()
            await self._rest()
            self._busy_until = self._clock.now()

    async def _rest(self) -> None:
        """Wait for a verb, or until a transfer between the tiers finishes."""
        landing = self._runner.next_landing
        if landing is None:
            await self._wake.wait()
            return
        delay = max(0.0, landing - self._clock.now())
        waits = [asyncio.ensure_future(w) for w in (self._clock.sleep(delay), self._wake.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def _spend(self, seconds: float) -> None:
        """Sleep for the time of a step. The next steps make up for an overlong sleep."""
        now = self._clock.now()
        self._busy_until = max(self._busy_until, now - _MAX_CATCH_UP_S) + seconds
        if (delay := self._busy_until - now) > 0:
            await self._clock.sleep(delay)
        else:
            await asyncio.sleep(0)

    async def _leap(self, step: Step, num_steps: int) -> None:
        seconds = [self.slowdown * cost for cost in self._runner.costs(step.plan, num_steps)]
        done = seconds[: await self._spend_until_called(seconds)]
        self._core.deliver_multi_step(step, self._runner.run_on(step.plan, len(done)), done)

    async def _spend_until_called(self, seconds: Sequence[float]) -> int:
        """Sleep for the time of several steps, or until the end of a step that is interrupted.

        Returns the number of steps that have finished."""
        first = max(self._busy_until, self._clock.now())
        ends = list(accumulate(seconds, initial=first))[1:]
        await self._nap(ends[-1])
        num_done = min(bisect_left(ends, self._clock.now()) + 1, len(ends))
        self._busy_until = ends[num_done - 1]
        if (delay := self._busy_until - self._clock.now()) > 0:
            await self._clock.sleep(delay)
        return num_done

    async def _nap(self, until: float) -> None:
        self._interrupted.clear()
        timer = asyncio.get_running_loop().call_at(until, self.interrupt)
        try:
            await self._interrupted.wait()
        finally:
            timer.cancel()


class SimTransfers:
    """Simulated transfers. Each direction runs one transfer at a time.

    A transfer takes `block_s` seconds per block."""

    def __init__(self, block_s: float, clock: Clock) -> None:
        self._block_s = block_s
        self._clock = clock
        self._lanes: dict[bool, deque[tuple[float, Landed]]] = {True: deque(), False: deque()}
        self._busy_until = {True: 0.0, False: 0.0}

    def begin(self, transfers: Sequence[Transfer]) -> None:
        now = self._clock.now()
        for transfer in transfers:
            way, seconds = transfer.to_host, len(transfer.blocks) * self._block_s
            end = self._busy_until[way] = max(now, self._busy_until[way]) + seconds
            self._lanes[way].append((end, Landed(transfer.transfer_id, True, seconds)))

    @property
    def next_landing(self) -> float | None:
        """The time at which the next transfer finishes; None if no transfer is in flight."""
        return min((lane[0][0] for lane in self._lanes.values() if lane), default=None)

    def landed(self) -> list[Landed]:
        """The transfers that have finished and were not returned before."""
        now, landed = self._clock.now(), []
        for lane in self._lanes.values():
            while lane and lane[0][0] <= now + _ROUNDING_S:
                landed.append(lane.popleft()[1])
        return landed


UNKNOWN_ID, BOS_ID, EOS_ID = 256, 257, 258


def byte_tokenizer() -> Tokenizer:
    vocab = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<unk>", "<bos>", "<eos>"]
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in special])
    return tokenizer


def byte_tokenizer_response() -> TokenizerResponse:
    return TokenizerResponse(
        tokenizer_json=byte_tokenizer().to_str(),
        chat_template=_CHAT_TEMPLATE,
        special_ids=SpecialIds(bos=BOS_ID, eos=[EOS_ID], add_bos=False),
        vocab_size=VOCAB_SIZE,
    )
