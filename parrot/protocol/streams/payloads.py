"""Streams of an engine that outlive, or stand beside, the request that an output is made for."""

from pydantic import Field

from parrot.protocol.engine_api import ContextId, InternalPayload, StreamChunk


class FollowRequest(InternalPayload):
    """Ask for the output that a /generate makes on this context, from its first token on. It is
    waited for if it has not begun."""

    context_id: ContextId


class FollowResponse(InternalPayload):
    """The output has ended; the answer of /generate says how."""


class ChannelRequest(InternalPayload):
    """Open a channel, on which the pieces of all outputs come whose requests name it: one stream
    and, for a step of the engine, one event, however many outputs there are. Its first event is
    `open`."""

    channel: str = Field(min_length=1, max_length=64)


class ContextChunk(StreamChunk):
    """A piece of the output on this context."""

    context_id: ContextId


class ChannelChunks(InternalPayload):
    """An SSE event named `chunks` of /channel: what has come since the last, in order."""

    chunks: list[ContextChunk]
