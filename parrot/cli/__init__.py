"""The `parrot` command.

The room owns what a person sees: arguments, tables, pictures and exit codes. It decides nothing
that a library user could not have, and each subcommand imports what it needs when it runs."""


def main() -> None:
    from parrot.cli.app import app

    app(prog_name="parrot")
