"""The engine client's fast encoding gives the same payload as pydantic."""

from contextlib import suppress

import pytest

from parrot.protocol.engine_api import DraftSources, FillPiece, FillRequest, GenerateRequest
from parrot.protocol.engine_client import EngineClient
from parrot.protocol.errors import InternalError
from parrot.protocol.http import HttpClient
from parrot.protocol.sampling import SamplingConfig


class Recorder(HttpClient):
    def __init__(self) -> None:
        super().__init__("http://nowhere")
        self.body: object = None

    async def request(self, method: str, path: str, **kwargs: object) -> object:  # type: ignore[override]
        self.body = kwargs["body"]
        return {"generated_text": "", "generated_ids": [], "finish_reason": "stop", "usage": {}}


@pytest.mark.parametrize(
    "request_",
    [
        GenerateRequest(context_id=3),
        GenerateRequest(
            session_id=4,
            task_id=5,
            priority=-6,
            cache_salt="t",
            tenant="u",
            weight=2.0,
            step_growth=0.5,
            context_id=7,
            parent_context_id=2,
            parent_len=9,
            end_flag=True,
            fills=[
                FillPiece(context_id=2, token_ids=[1, 2, 3], public_len=2),
                FillPiece(context_id=7, parent_context_id=2, parent_len=0, text="hello"),
            ],
            sampling_config=SamplingConfig(temperature=0.0, stop_str="x", logit_bias={5: 1.0}),
            resumed_ids=[8, 9],
            drafts=DraftSources(texts=([1, 2], [3]), in_context=False),
        ),
    ],
)
async def test_the_body_means_the_request(request_: GenerateRequest) -> None:
    http = Recorder()
    await EngineClient(http).generate(request_)
    assert GenerateRequest.model_validate(http.body) == request_


def test_every_field_is_sent() -> None:
    """A field added to the payload must be added to the client as well. A client's key is for
    engines of the same process only."""
    assert set(GenerateRequest.model_fields) - {"client_key"} == {
        *("session_id", "task_id", "attempt", "priority"),
        *("context_id", "parent_context_id", "parent_len"),
        *("cache_salt", "end_flag", "fills", "sampling_config", "resumed_ids"),
        *("tenant", "weight", "step_growth"),
        *("drafts", "traceparent", "request_id", "channel", "conversation"),
    }
    piece = {"context_id", "parent_context_id", "parent_len", "token_ids", "text", "public_len"}
    assert set(FillPiece.model_fields) == piece
    assert set(FillRequest.model_fields) - piece - {"client_key"} == {
        *("session_id", "task_id", "attempt", "priority", "cache_salt", "end_flag", "traceparent"),
        *("background", "background_share", "tenant", "weight", "step_growth", "request_id"),
    }


async def test_the_body_means_the_fill() -> None:
    request = FillRequest(context_id=7, token_ids=[1], background=True, background_share=0.1)
    http = Recorder()
    with suppress(InternalError):  # The recorder's answer is not valid for a fill.
        await EngineClient(http).fill(request)
    assert FillRequest.model_validate(http.body) == request
