"""Running a step so that a sequence that breaks it costs the others nothing.

A runner's defect ends here: everything raises `DeviceLost`, and nothing else."""

import logging
from collections.abc import Sequence

from parrot.engine.core.plan import (
    DeviceLost,
    Landed,
    LaunchedStep,
    OverlappingRunner,
    Runner,
    RunnerInfo,
    StepPlan,
    StepResult,
    TieredRunner,
    Transfer,
    without_drafts,
)
from parrot.protocol.errors import EngineFailed, ParrotError

logger = logging.getLogger(__name__)


class IsolatingRunner:
    """Runs a step; if it fails, each of its sequences alone."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._overlapping = runner if isinstance(runner, OverlappingRunner) else None
        self._tiered = runner if isinstance(runner, TieredRunner) else None
        self._not_begun: list[Landed] = []

    @property
    def info(self) -> RunnerInfo:
        return self._runner.info

    @property
    def has_host_tier(self) -> bool:
        return self._tiered is not None and self.info.num_host_blocks > 0

    def transfer(self, transfers: Sequence[Transfer]) -> None:
        """See `TieredRunner`. If they cannot be begun they have landed, in vain."""
        assert self._tiered is not None, "there is no host tier"
        try:
            self._tiered.transfer(transfers)
        except DeviceLost:
            raise
        except Exception:
            logger.exception("%d transfers could not be begun", len(transfers))
            self._not_begun += [Landed(t.transfer_id, False, 0.0) for t in transfers]

    def landed(self, *, wait: bool) -> Sequence[Landed]:
        """See `TieredRunner`."""
        assert self._tiered is not None, "there is no host tier"
        failed, self._not_begun = self._not_begun, []
        return [*failed, *self._tiered.landed(wait=wait and not failed)]

    def launch(self, plan: StepPlan, previous: LaunchedStep | None) -> LaunchedStep | None:
        """See `OverlappingRunner`; None also if it fails, or if the runner cannot launch steps."""
        if self._overlapping is None:
            return None
        try:
            return self._overlapping.launch(plan, previous)
        except DeviceLost:
            raise
        except Exception:
            logger.exception("a step of %d sequences could not be launched", len(plan.sequences))
            return None

    def wait(self, launched: LaunchedStep) -> StepResult | None:
        """Wait for a launched step; None if it has failed."""
        try:
            return launched.wait()
        except DeviceLost:
            raise
        except Exception:
            logger.exception("a launched step failed")
            return None

    def run(self, plan: StepPlan) -> StepResult:
        try:
            return self._runner.run(plan)
        except DeviceLost:
            raise
        except Exception:
            logger.exception("a step of %d sequences failed", len(plan.sequences))
            return self._run_one_by_one(plan)

    def _run_one_by_one(self, plan: StepPlan) -> StepResult:
        """The copies come again, which does no harm: nobody has written over their sources. No
        sequence is to fail for a draft that may be wrong, so drafts are left out."""
        outcome = StepResult({}, {}, {})
        copies = plan.copies
        block_size = self._runner.info.block_size
        for sequence in plan.sequences:
            sequence = without_drafts(sequence, block_size)
            try:
                result = self._runner.run(StepPlan((sequence,), copies))
            except DeviceLost:
                raise
            except ParrotError as error:
                outcome.broken[sequence.context_id] = error
            except Exception:
                logger.exception("context %d cannot be run", sequence.context_id)
                failed = EngineFailed("the engine could not run this request")
                outcome.broken[sequence.context_id] = failed
            else:
                copies = ()
                outcome.tokens.update(result.tokens)
                outcome.errors.update(result.errors)
                outcome.scores.update(result.scores)
                outcome.read.update(result.read)
        return outcome
