"""The sim engine in virtual time, through its service."""

import asyncio

import pytest

from parrot.engine.config import SimConfig
from parrot.engine.service import EngineService, RunnerService, ServiceState
from parrot.engine.sim import BOS_ID, EOS_ID, VOCAB_SIZE, SimService, byte_tokenizer
from parrot.protocol.engine_api import (
    EngineType,
    FillPiece,
    FillRequest,
    FinishReason,
    GenerateRequest,
    GenerateResponse,
)
from parrot.protocol.errors import (
    Cancelled,
    InvalidRequest,
    NotFound,
    Unavailable,
    UnsupportedField,
)
from parrot.protocol.sampling import Logprobs
from tests.support.manual_clock import ManualClock

ZERO = {"step_s": 0.0, "prefill_token_s": 0.0, "sequence_s": 0.0, "context_token_s": 0.0}


def request(context_id: int, text: str = "", **fields) -> GenerateRequest:
    sampling = {"max_gen_length": fields.pop("length", 4), **fields.pop("sampling", {})}
    fill = {"context_id": context_id, "token_ids": list(text.encode())}
    parent = {key: fields.pop(key) for key in ("parent_context_id", "parent_len") if key in fields}
    return GenerateRequest.model_validate(
        {
            "context_id": context_id,
            "fills": [fill | parent] if text else [],
            "sampling_config": sampling,
            **({} if text else parent),
            **fields,
        }
    )


@pytest.fixture
async def engine():
    service = SimService(SimConfig(instance=ZERO))
    await service.start()
    yield service
    service.check_integrity()
    await service.close()


@pytest.fixture
async def timed():
    clock = ManualClock()
    costs = {"step_s": 1.0, "prefill_token_s": 0.1, "sequence_s": 0.01, "context_token_s": 0.0}
    service = SimService(SimConfig(instance=costs), clock)
    await service.start()
    yield service, clock
    await service.close()


def test_the_sim_service_is_a_runner_service():
    service: EngineService = SimService(SimConfig())
    assert isinstance(service, RunnerService)
    assert service.state() is not ServiceState.READY


def test_the_byte_tokenizer_round_trips_every_byte():
    tokenizer = byte_tokenizer()
    text = "".join(chr(c) for c in range(1, 0x250)) + "日本😀"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    assert tokenizer.token_to_id("<eos>") == EOS_ID
    assert tokenizer.token_to_id("<bos>") == BOS_ID


async def test_the_same_context_gives_the_same_text_of_exact_length(engine):
    first = await engine.generate(request(1, "hello", length=20))
    other = await engine.generate(request(2, "hullo", length=20))
    await engine.fill(FillRequest(context_id=3, token_ids=list(b"he")))
    again = await engine.generate(request(3, "llo", length=20))
    assert len(first.generated_ids) == len(first.generated_text) == 20
    assert first.finish_reason is FinishReason.LENGTH
    assert again.generated_text == first.generated_text
    assert other.generated_text != first.generated_text


async def test_outputs_end_at_stop_strings(engine):
    whole = (await engine.generate(request(1, "hello", length=60))).generated_text
    stop = whole[20:23]
    cut = await engine.generate(request(2, "hello", length=60, sampling={"stop_str": stop}))
    assert cut.generated_text == whole[: whole.index(stop)]
    assert cut.finish_reason is FinishReason.STOP


async def test_steps_take_the_configured_time(timed):
    service, clock = timed
    running = asyncio.ensure_future(service.generate(request(1, "x" * 10, length=3)))
    await clock.advance(2.01)  # The time is 1 + 10 * 0.1 + 0.01 s.
    assert service.runtime_info().num_steps == 1
    await clock.advance(1.0)
    assert not running.done()
    await clock.advance(1.03)
    usage = (await running).usage
    assert usage.queue_s == pytest.approx(0.0)
    assert usage.prefill_s == pytest.approx(2.01)
    assert usage.decode_s == pytest.approx(2.02)


async def test_a_batch_shares_its_steps(timed):
    service, clock = timed
    both = [asyncio.ensure_future(service.generate(request(i, "x", length=5))) for i in (1, 2)]
    await clock.advance(1.2 + 0.02 + 4 * 1.02 + 0.01)
    assert all(task.done() for task in both)


async def test_a_cancelled_call_aborts_within_a_step(timed):
    service, clock = timed
    task = asyncio.ensure_future(service.generate(request(1, "hello", length=1000)))
    await clock.advance(5.0)
    assert service.runtime_info().num_total_jobs == 1
    task.cancel()
    await clock.advance(1.1)
    assert service.runtime_info().num_total_jobs == 0
    assert task.cancelled()
    freed = asyncio.ensure_future(service.free_contexts([1]))
    await clock.advance(0.1)
    assert await freed > 5
    info = service.runtime_info()
    assert info.num_free_blocks == info.num_max_blocks


async def test_freeing_a_context_ends_its_jobs(timed):
    service, clock = timed
    task = asyncio.ensure_future(service.generate(request(1, "hello", length=1000)))
    await clock.advance(5.0)
    freed = asyncio.ensure_future(service.free_contexts([1, 2]))
    await clock.advance(1.1)
    assert await freed >= 5
    with pytest.raises(Cancelled):
        await task


async def test_streams_end_with_the_whole_answer(engine):
    events = [event async for event in engine.generate_stream(request(1, "hello", length=9))]
    *chunks, whole = events
    assert isinstance(whole, GenerateResponse)
    assert "".join(chunk.text for chunk in chunks) == whole.generated_text
    assert [i for chunk in chunks for i in chunk.ids] == whole.generated_ids
    assert len(chunks) == 9


async def test_log_probabilities_belong_to_the_tokens_of_their_chunk(engine):
    wanted = request(1, "hello", length=9, sampling={"logprobs": 2})
    *chunks, whole = [event async for event in engine.generate_stream(wanted)]
    assert list(whole.logprobs.ids[::3]) == whole.generated_ids
    assert all(list(chunk.logprobs.ids[::3]) == chunk.ids for chunk in chunks)
    joined = Logprobs(3)
    for chunk in chunks:
        joined.extend(chunk.logprobs)
    assert joined == whole.logprobs
    assert (await engine.generate(request(2, "hello", length=9))).logprobs is None


async def test_closing_a_stream_aborts_the_request(timed):
    service, clock = timed
    stream = service.generate_stream(request(1, "hello", length=1000))
    first = asyncio.ensure_future(anext(stream))
    await clock.advance(3.0)
    assert (await first).text
    await stream.aclose()
    await clock.advance(1.1)
    assert service.runtime_info().num_total_jobs == 0


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"n": 2}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"length_penalty": 0.5}, "length_penalty"),
        ({"json_schema": {"type": "object"}}, "json_schema"),
        ({"regex": "a+"}, "regex"),
    ],
)
async def test_unsupported_fields_are_refused_by_name(engine, fields, name):
    with pytest.raises(UnsupportedField, match=name) as error:
        await engine.generate(request(1, "x", sampling=fields))
    assert error.value.param == name
    with pytest.raises(UnsupportedField, match="the sim engine"):
        await anext(engine.generate_stream(request(1, "x", sampling=fields)))


async def test_fills_need_tokens_or_text(engine):
    with pytest.raises(InvalidRequest, match="token_ids"):
        await engine.fill(FillRequest(context_id=1))
    with pytest.raises(InvalidRequest, match="token_ids"):
        await engine.fill(FillRequest(context_id=1, token_ids=[1], text="a"))
    answer = await engine.fill(FillRequest(context_id=1, text="héllo"))
    assert answer.filled_len == 6


async def test_consecutive_fills_are_merged_and_forks_continue_them(engine):
    wanted = GenerateRequest(
        context_id=2,
        fills=[
            FillPiece(context_id=1, token_ids=[97]),
            FillPiece(context_id=1, token_ids=[98]),
            FillPiece(context_id=2, token_ids=[99], parent_context_id=1),
        ],
        sampling_config={"max_gen_length": 3},
    )
    first = await engine.generate(wanted)
    assert first.usage.computed_tokens == 3
    again = await engine.generate(request(3, "abc", length=3))
    assert again.generated_text == first.generated_text
    assert engine.runtime_info().num_steps == 2 + 2 + 3


async def test_unknown_parents_are_refused(engine):
    with pytest.raises(NotFound, match="context 5"):
        await engine.generate(request(1, "x", parent_context_id=5))


async def test_the_registered_engine_info(engine):
    info = engine.engine_info()
    assert info.engine_type is EngineType.SIM
    assert (info.engine_name, info.model) == ("sim:9001", "sim")
    assert info.tokens_capacity == 8192 * 16
    assert info.max_seq_len == 32768
    assert info.tokenizer_id is not None
    assert engine.tokenizer().vocab_size == VOCAB_SIZE


async def test_ids_can_be_used_again_after_a_reset(engine):
    await engine.generate(request(1, "hello"))
    await engine.reset()
    answer = await engine.generate(request(1, "hello"))
    assert answer.usage.computed_tokens == 5


async def test_closing_fails_unfinished_requests(timed):
    service, clock = timed
    task = asyncio.ensure_future(service.generate(request(1, "hello", length=1000)))
    await clock.advance(5.0)
    await service.close()
    with pytest.raises(Unavailable):
        await task
    with pytest.raises(Unavailable, match="shutting down"):
        await service.generate(request(2, "x"))
    await service.close()


async def test_before_its_start_the_service_is_loading():
    service = SimService(SimConfig())
    with pytest.raises(Unavailable, match="loading"):
        await service.fill(FillRequest(context_id=1, token_ids=[1]))
    assert service.runtime_info().num_max_blocks == 0
    await service.close()


async def test_only_sampled_outputs_without_a_seed_differ() -> None:
    service = SimService(SimConfig(instance=ZERO | {"samples": True}))
    await service.start()

    async def text(context_id: int, **sampling: float) -> str:
        fields = {"length": 30, "sampling": sampling}
        return (await service.generate(request(context_id, "Say", **fields))).generated_text

    greedy = [await text(number, temperature=0.0) for number in range(3)]
    seeded = [await text(10 + number, temperature=1.0, seed=7) for number in range(3)]
    sampled = [await text(20 + number, temperature=1.0) for number in range(3)]
    assert [len(set(texts)) for texts in (greedy, seeded, sampled)] == [1, 1, 3]
    await service.close()
