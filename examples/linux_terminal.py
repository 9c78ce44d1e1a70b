"""The model plays a Linux terminal. Stateful calls let it remember what the commands did.

It runs a few commands, or the given ones: linux_terminal.py "pwd" "ls -l" ..."""

from collections.abc import Sequence

from common import make_parser, run, show

from parrot import P

COMMANDS = ("pwd", "echo hello", "ls /usr", "whoami")


# A terminal shows the same words again and again: a penalty for repetition would make it wrong.
SCREEN = P.SamplingConfig(
    temperature=0, repetition_penalty=1, max_gen_length=40, stop_str=["\n$", "\n\n"]
)


# No chat template: a model continues the text of a terminal session better than a chat.
@P.semantic_function(formatter=P.allowing_newline)
def boot():
    """The following is what a Linux terminal shows.

    $ whoami
    robin
    $ hostname
    parrot
    $ ls /
    bin  etc  home  tmp  usr
    $ pwd
    /home/robin
    $ cat /etc/hostname
    parrot
    $ echo one two
    one two"""


@P.semantic_function(formatter=P.allowing_newline)
def execute(
    command: P.Input,
    screen: P.Output(SCREEN),
):
    """
    $ {{command}}
    {{screen}}"""


def main(commands: Sequence[str]) -> None:
    boot.invoke_statefully(context_successor=execute)
    for command in commands:
        show(f"$ {command}", execute.invoke_statefully(context_successor=execute, command=command))


if __name__ == "__main__":
    parser = make_parser(__doc__)
    parser.add_argument("command", nargs="*", default=COMMANDS)
    options = parser.parse_args()
    run(P.VirtualMachine(options.core), main, options.command)
