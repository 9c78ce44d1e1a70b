"""Prompts as segments, and prefix keys: the identity of a reusable context.

    segments   "Summarise: "   <value of x>   " Briefly: "
    keys       k0 = H(root, H(s0))   k1 = H(k0, H(s1))   k2 = H(k1, H(s2))

Equal keys mean equal prompts up to that segment, in the same scope. Each text's digest H(s) is
stored with the text, so repeated values and a chat's history are hashed once.

The chain starts from a root that only this process can compute, so clients cannot probe for another
tenant's prefix. The model is not part of a key, because keys are only compared on one engine."""

import hashlib
import hmac
import secrets
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from parrot.serve.graph.nodes import (
    Completion,
    Piece,
    PieceKind,
    TextPiece,
    TokenizedText,
    VariableState,
    text_digest,
)
from parrot.utils.heaps import LruDict

_MAX_ROOTS = 1024  # Roots that are cached, one or two per tenant. A missing one costs an HMAC.


class Segment(NamedTuple):
    """A piece of a prompt with its text."""

    kind: PieceKind
    text: str
    tokenized: TokenizedText | None = None
    ends_turn: bool = False  # in a chat, an answer follows
    digest: bytes | None = None  # the text's digest, if it is cached
    parts: "tuple[Segment, ...]" = ()  # for a joined segment, which has no text of its own
    part_chars: int = 0  # characters of `parts`

    @property
    def num_chars(self) -> int:
        return self.part_chars or len(self.text)


class PrefixLink(NamedTuple):
    """A finished completion as the prefix of prompts that continue it: the segments of its prompt
    and output, and a prefix key for each segment."""

    segments: tuple[Segment, ...]
    keys: tuple[bytes, ...]


def preceding(completion: Completion) -> list[Completion]:
    """The completions that this one continues, the first one first."""
    chain: list[Completion] = []
    link = completion
    while link.previous is not None:
        link = link.previous
        chain.append(link)
    return chain[::-1]


def link_of(completion: Completion, key: bytes) -> PrefixLink:
    """The link of a completion in a chain, after the prefix with key `key`.

    The prompt of a later turn becomes one segment, because each successor starts with all of it and
    a long conversation has hundreds of turns. The first prompt keeps its segments, because other
    prompts share parts of it. A chat's prompt keeps them, because markup stands between them."""
    output = completion.output
    segments = [
        *fill_segments(completion),
        output_segment(output.text, output.tokenized, output.digest),
    ]
    keys = [key := extend_key(key, segment) for segment in segments]
    if completion.previous is not None and not completion.options.chat and len(segments) > 2:
        segments[:-1] = [_joined(segments[:-1])]
        keys[:-2] = []
    return PrefixLink(tuple(segments), tuple(keys))


def merged(links: Sequence[PrefixLink]) -> PrefixLink:
    """Consecutive links as one segment."""
    segments = [segment for link in links for segment in link.segments]
    parts = [part for segment in segments for part in segment.parts or (segment,)]
    return PrefixLink((_joined(parts),), links[-1].keys[-1:])


def _joined(parts: Sequence[Segment]) -> Segment:
    num_chars = sum([part.num_chars for part in parts])
    return Segment(PieceKind.VALUE, "", parts=tuple(parts), part_chars=num_chars)


def fill_segments(completion: Completion, start: int = 0) -> Iterator[Segment]:
    """The segments of the fill's pieces from `start`, up to the first piece that is not ready."""
    fill, chat = completion.fill, completion.options.chat
    for i in range(start, len(fill)):
        piece, ends_turn = fill[i], chat and (i == len(fill) - 1 or _is_answer(fill[i + 1]))
        if isinstance(piece, TextPiece):
            yield Segment(piece.kind, piece.text, piece.tokenized, ends_turn, piece.digest)
        elif piece.variable.state is VariableState.READY:
            value = piece.variable
            yield Segment(PieceKind.VALUE, value.text, value.tokenized, ends_turn, value.digest)
        else:
            return


def _is_answer(piece: Piece) -> bool:
    return isinstance(piece, TextPiece) and piece.kind is PieceKind.OUTPUT


def output_segment(
    text: str, tokenized: TokenizedText | None, digest: bytes | None = None
) -> Segment:
    return Segment(PieceKind.OUTPUT, text, tokenized, digest=digest)


class PrefixHasher:
    """Computes prefix keys. Two hashers with the same secret compute the same keys."""

    def __init__(self, secret: bytes | None = None) -> None:
        self._secret = secrets.token_bytes(32) if secret is None else secret
        self._roots: LruDict[tuple[str, bool], bytes] = LruDict(_MAX_ROOTS)

    def root(self, scope: str, chat: bool) -> bytes:
        """The start of the key chains of a scope, which is a cache salt. Chat prompts have their
        own root, because their markup is not part of the segments."""
        root = self._roots.get((scope, chat))
        if root is None:
            message = (b"chat:" if chat else b"plain:") + scope.encode()
            root = hmac.digest(self._secret, message, "sha256")
            self._roots.put((scope, chat), root)
        return root


def extend_key(key: bytes, segment: Segment) -> bytes:
    """The key of the prompt of `key` followed by `segment`. All hashed parts have a fixed length,
    so different sequences of segments never hash the same bytes.

    An output counts as a value, because both have the same tokens. So a prompt that contains the
    output's value continues the prompt that produced it. In chats, `ends_turn` tells them apart."""
    kind = PieceKind.VALUE if segment.kind is PieceKind.OUTPUT else segment.kind
    mark = b"." if segment.ends_turn else b"-"
    digest = segment.digest or text_digest(segment.text)
    return hashlib.sha256(key + kind + mark + digest).digest()
