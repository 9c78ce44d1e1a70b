"""The types of the options of `parrot bench`; imports nothing that takes time."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

Url = Annotated[str, Argument(help="A ServeCore, or any server of OpenAI's API.")]
WorkloadName = Annotated[
    str,
    Option(
        metavar="NAME[:KEY=VALUE,...]",
        help="requests, or an application: map_reduce, chain, chain_many, chain_background, "
        "multi_agent, copilot, roots4, gpts, mixed, refine_loop, best_of_n, rag, tool_pause, "
        "fanout_cold, 256, job_mix.",
    ),
]
Against = Annotated[
    list[str] | None,
    Option(metavar="URL", help="Another server of OpenAI's API. May be given several times."),
]
NumRequests = Annotated[
    int | None, Option("--num_requests", min=1, max=1_000_000, help="Or applications.")
]
PromptTokens = Annotated[
    int | None,
    Option("--prompt_tokens", min=1, max=10_000_000, help="Of a request, or a document."),
]
PrefixTokens = Annotated[
    int | None,
    Option("--prefix_tokens", min=0, help="So many of the prompt are the same in all requests."),
]
OutputTokens = Annotated[
    int | None, Option("--output_tokens", min=1, max=1_000_000, help="Of each call.")
]
Concurrency = Annotated[
    int | None, Option(min=1, help="At once; default: 8, or with --request_rate no limit.")
]
RequestRate = Annotated[
    float | None,
    Option("--request_rate", min=0.001, help="Requests a second, at random times (Poisson)."),
]
Chat = Annotated[bool, Option("--chat", help="Ask for chat completions instead of completions.")]
Model = Annotated[str | None, Option(help="Default: the first that is served.")]
AgainstModel = Annotated[str | None, Option("--against_model", help="The same of --against.")]
AgainstKey = Annotated[
    str | None,
    Option("--against_api_key", envvar="PARROT_AGAINST_KEY", help="If that server asks for one."),
]
Repeat = Annotated[int, Option(min=1, max=1000, help="Measure all so many times, in turns.")]
Seed = Annotated[int | None, Option(min=0, help="Of texts and times; default: a new one.")]
Timeout = Annotated[
    float, Option(min=0.1, help="Seconds after which a request, or an application, has failed.")
]
Output = Annotated[Path | None, Option(help="A file for the figures, as JSON.")]
