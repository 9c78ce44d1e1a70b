"""The types of the options of `parrot bench`; imports nothing that takes time."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

Url = Annotated[str, Argument(help="URL of a ServeCore or of any OpenAI-compatible server.")]
WorkloadName = Annotated[
    str,
    Option(
        metavar="NAME[:KEY=VALUE,...]",
        help="`requests`, or an application: map_reduce, chain, chain_many, chain_background, "
        "multi_agent, copilot, roots4, gpts, mixed, refine_loop, best_of_n, rag, tool_pause, "
        "fanout_cold, 256, job_mix.",
    ),
]
Against = Annotated[
    list[str] | None,
    Option(metavar="URL", help="URL of another OpenAI-compatible server. Can be repeated."),
]
NumRequests = Annotated[
    int | None,
    Option("--num-requests", min=1, max=1_000_000, help="Number of requests or applications."),
]
PromptTokens = Annotated[
    int | None,
    Option("--prompt-tokens", min=1, max=10_000_000, help="Tokens of a request or a document."),
]
PrefixTokens = Annotated[
    int | None,
    Option("--prefix-tokens", min=0, help="Prompt tokens that all requests share."),
]
OutputTokens = Annotated[
    int | None, Option("--output-tokens", min=1, max=1_000_000, help="Output tokens of each call.")
]
Concurrency = Annotated[
    int | None, Option(min=1, help="Requests at once. \\[default: 8; no limit with --request-rate]")
]
RequestRate = Annotated[
    float | None,
    Option("--request-rate", min=0.001, help="Requests/s at random times (Poisson)."),
]
Chat = Annotated[bool, Option("--chat", help="Use chat completions instead of completions.")]
Model = Annotated[str | None, Option(help="Model. \\[default: the first]")]
AgainstModel = Annotated[
    str | None, Option("--against-model", help="Model on the --against server.")
]
AgainstKey = Annotated[
    str | None,
    Option(
        "--against-api-key", envvar="PARROT_AGAINST_KEY", help="API key of the --against server."
    ),
]
Repeat = Annotated[
    int, Option(min=1, max=1000, help="Repeat the whole measurement N times, alternating servers.")
]
Seed = Annotated[
    int | None, Option(min=0, help="Random seed for texts and arrival times. \\[default: random]")
]
Timeout = Annotated[
    float, Option(min=0.1, help="Seconds after which a request or an application counts as failed.")
]
Output = Annotated[Path | None, Option(help="JSON file for the figures.")]
