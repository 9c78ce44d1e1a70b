"""Answers with long lists are encoded in several steps, with the same result."""

import asyncio

from parrot.protocol.answers import has_long_list, json_bytes, json_in_turns
from parrot.protocol.engine_api import FinishReason, GenerateResponse, Usage
from parrot.protocol.public import VarInfo, VarListResponse
from parrot.protocol.sampling import Logprobs


def listed(count: int) -> VarListResponse:
    rows = [
        VarInfo(
            var_id=f"v{i}", var_name="é\n", state="ready", producer=None, consumers=[i], error=None
        )
        for i in range(count)
    ]
    return VarListResponse(vars=rows)


async def test_the_result_is_the_same_and_other_tasks_run_meanwhile() -> None:
    for count in (0, 1, 4096, 4097, 10_000):
        answer = listed(count)
        assert await json_in_turns(answer) == json_bytes(answer)
    assert has_long_list(listed(4097))
    assert not has_long_list(listed(4096))
    encoding = asyncio.ensure_future(json_in_turns(listed(10_000)))
    turns = 0
    while not encoding.done():
        turns += 1
        await asyncio.sleep(0)
    assert turns >= 3


async def test_a_field_next_to_a_long_list_is_serialized_by_its_model() -> None:
    ids = list(range(5000))
    answer = GenerateResponse(
        generated_text="é",
        generated_ids=ids,
        finish_reason=FinishReason.LENGTH,
        usage=Usage(),
        logprobs=Logprobs(1, ids, [-0.5] * len(ids)),
    )
    assert has_long_list(answer)
    assert await json_in_turns(answer) == json_bytes(answer)
