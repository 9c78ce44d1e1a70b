"""Names for what a full block of KV holds: equal names mean equal tokens, from the first on.

    token_ids   t t t t   t t t t   t t .
    keys        k0        k1                   k0 = H(root, block 0)   k1 = H(k0, block 1)

The root depends on a salt, so that contexts of different salts have no key in common, and on a
secret of the process, so that nobody can prepare two prompts with one key."""

import secrets
from array import array
from hashlib import blake2b

_KEY_SIZE = 16


class BlockHasher:
    """Makes the keys of one engine."""

    def __init__(self, block_size: int, secret: bytes | None = None) -> None:
        self._block_size = block_size
        self._secret = secrets.token_bytes(_KEY_SIZE) if secret is None else secret

    def root(self, salt: str) -> bytes:
        text = salt.encode("utf-8", "surrogatepass")
        return blake2b(text, digest_size=_KEY_SIZE, key=self._secret).digest()

    def extend(
        self, keys: list[bytes], root: bytes, token_ids: "array[int]", num_blocks: int
    ) -> None:
        """Bring `keys`, those of the first blocks of `token_ids`, to `num_blocks` of them."""
        size = self._block_size
        key = keys[-1] if keys else root
        for start in range(len(keys) * size, num_blocks * size, size):
            block = token_ids[start : start + size].tobytes()
            key = blake2b(key + block, digest_size=_KEY_SIZE).digest()
            keys.append(key)
