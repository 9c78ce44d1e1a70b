"""The smallest program: one semantic function, one call."""

from common import make_parser, run, show

from parrot import P


@P.semantic_function(conversation_template=P.chat_template)
def greet(
    name: P.Input,
    greeting: P.Output(P.SamplingConfig(temperature=0, repetition_penalty=1.1, max_gen_length=32)),
):
    """Say hello to {{name}} and wish a nice day. {{greeting}}"""


def main() -> None:
    show("Greeting", greet("Robin"))


if __name__ == "__main__":
    run(P.VirtualMachine(make_parser(__doc__).parse_args().core), main)
