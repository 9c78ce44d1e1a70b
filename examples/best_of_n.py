"""Draft a slogan six times, take the first three finished drafts, and let the model choose one.

When three drafts are finished, the engines stop generating the other three."""

from common import make_parser, run, show

from parrot import P

NUM_DRAFTS, NUM_WANTED = 6, 3


@P.semantic_function(conversation_template=P.chat_template)
def draft(product: P.Input, slogan: P.Output(P.SamplingConfig(temperature=0.7, max_gen_length=32))):
    """Write a short slogan for {{product}}. {{slogan}}"""


@P.semantic_function(conversation_template=P.chat_template)
def choose(
    product: P.Input,
    first: P.Input,
    second: P.Input,
    third: P.Input,
    choice: P.Output(P.SamplingConfig(temperature=0, max_gen_length=64)),
):
    """Which slogan for {{product}} is the best? (1) {{first}} (2) {{second}} (3) {{third}}
    Answer with its number and one reason. {{choice}}"""


def main(product: str) -> None:
    drafts = [draft(product) for _ in range(NUM_DRAFTS)]
    winners = P.first_k(drafts, NUM_WANTED)
    for winner in winners:
        show(f"Draft {drafts.index(winner) + 1}", winner)
    show("Choice", choose(product, *winners))


if __name__ == "__main__":
    parser = make_parser(__doc__)
    parser.add_argument("product", nargs="?", default="honey from our village")
    options = parser.parse_args()
    run(P.VirtualMachine(options.core), main, options.product)
