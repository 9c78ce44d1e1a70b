"""Any server with OpenAI's completions API."""

from benchmark.apps.counters import CountedBackend, scrape
from parrot.cli.bench.program import Network
from parrot.cli.bench.styles import OpenAIProgram, OpenAITarget, openai_http


async def openai_backend(
    base_url: str, network: Network, model: str | None = None, api_key: str | None = None
) -> CountedBackend:
    """`model`: by default the one that the server names first."""
    http = openai_http(base_url, api_key)
    if model is None:
        answer = await http.request("GET", "/v1/models")
        model = str(answer["data"][0]["id"])
    target = OpenAITarget(http, model)
    return CountedBackend(lambda app: OpenAIProgram(target, network), http.close, scrape(base_url))
