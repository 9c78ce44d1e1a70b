"""The characters that byte-level BPE writes for bytes (GPT-2's table)."""


def byte_symbols() -> list[str]:
    """The printable character of each byte. Printable Latin-1 bytes stand for themselves. Each
    other byte gets the next code point from 256."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (byte for byte in range(256) if byte not in printable)
    moved = {byte: chr(256 + offset) for offset, byte in enumerate(others)}
    return [moved.get(byte) or chr(byte) for byte in range(256)]
