"""A workflow of three roles: a playwright writes a synopsis, a critic reviews the synopsis, and a
social media manager uses both. The program is asynchronous."""

from common import make_parser, run

from parrot import P

SHORT = P.SamplingConfig(temperature=0, repetition_penalty=1.1, max_gen_length=64)


@P.semantic_function(formatter=P.allowing_newline, conversation_template=P.chat_template)
def write_synopsis(title: P.Input, era: P.Input, synopsis: P.Output(SHORT)):
    """You are a playwright. Write a synopsis of the play in two sentences.

    Title: {{title}}
    Era: {{era}} {{synopsis}}"""


@P.semantic_function(formatter=P.allowing_newline, conversation_template=P.chat_template)
def write_review(synopsis: P.Input, review: P.Output(SHORT)):
    """You are a theatre critic. Write a review of this play in two sentences.

    {{synopsis}} {{review}}"""


@P.semantic_function(formatter=P.allowing_newline, conversation_template=P.chat_template)
def write_post(
    time: P.Input, place: P.Input, synopsis: P.Input, review: P.Input, post: P.Output(SHORT)
):
    """You are a social media manager of a theatre. Write a short post that invites to this play.

    When: {{time}}
    Where: {{place}}
    Synopsis: {{synopsis}}
    Review: {{review}} {{post}}"""


async def main() -> None:
    synopsis = await write_synopsis.ainvoke("Tragedy at Sunset on the Beach", "Victorian England")
    review = await write_review.ainvoke(synopsis)
    post = await write_post.ainvoke("Friday at 8 pm", "Theatre in the Park", synopsis, review)
    for title, variable in (("Synopsis", synopsis), ("Review", review), ("Post", post)):
        print(f"\n--- {title} ---")
        async for piece in variable.astream():
            print(piece, end="", flush=True)
        print()


if __name__ == "__main__":
    run(P.VirtualMachine(make_parser(__doc__).parse_args().core), main)
