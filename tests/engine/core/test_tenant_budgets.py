"""Limits on the step time of a tenant with many jobs. In these tests, the crowd is a tenant with
100 jobs, and the chat is a tenant with one job."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parrot.engine.core.shares import TenantShare
from parrot.engine.core.steps import StepPlan
from parrot.protocol.engine_api import StepCosts
from tests.support.answer import Answer
from tests.support.core_harness import Harness, piece
from tests.support.examples import examples

COSTS = StepCosts()  # Default costs, before the engine has measured a step.
CHAT = TenantShare("b", step_growth=0.25)
CROWD = TenantShare("a", step_growth=0.25)
CHAT_ID = 1000


def big(**config: Any) -> Harness:
    return Harness(num_blocks=2000, max_seq_len=1500, **config)


def start_crowd(engine: Harness, count: int = 100, **options: Any) -> list[Answer]:
    options = {"length": 40, "share": CROWD} | options
    return [engine.generate(piece(n, f"c{n}"), **options) for n in range(count)]


def seconds(plan: StepPlan) -> float:
    """The step's time by the default costs."""
    prompt = sum(len(s.token_ids) for s in plan.sequences if len(s.token_ids) > 1)
    read = sum(s.end for s in plan.sequences)
    return COSTS.decode_step_s(len(plan.sequences), read) + prompt * COSTS.prefill_s


def alone_s(plan: StepPlan) -> float:
    own = [s for s in plan.sequences if s.context_id >= CHAT_ID]
    return COSTS.decode_step_s(len(own), sum(s.end for s in own))


def chat_steps(engine: Harness, chat: Answer) -> list[StepPlan]:
    """The steps of the chat, from its first token to its end."""
    plans = []
    while not chat.has_ended:
        engine.step()
        plans.append(engine.last_plan)
        assert any(s.context_id == CHAT_ID for s in plans[-1].sequences)
    return plans[1:]


def test_a_crowd_lengthens_a_chats_steps_by_its_allowed_growth() -> None:
    engine = big()
    crowd = start_crowd(engine)
    for _ in range(3):
        engine.step()
    assert len(engine.last_plan.sequences) == 100
    chat = engine.generate(piece(CHAT_ID, "hello"), length=20, share=CHAT)
    plans = chat_steps(engine, chat)
    growth = [seconds(plan) / alone_s(plan) - 1 for plan in plans]
    assert 0.2 < sum(growth) / len(growth) <= 0.25 + 0.02
    engine.run()
    assert all(answer.text for answer in crowd)


def test_prompts_of_a_crowd_are_computed_in_small_chunks() -> None:
    engine = big()
    chat = engine.generate(piece(CHAT_ID, "hello"), length=40, share=CHAT)
    engine.step()
    for n in range(40):
        engine.generate(piece(n, f"{n:<100}"), length=2, share=CROWD)
    plans = chat_steps(engine, chat)
    assert sum(seconds(p) / alone_s(p) - 1 for p in plans) / len(plans) <= 0.25 + 0.02
    assert sum(len(s.token_ids) for p in plans for s in p.sequences) > 20 * len(plans)


@pytest.mark.parametrize(
    ("chat", "crowd", "count"),
    [
        (TenantShare("b"), CROWD, 100),  # The chat sets no limit.
        (CHAT, CHAT, 100),  # Both belong to the same tenant.
        (CHAT, CROWD, 10),  # There are too few jobs.
        (CHAT, TenantShare("a", weight=100.0), 100),  # The crowd's tenant has a large weight.
    ],
)
def test_no_tenant_is_limited_without_need(
    chat: TenantShare, crowd: TenantShare, count: int
) -> None:
    engine = big()
    start_crowd(engine, count, share=crowd)
    engine.step()
    answer = engine.generate(piece(CHAT_ID, "hello"), length=20, share=chat)
    assert all(len(plan.sequences) == count + 1 for plan in chat_steps(engine, answer))


def test_a_returning_chat_finds_short_steps_for_ten_seconds() -> None:
    engine = big()
    engine.generate(piece(CHAT_ID, "hello"), length=2, share=TenantShare("b", step_growth=0.1))
    engine.run()
    start_crowd(engine, length=400)
    growth = []
    for _ in range(30):
        engine.step()
        growth.append(seconds(engine.last_plan) / COSTS.step_s - 1)
    assert 0.2 < sum(growth[10:]) / len(growth[10:]) <= 3 * 0.1 + 0.02
    engine.clock._now += 60
    for _ in range(4):
        engine.step()
    assert len(engine.last_plan.sequences) == 100


def test_a_chat_limits_a_crowd_after_its_call_has_ended() -> None:
    """The limit holds for 10 s after the last step of the chat's call."""
    engine = big()
    start_crowd(engine, length=400)
    engine.step()
    share = TenantShare("b", step_growth=0.1)
    chat = engine.generate(piece(CHAT_ID, "hello"), length=4, share=share)
    engine.clock._now += 60
    while not chat.has_ended:
        engine.step()
    engine.clock._now += 9

    def sizes() -> list[int]:
        plans = []
        for _ in range(10):
            engine.step()
            plans.append(engine.last_plan)
        return [len(plan.sequences) for plan in plans]

    assert max(sizes()) < 100
    engine.clock._now += 2
    assert sizes()[-1] == 100


def test_a_returning_chat_finds_no_step_full_of_a_crowds_prompts() -> None:
    limits = {"max_num_batched_tokens": 4096, "mixed_fill_tokens": 4096}
    engine = Harness(num_blocks=4000, max_seq_len=1500, scheduler=limits)
    engine.generate(piece(CHAT_ID, "hello"), length=2, share=CHAT)
    engine.run()

    def largest_prompt_step(count: int, first: int) -> int:
        """The prompt tokens of the largest step."""
        for n in range(first, first + count):
            engine.generate(piece(n, f"{n:<1000}"), length=2, share=CROWD)
        sizes = []
        for _ in range(8):
            engine.step()
            sizes.append(sum(len(s.token_ids) for s in engine.last_plan.sequences))
        engine.run()
        return max(sizes)

    engine.clock._now += 60
    assert 1000 <= largest_prompt_step(30, 0) <= 1024 + 30
    assert largest_prompt_step(10, 100) > 2000  # Ten jobs are not limited.
    engine.clock._now += 600
    assert largest_prompt_step(30, 200) > 2000


def test_the_last_prompt_token_of_a_crowds_budget_is_used_once() -> None:
    limits = {"max_num_batched_tokens": 4096, "mixed_fill_tokens": 4096}
    engine = Harness(num_blocks=4000, max_seq_len=1500, scheduler=limits)
    engine.generate(piece(CHAT_ID, "hello"), length=2, share=CHAT)
    engine.run()
    engine.clock._now += 60
    for n in range(30):
        engine.generate(piece(n, f"{n:<1023}"), length=2, share=CROWD)
    engine.step()
    sizes = [len(s.token_ids) for s in engine.last_plan.sequences]
    assert sizes == [1023, 1]


def test_later_steps_pay_for_a_long_context_of_a_crowd() -> None:
    """A step with the long context costs more than the limit, so the long context skips some
    steps."""
    engine = Harness(num_blocks=2000, max_seq_len=4000, scheduler={"max_num_batched_tokens": 4096})
    first = engine.generate(piece(0, "x" * 3500), length=400, share=CROWD)
    for n in range(1, 20):
        engine.generate(piece(n, "y"), length=400, share=CROWD)
    for _ in range(3):
        engine.step()
    share = TenantShare("b", step_growth=0.01)
    chat = engine.generate(piece(CHAT_ID, "hello"), length=100, share=share)
    plans = chat_steps(engine, chat)
    number = sum(any(s.context_id == 0 for s in p.sequences) for p in plans)
    assert 0 < number < len(plans) / 2
    assert sum(seconds(p) / alone_s(p) - 1 for p in plans) / len(plans) < 0.02
    assert not first.has_ended


JOB = st.tuples(
    st.integers(0, 3),  # Tenant.
    st.integers(1, 40),  # Length of the prompt.
    st.integers(1, 12),  # Length of the output.
    st.integers(-1, 1),  # Priority.
    st.integers(0, 3),  # Steps before the next job.
)


@settings(max_examples=examples(12), deadline=None)
@given(st.lists(JOB, min_size=30, max_size=90), st.integers(60, 200))
def test_limits_do_not_change_outputs(
    jobs: list[tuple[int, int, int, int, int]], num_blocks: int
) -> None:
    engine = Harness(num_blocks=num_blocks, scheduler={"max_batch_size": 64})
    answers = []
    for n, (tenant, prompt, output, priority, num_steps) in enumerate(jobs):
        tenant = 0 if n % 4 else tenant
        share = TenantShare(f"t{tenant}", 1.0 + tenant, 0.0 if tenant == 3 else 0.1)
        text = "abc"[n % 3] * prompt
        options = {"length": output, "priority": priority, "share": share}
        answers.append((text, output, engine.generate(piece(n, text), **options)))
        for _ in range(num_steps):
            engine.step()
            engine.clock._now += 0.5
    engine.run(20_000)
    for text, output, answer in answers:
        first = ord(text[-1]) - 96
        assert answer.text == "".join(chr(97 + (first + i) % 26) for i in range(output))
