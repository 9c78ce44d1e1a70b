"""A chatbot with memory. Each turn continues the context of the previous turn, so those tokens are
not sent or computed again.

It follows a short script, or talks with you (--interactive)."""

from collections.abc import Iterator

from common import make_parser, run, show

from parrot import P

SCRIPT = (
    "Hello! My name is Robin and I keep three parrots.",
    "What do parrots like to eat?",
    "Do you remember my name?",
)


@P.semantic_function(conversation_template=P.chat_template)
def begin():
    """You are a friendly assistant. Answer in one or two sentences."""


@P.semantic_function(conversation_template=P.chat_template)
def answer(
    message: P.Input,
    reply: P.Output(P.SamplingConfig(temperature=0, repetition_penalty=1.1, max_gen_length=48)),
):
    """
    {{message}} {{reply}}"""


def main(messages: Iterator[str]) -> None:
    begin.invoke_statefully(context_successor=answer)
    for message in messages:
        print(f"\nYou: {message}")
        show("Parrot", answer.invoke_statefully(context_successor=answer, message=message))


def typed() -> Iterator[str]:
    print("Type a message, or nothing to end.")
    while message := input("> ").strip():
        yield message


if __name__ == "__main__":
    parser = make_parser(__doc__)
    parser.add_argument("--interactive", action="store_true", help="talk yourself")
    options = parser.parse_args()
    run(P.VirtualMachine(options.core), main, typed() if options.interactive else iter(SCRIPT))
