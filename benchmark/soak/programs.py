"""The programs of the soak test: what each does with ServeCore, and how it disconnects."""

import random
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

from parrot.protocol.errors import ParrotError
from parrot.protocol.transport import Transport

MODEL = "sim"
SAMPLING = {"temperature": 0.0, "max_gen_length": 6}
_LONG = {"temperature": 0.0, "max_gen_length": 400}
_SHARED = "You answer questions about parrots, in a few words and with care. " * 4


class Client:
    """One program. `left`: stored responses that it did not delete. Programs with the same `number`
    do the same."""

    def __init__(self, http: Transport, number: int, left: list[str]) -> None:
        self.http = http
        self.number = number
        self.rng = random.Random(number)
        self.left = left
        self.scope: dict[str, Any] = {}

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        return await self.http.request("POST", path, body=body)

    async def begin(self) -> None:
        self.scope = await self.post("/v1/session", {"apps": [f"app{self.number % 5}"]})

    async def end(self) -> None:
        params = {"session_auth": self.scope["session_auth"]}
        path = f"/v1/session/{self.scope['session_id']}"
        await self.http.request("DELETE", path, params=params)

    async def call(self, text: str, sampling: dict[str, Any] = SAMPLING, **more: Any) -> Any:
        body = {
            "template": _SHARED + text + ": {{answer}}",
            "func_name": f"function{self.number % 7}",
            "parameters": [{"name": "answer", "is_output": True, "sampling_config": sampling}],
        }
        answer = await self.post("/v1/semantic_call", self.scope | body | more)
        return answer["request_id"], answer["param_info"][0]["var_id"]

    async def read(self, var_id: str) -> str:
        params = {key: str(value) for key, value in self.scope.items()}
        answer = await self.http.request("GET", f"/v1/semantic_var/{var_id}", params=params)
        return str(answer["content"])

    async def stream(self, path: str, body: dict[str, Any] | None, num_events: int | None) -> None:
        """Read `num_events` events and disconnect. None: read all."""
        method = "GET" if body is None else "POST"
        params = {k: str(v) for k, v in self.scope.items()} if body is None else None
        async with aclosing(self.http.stream(method, path, params=params, body=body)) as events:
            num_seen = 0
            async for _ in events:
                num_seen += 1
                if num_seen == num_events:
                    return


async def ask(client: Client) -> None:
    await client.begin()
    key = {"idempotency_key": f"key{client.number}"}
    _, var_id = await client.call(f"Question {client.number}", **key)
    _, again = await client.call(f"Question {client.number}", **key)
    assert var_id == again
    assert await client.read(var_id)
    await client.end()


async def graph(client: Client) -> None:
    """Two calls that are joined."""
    await client.begin()
    names = ["a", "b"]
    calls = [_call(f"Part {n} of {client.number}: ", n, []) for n in names]
    calls.append(_call("Join: ", "joined", names))
    answer = await client.post(
        "/v1/semantic_graph", client.scope | {"calls": calls, "variables": []}
    )
    assert await client.read(answer["variables"]["joined"])
    await client.end()


def _call(text: str, output: str, inputs: list[str]) -> dict[str, Any]:
    made = {"name": output, "is_output": True, "var": output, "sampling_config": SAMPLING}
    template = text + " ".join(f"{{{{{name}}}}}" for name in [*inputs, output])
    bound = [{"name": name, "var": name} for name in inputs]
    return {"template": template, "func_name": f"f{len(inputs)}", "parameters": [*bound, made]}


async def stream(client: Client) -> None:
    """A streamed call. Some readers disconnect before the end."""
    await client.begin()
    _, var_id = await client.call(f"Tell {client.number}", _LONG)
    await client.stream(f"/v1/semantic_var/{var_id}/stream", None, client.rng.choice([1, 3, None]))
    await client.end()


async def cancel(client: Client) -> None:
    await client.begin()
    request_id, var_id = await client.call(f"Long {client.number}", _LONG)
    await client.stream(f"/v1/semantic_var/{var_id}/stream", None, 1)
    if client.number % 2:
        await client.post(f"/v1/request/{request_id}/cancel", client.scope)
    else:
        await client.post(f"/v1/semantic_var/{var_id}/cancel", client.scope)
    try:
        await client.read(var_id)
    except ParrotError:
        await client.end()
    else:
        raise AssertionError("a cancelled variable has a value")


async def forget(client: Client) -> None:
    """Disconnect with a running call, so that the call and its session expire."""
    await client.begin()
    _, var_id = await client.call(f"Forgotten {client.number}", _LONG)
    await client.stream(f"/v1/semantic_var/{var_id}/stream", None, 1)


async def value(client: Client) -> None:
    """A variable that is set, and a call that reads it."""
    await client.begin()
    made = await client.post("/v1/semantic_var", client.scope | {"var_name": "x"})
    text = {"content": f"blue{client.number}"}
    await client.post(f"/v1/semantic_var/{made['var_id']}", client.scope | text)
    parameters = [
        {"name": "x", "var_id": made["var_id"]},
        {"name": "y", "is_output": True, "sampling_config": SAMPLING},
    ]
    body = {"template": "Say {{x}}: {{y}}", "parameters": parameters}
    answer = await client.post("/v1/semantic_call", client.scope | body)
    assert await client.read(answer["param_info"][1]["var_id"])
    await client.end()


async def wrong(client: Client) -> None:
    """Requests that are rejected."""
    await client.begin()
    tries: list[tuple[str, dict[str, Any]]] = [
        ("/v1/semantic_call", {"template": "{{x}}", "parameters": []}),
        ("/v1/semantic_var/none/cancel", {}),
        ("/v1/chat/completions", {"model": "nobody", "messages": []}),
        ("/v1/responses", {"model": MODEL, "input": "?", "previous_response_id": "resp_no"}),
    ]
    for path, body in tries:
        try:
            await client.post(path, (client.scope if "semantic" in path else {}) | body)
        except ParrotError:
            continue
        raise AssertionError(f"{path} took {body}")
    await client.end()


async def chat(client: Client) -> None:
    """Two turns of a conversation. The second is a stream, which some clients leave early."""
    messages = [{"role": "system", "content": _SHARED}]
    messages.append({"role": "user", "content": f"Hello from {client.number}"})
    body: dict[str, Any] = {"model": MODEL, "messages": messages, "max_tokens": 6}
    body["temperature"] = 0
    answer = await client.post("/v1/chat/completions", body)
    messages.append(answer["choices"][0]["message"])
    messages.append({"role": "user", "content": "And then?"})
    last = client.rng.choice([2, None])
    await client.stream("/v1/chat/completions", body | {"stream": True, "max_tokens": 60}, last)


async def messages(client: Client) -> None:
    """Anthropic's format."""
    said = [{"role": "user", "content": f"Hello from {client.number}"}]
    body = {"model": MODEL, "messages": said, "max_tokens": 6, "system": _SHARED}
    await client.post("/v1/messages", body)


async def completion(client: Client) -> None:
    prompt = f"{_SHARED} Number {client.number}"
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 6, "n": 2}
    await client.post("/v1/completions", body)


async def responses(client: Client) -> None:
    """Two stored responses, of which some are deleted."""
    body = {"model": MODEL, "input": f"Hello from {client.number}", "max_output_tokens": 16}
    first = await client.post("/v1/responses", body)
    more = {"previous_response_id": first["id"], "input": "And then?"}
    second = await client.post("/v1/responses", body | more)
    await client.http.request("GET", f"/v1/responses/{second['id']}")
    if client.rng.random() < 0.8:
        for one in (second, first):
            await client.http.request("DELETE", f"/v1/responses/{one['id']}")
    else:
        client.left += [second["id"], first["id"]]


async def background(client: Client) -> None:
    """A background response that is cancelled."""
    body = {"model": MODEL, "input": f"Later {client.number}", "max_output_tokens": 200}
    made = await client.post("/v1/responses", body | {"background": True})
    await client.post(f"/v1/responses/{made['id']}/cancel", {})
    await client.http.request("DELETE", f"/v1/responses/{made['id']}")


Program = Callable[[Client], Awaitable[None]]
MIX: dict[Program, float] = {
    ask: 4, graph: 3, stream: 2, cancel: 2, forget: 1, value: 2, wrong: 0.5,
    chat: 3, messages: 1, completion: 1, responses: 2, background: 0.5,
}  # fmt: skip


def draw(number: int) -> Program:
    return random.Random(-1 - number).choices([*MIX], [*MIX.values()])[0]
