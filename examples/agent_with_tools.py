"""Answer several questions at a time with an agent that calls tools. A progress bar shows how many
are done.

The tools are functions of this program. The model decides which tool to call, and its arguments."""

from typing import Literal

from common import make_parser, run

from parrot import P

STOCK = {"The Birds": 3, "The Wasps": 0, "The Frogs": 12}
QUESTIONS = [
    "Do you have The Birds?",
    "What does it cost to send a book abroad?",
]


@P.tool
def find_book(title: str) -> dict[str, int]:
    """Look up how many copies of a book there are.

    Args:
        title: the whole title.
    """
    if title not in STOCK:
        raise LookupError(f"no such book, only {', '.join(STOCK)}")
    return {"copies": STOCK[title]}


@P.tool
def postage(to: Literal["here", "abroad"]) -> str:
    """The price of sending a book."""
    return {"here": "2 euros", "abroad": "9 euros"}[to]


SAMPLING = P.SamplingConfig(temperature=0, max_gen_length=40)
AGENT = P.Agent(
    [find_book, postage],
    "You work in a bookshop. Answer briefly.",
    must_call=True,
    max_turns=3,
    sampling_config=SAMPLING,
    name="bookseller",
)


@P.semantic_function(conversation_template=P.chat_template)
def rate(answer: P.Input) -> P.Returns[Literal["friendly", "unfriendly"]]:
    """A bookseller told a customer: {{answer}} Is that friendly? {{verdict}}"""


def answered(question: str) -> str:
    """The agent's answer, which is printed while it is generated."""
    print(f"\n--- {question} ---")
    try:
        turns = AGENT.stream(question)
        for piece in turns:
            print(piece, end="", flush=True)
        print()
    except P.MaxTurnsExceeded as error:
        return f"({error})"
    for call in turns.calls:
        print(f"[{call.name} {dict(call.arguments)}: {call.result}]")
    return turns.text


def main(vm: P.VirtualMachine) -> None:
    answers = [answered(question) for question in QUESTIONS]
    verdicts = P.gather(vm.map(rate, answers), progress="Rated", return_exceptions=True)
    print("\n--- Friendly? ---")
    for question, verdict in zip(QUESTIONS, verdicts, strict=True):
        print(f"{question} {verdict}")


if __name__ == "__main__":
    options = make_parser(__doc__).parse_args()
    vm = P.VirtualMachine(options.core)
    run(vm, main, vm)
