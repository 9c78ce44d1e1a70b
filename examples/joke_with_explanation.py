"""One call with two outputs. The explanation is generated after the joke, in the same context."""

from common import make_parser, run, show

from parrot import P


@P.semantic_function(conversation_template=P.chat_template)
def tell_a_joke(
    topic: P.Input,
    other_topic: P.Input,
    joke: P.Output(P.SamplingConfig(temperature=0.7, seed=7, max_gen_length=48)),
    explanation: P.Output(
        P.SamplingConfig(temperature=0, repetition_penalty=1.1, max_gen_length=48)
    ),
):
    """Tell me a short joke about {{topic}} and {{other_topic}}. {{joke}}
    Explain in one sentence why this is funny. {{explanation}}"""


def main() -> None:
    joke, explanation = tell_a_joke("a parrot", other_topic="a programmer")
    show("Joke", joke)
    show("Explanation", explanation)


if __name__ == "__main__":
    run(P.VirtualMachine(make_parser(__doc__).parse_args().core), main)
