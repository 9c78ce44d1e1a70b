"""A native function between two semantic functions. It is Python code that runs inside the service,
so the text does not return to the program between the two calls."""

from common import make_parser, run, show

from parrot import P

SHORT = P.SamplingConfig(temperature=0, repetition_penalty=1.1, max_gen_length=48)


@P.semantic_function(conversation_template=P.chat_template)
def list_animals(count: int, animals: P.Output(SHORT)):
    """Name {{count}} animals that live in Africa, as a list. {{animals}}"""


@P.native_function()
def to_bullets(text: P.Input, bullets: P.Output):
    lines = [line.strip(" -*.0123456789") for line in text.split("\n")]
    names = [line for line in lines if line]
    bullets.set("\n".join("* " + name.lower() for name in names[:3]))


@P.semantic_function(formatter=P.allowing_newline, conversation_template=P.chat_template)
def tell(bullets: P.Input, story: P.Output(SHORT)):
    """Write a story of two sentences in which these animals meet.

    {{bullets}} {{story}}"""


def main() -> None:
    animals = list_animals(3)
    bullets = to_bullets(animals)
    story = tell(bullets)
    show("Story", story)
    show("As the model listed them", animals)
    show("As the story got them", bullets)


if __name__ == "__main__":
    run(P.VirtualMachine(make_parser(__doc__).parse_args().core), main)
