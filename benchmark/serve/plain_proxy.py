"""A proxy that forwards requests and answers unparsed: the floor for Parrot in front of a server.

    python -m benchmark.serve.plain_proxy PORT URL

It uses the same HTTP server, HTTP client and event loop as ServeCore."""

import argparse
from typing import Any

import aiohttp
import uvicorn


class PlainProxy:
    def __init__(self, url: str) -> None:
        self._url = url
        self._http: aiohttp.ClientSession | None = None

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """One ASGI request."""
        if scope["type"] != "http":
            return
        if self._http is None:
            self._http = aiohttp.ClientSession(self._url)
        body = b""
        while True:
            message = await receive()
            body += message["body"]
            if not message["more_body"]:
                break
        headers = {"Content-Type": "application/json"}
        async with self._http.request(
            scope["method"], scope["path"], data=body or None, headers=headers
        ) as response:
            kind = response.headers["Content-Type"].encode()
            head = {"type": "http.response.start", "status": response.status}
            await send({**head, "headers": [(b"content-type", kind)]})
            async for part in response.content.iter_any():
                await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("port", type=int)
    parser.add_argument("url", help="the server, without a path")
    args = parser.parse_args()
    uvicorn.run(
        PlainProxy(args.url),
        host="127.0.0.1",
        port=args.port,
        loop="uvloop",
        http="httptools",
        lifespan="off",
        log_level="warning",
    )


if __name__ == "__main__":
    main()
