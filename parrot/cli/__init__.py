"""The `parrot` command.

This package contains the user interface: arguments, tables, pictures and exit codes. All functions
behind it are also available to library users. Each subcommand imports its modules when it runs."""


def main() -> None:
    from parrot.cli.app import app

    app(prog_name="parrot")
