"""Public prefixes: texts of which every tenant may use the KV that any has computed.

    public prefix    |-- its whole blocks --|..|
    a prompt         |-- the same --------------- its own: KV of its salt only ---|

A prompt shares the whole blocks of such a text or none of it. If it shared as many as are equal, it
could be found by probing where a text that is nearly the public one goes on otherwise."""

from parrot.serve.execution.fleet import Engine
from parrot.serve.prompts.encode import Units


def public_len(engine: Engine, prompt: Units) -> int:
    """The length of the longest public prefix, as far as it fills blocks, with which the prompt
    begins; 0: it begins with none."""
    return next((len(ids) for ids in _prefixes(engine) if prompt[: len(ids)] == ids), 0)


def longest_public(engine: Engine) -> int:
    """The length of the longest one that any prompt has."""
    return max(map(len, _prefixes(engine)), default=0)


def _prefixes(engine: Engine) -> list[Units]:
    """The longest first."""
    if engine.tokenizer is None:
        return []  # its contexts are text
    size = engine.info.block_size
    return [ids[: len(ids) - len(ids) % size] for ids in engine.tokenizer.public]
