"""Shell lines that connect coding agents to a server, and the context that each agent needs."""

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass

SMALL_MODEL = "Qwen/Qwen3-0.6B"
"""A model that supports tool calls, has enough context for all agents, and runs on a laptop."""


@dataclass(frozen=True, slots=True)
class CodingAgent:
    """A coding agent. `context`: the minimum context length in tokens, because of the agent's
    instructions and tools. `line` makes its shell line from the server's URL, the model and a
    key."""

    name: str
    context: int
    line: Callable[[str, str, str], str]


def _claude_code(url: str, model: str, key: str) -> str:
    name = shlex.quote(model)
    return (
        f"ANTHROPIC_BASE_URL={url} ANTHROPIC_AUTH_TOKEN={key} "
        f"ANTHROPIC_MODEL={name} ANTHROPIC_SMALL_FAST_MODEL={name} "
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1 claude"
    )


def _qwen_code(url: str, model: str, key: str) -> str:
    return (
        f"OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY={key} OPENAI_MODEL={shlex.quote(model)} "
        "qwen --auth-type openai"
    )


def _codex(url: str, model: str, key: str) -> str:
    provider = f'{{name="Parrot",base_url="{url}/v1",env_key="PARROT_KEY"}}'
    return (
        f"PARROT_KEY={key} codex -c web_search=disabled -c model_provider=parrot "
        f"-c {shlex.quote(f'model_providers.parrot={provider}')} -m {shlex.quote(model)}"
    )


def _opencode(url: str, model: str, key: str) -> str:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{url}/v1", "apiKey": key},
        "models": {model: {"tool_call": True}},
    }
    config = {"model": f"parrot/{model}", "provider": {"parrot": provider}}
    return f"OPENCODE_CONFIG_CONTENT={shlex.quote(json.dumps(config))} opencode"


CODING_AGENTS = (
    CodingAgent("Claude Code", 25_500, _claude_code),
    CodingAgent("Qwen Code", 13_300, _qwen_code),
    CodingAgent("Codex", 11_600, _codex),
    CodingAgent("OpenCode", 10_400, _opencode),
)


def agent_lines(url: str, model: str, key: str, context: int | None) -> dict[str, str]:
    """The shell lines, by agent name, of the agents that work with a context of this length. None:
    the length is unknown, and all agents are returned."""
    return {
        agent.name: agent.line(url, model, key)
        for agent in CODING_AGENTS
        if context is None or agent.context <= context
    }


def why_not_all(model: str, context: int | None) -> str | None:
    """Why some agents have no line. None: all agents have one."""
    lacking = [agent for agent in CODING_AGENTS if context is not None and context < agent.context]
    if not lacking:
        return None
    needs = ", ".join(f"{agent.name} ({agent.context:,})" for agent in lacking)
    return f"The context of {model}, {context:,} tokens, is too short for {needs}."
