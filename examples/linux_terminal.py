"""The model plays a Linux terminal. Stateful calls let it remember what the commands did.

Runs a few commands, or yours: linux_terminal.py "pwd" "ls -l" ..."""

from collections.abc import Sequence

from common import make_parser, run, show

from parrot import P

COMMANDS = ("pwd", "ls", "echo hello > note.txt", "cat note.txt")


@P.semantic_function(formatter=P.allowing_newline, conversation_template=P.chat_template)
def boot():
    """Act as a Linux terminal. I type commands, you reply with what the terminal would show, and
    with nothing else. Do not explain anything."""


@P.semantic_function(formatter=P.allowing_newline, conversation_template=P.chat_template)
def execute(
    command: P.Input,
    screen: P.Output(P.SamplingConfig(temperature=0, max_gen_length=40)),
):
    """
    $ {{command}} {{screen}}"""


def main(commands: Sequence[str]) -> None:
    boot.invoke_statefully(context_successor=execute)
    for command in commands:
        show(f"$ {command}", execute.invoke_statefully(context_successor=execute, command=command))


if __name__ == "__main__":
    parser = make_parser(__doc__)
    parser.add_argument("command", nargs="*", default=COMMANDS)
    options = parser.parse_args()
    run(P.VirtualMachine(options.core), main, options.command)
