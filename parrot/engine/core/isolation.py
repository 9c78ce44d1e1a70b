"""Running a step so that a sequence that breaks it costs the others nothing."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from parrot.engine.core.plan import DeviceLost, Runner, StepPlan, StepResult
from parrot.protocol.errors import EngineFailed, ParrotError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """A `StepResult`, and why sequences (by index) could not be run at all."""

    result: StepResult
    broken: Mapping[int, ParrotError] = field(default_factory=dict)


def run_isolated(runner: Runner, plan: StepPlan) -> StepOutcome:
    """Run the step; if it fails, each of its sequences alone. Raises `DeviceLost`, and nothing
    else."""
    try:
        return StepOutcome(runner.run(plan))
    except DeviceLost:
        raise
    except Exception:
        logger.exception("a step of %d sequences failed", len(plan.sequences))
        return _run_one_by_one(runner, plan)


def _run_one_by_one(runner: Runner, plan: StepPlan) -> StepOutcome:
    """The copies come first again, which does no harm: nobody has written over their sources."""
    tokens: dict[int, int] = {}
    errors: dict[int, ParrotError] = {}
    broken: dict[int, ParrotError] = {}
    copies = plan.copies
    for index, sequence in enumerate(plan.sequences):
        try:
            result = runner.run(StepPlan((sequence,), copies))
        except DeviceLost:
            raise
        except ParrotError as error:
            broken[index] = error
        except Exception:
            logger.exception("context %d cannot be run", sequence.context_id)
            broken[index] = EngineFailed("the engine could not run this request")
        else:
            copies = ()
            tokens |= result.tokens
            errors |= result.errors
    return StepOutcome(StepResult(tokens, errors), broken)
