"""Whether the included model's first answers make sense: ten questions, each with four seeds.

    python -m benchmark.first_answers --output benchmark/results/first_answers.json

Asks `/v1/chat/completions` of a cluster like that of `parrot up embedded`. The requests set a seed
and a limit of the length, and leave all other sampling to the defaults. An answer makes sense if it
contains the word that `tests/e2e/first_answers.toml` expects.
"""

import argparse
import asyncio
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

from benchmark.results import ROOT, Report, run
from parrot.cluster import Cluster
from parrot.protocol.http import HttpClient

QUESTIONS = ROOT / "tests" / "e2e" / "first_answers.toml"
SEEDS = (1, 2, 3, 4)
MAX_TOKENS = 100
_SIMULTANEOUS = 8


@dataclass(frozen=True, slots=True)
class Answer:
    question: str
    word: str
    seed: int
    text: str

    @property
    def makes_sense(self) -> bool:
        return re.search(rf"\b{self.word}\b", self.text, re.IGNORECASE) is not None


def read_questions(path: Path = QUESTIONS) -> list[tuple[str, str]]:
    """The questions, each with its expected word."""
    listed = tomllib.loads(path.read_text())["question"]
    return [(one["text"], one["word"]) for one in listed]


async def ask_all(core_url: str, model: str = "embedded") -> list[Answer]:
    """The answers to all questions with all seeds, in order."""
    turns = asyncio.Semaphore(_SIMULTANEOUS)
    async with HttpClient(core_url) as http:

        async def ask(question: str, word: str, seed: int) -> Answer:
            body = {
                "model": model,
                "messages": [{"role": "user", "content": question}],
                "seed": seed,
                "max_tokens": MAX_TOKENS,
            }
            async with turns:
                answer = await http.request(
                    "POST", "/v1/chat/completions", body=body, timeout_s=300
                )
            return Answer(question, word, seed, answer["choices"][0]["message"]["content"])

        asked = [ask(text, word, seed) for text, word in read_questions() for seed in SEEDS]
        return await asyncio.gather(*asked)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="embedded", help="what the engine serves")


def measure(args: argparse.Namespace, report: Report) -> None:
    engine = {"engine_type": "builtin", "model": args.model}
    report.uses("engine", engine)
    report.uses("questions", QUESTIONS)
    with Cluster(engines=[engine]) as cluster:
        answers = asyncio.run(ask_all(cluster.core_url, args.model))
    for answer in answers:
        report.add(
            "answers",
            {
                "question": answer.question,
                "word": answer.word,
                "seed": answer.seed,
                "makes_sense": answer.makes_sense,
                "text": answer.text,
            },
        )
    report["asked"] = len(answers)
    report["sensible"] = sum(answer.makes_sense for answer in answers)


if __name__ == "__main__":
    run(__name__)
