"""Find the code blocks of the documentation, and the comments that say how they are tested."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        *(ROOT / "docs").rglob("*.md"),
        ROOT / "README.md",
        ROOT / "INSTALL.md",
        ROOT / "CONTRIBUTING.md",
    ]
)
# A fence with the HTML comment right above it, or a comment that is itself code.
_BLOCK = re.compile(
    r"(?:^[ ]*<!-- (?!hidden)(?P<note>(?:(?!-->).)*)-->\n)?"
    r"^(?P<indent>[ ]*)```(?P<language>\w+)\n(?P<code>.*?)^(?P=indent)```$"
    r"|^<!-- hidden\n(?P<hidden>.*?)^-->$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    """A code block. `reason` says why no test runs it. `tested_in` is its own test, if it has
    one."""

    page: Path
    line: int
    language: str
    code: str
    reason: str | None = None
    tested_in: str | None = None

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def is_run(self) -> bool:
        return self.reason is None and self.tested_in is None


def blocks_of(page: Path) -> list[Block]:
    """Return all blocks with a language, and `<!-- hidden` code, in order."""
    text = page.read_text("utf-8")
    found = []
    for match in _BLOCK.finditer(text):
        code, language = match["code"], match["language"]
        if match["hidden"] is not None:
            code, language = match["hidden"], "python"
        kind, _, said = (match["note"] or "").strip().partition(":")
        start = match.start("code") if match["hidden"] is None else match.start("hidden")
        found.append(
            Block(
                page=page,
                line=text.count("\n", 0, start) + 1,
                language=language,
                code=re.sub(rf"^{match['indent'] or ''}", "", code, flags=re.MULTILINE),
                reason=said.strip() if kind == "not run" else None,
                tested_in=said.strip() if kind == "tested in" else None,
            )
        )
    return found
