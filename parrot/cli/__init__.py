"""The `parrot` command. Each subcommand imports what it needs when it runs."""


def main() -> None:
    from parrot.cli.app import app

    app(prog_name="parrot")
