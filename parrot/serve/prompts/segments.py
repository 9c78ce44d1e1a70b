"""Prompts as segments, and prefix keys: the identity of a reusable context.

    segments   "Summarise: "   <value of x>   " Briefly: "
    keys       k0 = H(root, H(s0))   k1 = H(k0, H(s1))   k2 = H(k1, H(s2))

A text's own digest is kept with it: a value that occurs often, and a chat's history in each turn,
are hashed once.

Equal keys mean equal prompts up to there, in the same scope. The chain starts from a root that only
this process can compute, so nobody outside can name (or probe for) another tenant's prefix. The
model is not part of a key: a key is only ever looked up together with an engine, which has one."""

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

_MAX_ROOTS = 1024  # that are not computed again


class Segment(NamedTuple):
    """A piece of a prompt with its text. `ends_turn`: an answer follows it, in a chat. `digest`:
    the text's, if it is kept. `parts`: the segments that it stands for, if it has no text of its
    own, and `part_chars` their characters."""

    kind: PieceKind
    text: str
    tokenized: TokenizedText | None = None
    ends_turn: bool = False
    digest: bytes | None = None
    parts: "tuple[Segment, ...]" = ()
    part_chars: int = 0

    @property
    def num_chars(self) -> int:
        return self.part_chars or len(self.text)


class PrefixLink(NamedTuple):
    """A completion that is done as a part of the prompts that continue it: the segments of its
    prompt and its output, and a prefix key for each."""

    segments: tuple[Segment, ...]
    keys: tuple[bytes, ...]


def preceding(completion: Completion) -> list[Completion]:
    """The completions that it continues, the first one first."""
    chain: list[Completion] = []
    link = completion
    while link.previous is not None:
        link = link.previous
        chain.append(link)
    return chain[::-1]


def link_of(completion: Completion, key: bytes) -> PrefixLink:
    """A link of a chain whose prefix key before it is `key`.

    A turn's prompt is one segment for all that come after it, since they begin with all of it, and
    a long conversation has hundreds. The first prompt is not: others begin with parts of it. Nor is
    that of a chat, whose markup stands between its segments."""
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
    """Links that follow each other as one segment."""
    segments = [segment for link in links for segment in link.segments]
    parts = [part for segment in segments for part in segment.parts or (segment,)]
    return PrefixLink((_joined(parts),), links[-1].keys[-1:])


def _joined(parts: Sequence[Segment]) -> Segment:
    num_chars = sum([part.num_chars for part in parts])
    return Segment(PieceKind.VALUE, "", parts=tuple(parts), part_chars=num_chars)


def fill_segments(completion: Completion, start: int = 0) -> Iterator[Segment]:
    """A segment for each piece of its fill from `start` on, up to the first that is not ready."""
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
    """Makes prefix keys. Two hashers agree only if they have the same secret."""

    def __init__(self, secret: bytes | None = None) -> None:
        self._secret = secrets.token_bytes(32) if secret is None else secret
        self._roots: LruDict[tuple[str, bool], bytes] = LruDict(_MAX_ROOTS)

    def root(self, scope: str, chat: bool) -> bytes:
        """The start of every chain of a scope, which is a cache salt. Chat prompts have markup that
        segments do not show, so they never share a chain with plain ones."""
        root = self._roots.get((scope, chat))
        if root is None:
            message = (b"chat:" if chat else b"plain:") + scope.encode()
            root = hmac.digest(self._secret, message, "sha256")
            self._roots.put((scope, chat), root)
        return root


def extend_key(key: bytes, segment: Segment) -> bytes:
    """The key of the prompt that has `segment` after the prompt of `key`. All that is hashed has a
    fixed length, so different sequences of segments never hash the same bytes.

    An output has the tokens of the value that it becomes, so a prompt that takes that in continues
    the one that made it. A chat's markup differs, but what ends its turns tells them apart."""
    kind = PieceKind.VALUE if segment.kind is PieceKind.OUTPUT else segment.kind
    mark = b"." if segment.ends_turn else b"-"
    digest = segment.digest or text_digest(segment.text)
    return hashlib.sha256(key + kind.value + mark + digest).digest()
