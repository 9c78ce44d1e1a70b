"""The smallest program: one semantic function, one call."""

from common import make_parser, run, show

from parrot import P


@P.semantic_function(conversation_template=P.chat_template)
def greet(
    name: P.Input,
    greeting: P.Output(P.SamplingConfig(temperature=0, max_gen_length=32)),
):
    """Write one friendly sentence that says hello to {{name}}. {{greeting}}"""


def main() -> None:
    show("Greeting", greet("the whole world"))


if __name__ == "__main__":
    run(P.VirtualMachine(make_parser(__doc__).parse_args().core), main)
