"""Programs with known answers, which must be the same with and without faults."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

from parrot.protocol.errors import CallFailed
from tests.nemesis.caller import PAUSE_S, texts
from tests.nemesis.client import Client
from tests.nemesis.service import OTHER_MODEL

NUM_VARIANTS = 6
_FAILS = "def f(text, out):\n    raise ValueError(text)"
_JOINS = "def f(a, b, out):\n    out.set(a + '|' + b)"
_SECRET = "What every tenant keeps to itself, at some length, since blocks have sixteen letters. "


async def map_reduce(client: Client, variant: int, draw: random.Random) -> str:
    parts = [
        await client.call(f"Part {i} of {variant}:", 10 + 7 * i, reuse=draw.random() < 0.3)
        for i in range(4)
    ]
    names = {f"p{i}": part for i, part in enumerate(parts)}
    template = f"Join {variant}: " + " ".join(f"{{{{{name}}}}}" for name in names)
    whole = await client.call(template, 30, inputs=names, reuse=False)
    reads = [(client.stream if draw.random() < 0.5 else client.get)(var) for var in (*parts, whole)]
    return "|".join(await asyncio.gather(*reads))


async def chain(client: Client, variant: int, draw: random.Random) -> str:
    last = await client.call(f"Begin {variant}:", 20, reuse=False)
    made = [last]
    for i in range(4):
        last = await client.call(f"Then {i}: {{{{x}}}}", 12, inputs={"x": last}, reuse=False)
        made.append(last)
    text = await (client.stream if draw.random() < 0.5 else client.get)(last)
    again = [await client.get(var) for var in made]
    return "|".join([*again, text])


async def graph(client: Client, variant: int, draw: random.Random) -> str:
    def call(template: str, length: int, output: str, **inputs: str) -> dict[str, Any]:
        sampling = {"temperature": 0.0, "max_gen_length": length, "ignore_tokenizer_eos": True}
        made = {"name": "out", "is_output": True, "var": output, "sampling_config": sampling}
        given = [{"name": name, "var": var} for name, var in inputs.items()]
        fields = {"template": template + " {{out}}", "reuse": False}
        return fields | {"parameters": [*given, made]}

    names = await client.graph(
        [
            call(f"Left {variant}:", 25, "left"),
            call(f"Right {variant}:", 15, "right"),
            call("Both: {{a}} {{b}}", 20, "both", a="left", b="right"),
            call("On: {{a}}", 20, "on", a="both"),
        ]
    )
    order = draw.sample(sorted(names), len(names))
    texts = dict(
        zip(order, await asyncio.gather(*map(client.get, map(names.get, order))), strict=True)
    )  # type: ignore[arg-type]
    return "|".join(texts[name] for name in sorted(texts))


async def agent(client: Client, variant: int, draw: random.Random) -> str:
    """Turns of an agent. Each output is streamed, and a tool turns it into the input of the next
    turn. At the end, all tool results are read again."""
    said: list[str] = []
    tools: list[str] = []
    note = f"Task {variant}."
    for turn in range(3):
        tool = await client.variable(f"tool{turn}")
        tools.append(tool)
        out = await client.call(f"Turn {turn}: {{{{note}}}} Answer:", 25, inputs={"note": tool})
        reading = asyncio.create_task(client.stream(out))
        try:
            await client.set(tool, note)
            said.append(await reading)
        finally:
            reading.cancel()
        note = said[-1][::-1]
    return "|".join([*said, *[await client.get(tool) for tool in tools]])


async def natives(client: Client, variant: int, draw: random.Random) -> str:
    """One native function joins two texts. Another fails: only the call that depends on it
    fails."""
    one = await client.call(f"One {variant}:", 12, reuse=False)
    two = await client.call(f"Two {variant}:", 12, reuse=False)
    joined = await client.native(_JOINS, {"a": one, "b": two})
    failed = await client.native(_FAILS, {"text": one}, fails=True)
    behind = await client.call("Behind {{x}}:", 8, inputs={"x": failed}, reuse=False)
    beside = await client.call("Beside {{x}}:", 8, inputs={"x": joined}, reuse=False)
    texts = [await client.get(beside), await client.get(joined)]
    return "|".join([*texts, await client.failure(behind), await client.failure(failed)])


async def race(client: Client, variant: int, draw: random.Random) -> str:
    made = [await client.call(f"Runner {variant} {i}:", 10 + 20 * i) for i in range(3)]
    winner = await client.first(made)
    texts = [await client.get(var) for var in made]
    assert winner in made
    return "|".join(texts)


async def leaver(client: Client, variant: int, draw: random.Random) -> str:
    """A reader that disconnects in the middle of a stream and reads again."""
    out = await client.call(f"A long story {variant}:", 60, reuse=False)
    await client.stream(out, max_pieces=draw.randint(1, 3))
    await asyncio.sleep(draw.uniform(0.0, 0.3))
    return await (client.stream if draw.random() < 0.5 else client.get)(out)


async def cancelled(client: Client, variant: int, draw: random.Random) -> str:
    """A cancelled call and its dependent call stay cancelled; another call continues. The request
    is repeated, because a cancellation may be lost while the journal cannot be written."""
    long = await client.call(f"For long {variant}:", 1500, reuse=False)
    behind = await client.call("Behind {{x}}:", 8, inputs={"x": long}, reuse=False)
    beside = await client.call(f"Beside {variant}:", 20, reuse=False)
    reads = [asyncio.create_task(client.failure(var)) for var in (behind, long)]
    try:
        await asyncio.sleep(draw.uniform(0.0, 0.2))
        pending = set(reads)
        while pending:
            await client.cancel(long)
            _, pending = await asyncio.wait(reads, timeout=0.5)
        return "|".join([*(await asyncio.gather(*reads)), await client.get(beside)])
    finally:
        for read in reads:
            read.cancel()


async def secret(client: Client, variant: int, draw: random.Random) -> str:
    """A prompt with the same prefix as those of other tenants."""
    out = await client.call(f"{_SECRET}Number {variant}:", 8, is_secret=True, reuse=False)
    return await client.get(out)


async def probe(client: Client, variant: int, draw: random.Random) -> str:
    """A minimal call, whose latency measures the recovery time after a fault."""
    return await client.get(await client.call(f"Is anybody there? {variant}:", 4, reuse=False))


async def chat(client: Client, variant: int, draw: random.Random) -> str:
    """A conversation with OpenAI's chat API."""
    messages = [{"role": "user", "content": f"Hello {variant}"}]
    for turn in range(3):
        body = {"model": "sim", "messages": messages, "temperature": 0, "max_tokens": 20}
        answer = await client.vendor(f"turn {turn}", "/v1/chat/completions", body)
        messages.append(
            {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}
        )
        messages.append({"role": "user", "content": f"And {turn}?"})
    return "|".join(message["content"] for message in messages)


async def responses(client: Client, variant: int, draw: random.Random) -> str:
    """Stored responses, each of which continues the previous one. All are read again."""
    made: list[dict[str, Any]] = []
    for turn in range(3):
        body: dict[str, Any] = {"model": "sim", "input": f"Question {variant} {turn}"}
        body |= {"temperature": 0, "max_output_tokens": 20}
        if made:
            body["previous_response_id"] = made[-1]["id"]
        made.append(await client.vendor(f"turn {turn}", "/v1/responses", body, stored=True))
    again = [await client.stored(one["id"]) for one in made]
    return "|".join(map(texts, again))


async def background(client: Client, variant: int, draw: random.Random) -> str:
    """A background response, which is polled."""
    body = {"model": "sim", "input": f"Meanwhile {variant}", "background": True}
    sampling = {"temperature": 0, "max_output_tokens": 40}
    response = await client.vendor("begin", "/v1/responses", body | sampling)
    while response["status"] in ("queued", "in_progress"):
        await asyncio.sleep(PAUSE_S)
        response = await client.stored(response["id"])
    if response["status"] == "failed":
        raise CallFailed(response["error"]["message"])
    return f"{response['status']}: {texts(response)}"


async def sampled(client: Client, variant: int, draw: random.Random) -> str:
    """Sampled values, which differ between runs of a call. Repeated reads must return the same."""
    first = await client.call(f"Dice {variant}:", 20, is_sampled=True)
    last = await client.call("After {{x}}:", 12, inputs={"x": first}, is_sampled=True)
    seen = [await client.get(first)]
    for _ in range(4):
        await asyncio.sleep(draw.uniform(0.0, 0.4))
        seen += [
            await client.get(last),
            await (client.stream if draw.random() < 0.5 else client.get)(first),
        ]
    return f"{len(set(seen))} values"


async def sampled_response(client: Client, variant: int, draw: random.Random) -> str:
    """A sampled background response. Repeated reads must return the same text."""
    body = {"model": "sim", "input": f"Dice {variant}", "background": True}
    body |= {"temperature": 1, "max_output_tokens": 30}
    response = await client.vendor("begin", "/v1/responses", body)
    seen = []
    while len(seen) < 4:
        await asyncio.sleep(draw.uniform(PAUSE_S, 0.3))
        response = await client.stored(response["id"])
        if response["status"] == "failed":
            raise CallFailed(response["error"]["message"])
        if response["status"] not in ("queued", "in_progress"):
            seen.append(texts(response))
    return f"{len(set(seen))} values"


async def two_models(client: Client, variant: int, draw: random.Random) -> str:
    """A call of one model that depends on a call of another, if there are engines of both."""
    model = draw.choice([["sim"], [OTHER_MODEL]]) if client.has_models else []
    other = [OTHER_MODEL] if model == ["sim"] else ["sim"] if model else []
    first = await client.call(f"One model {variant}:", 15, models=model, reuse=False)
    last = await client.call("The other {{x}}:", 15, inputs={"x": first}, models=other, reuse=False)
    return "|".join([await client.get(last), await client.get(first)])


Program = Callable[[Client, int, random.Random], Awaitable[str]]
PROGRAMS: dict[str, Program] = {
    program.__name__: program
    for program in (
        map_reduce,
        chain,
        graph,
        agent,
        natives,
        race,
        leaver,
        cancelled,
        secret,
        probe,
        chat,
        responses,
        background,
        sampled,
        sampled_response,
        two_models,
    )
}
WITHOUT_SESSION = frozenset({"background", "chat", "responses", "sampled_response"})
UNSHOWN = frozenset({"race"})  # The final state of the losing calls is not defined.
