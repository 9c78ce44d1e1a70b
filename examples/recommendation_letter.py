"""A longer prompt whose layout matters: `allowing_newline` keeps its lines."""

from common import make_parser, run, show

from parrot import P


@P.semantic_function(formatter=P.allowing_newline, conversation_template=P.chat_template)
def write_letter(
    student: P.Input,
    professor: P.Input,
    major: P.Input,
    grades: float,
    specialty: P.Input,
    letter: P.Output(P.SamplingConfig(temperature=0, repetition_penalty=1.1, max_gen_length=128)),
):
    """You are a professor. Write a short letter that recommends a student for a PhD.

    Name: {{student}}
    Major: {{major}}
    Grades: {{grades}} of 4.0
    Specialty: {{specialty}}

    End the letter with "Sincerely, Prof. {{professor}}". {{letter}}"""


def main() -> None:
    letter = write_letter(
        student="Ada Quill",
        professor="Finch",
        major="Computer Science",
        grades=3.9,
        specialty="distributed systems",
    )
    show("Letter", letter)


if __name__ == "__main__":
    run(P.VirtualMachine(make_parser(__doc__).parse_args().core), main)
