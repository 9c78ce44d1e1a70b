"""Refusing what can never run, before anything has changed."""

from dataclasses import dataclass

from parrot.engine.core.contexts import Context, ContextTree
from parrot.engine.core.jobs import EngineRequest, Piece
from parrot.protocol.engine_api import NO_PARENT
from parrot.protocol.errors import InvalidRequest, NotFound, PromptTooLong


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """`max_context_len`: tokens of one context that fit both the model and the KV pool."""

    max_context_len: int
    vocab_size: int

    def check(self, request: EngineRequest, tree: ContextTree) -> None:
        """Raise if a token, a parent or a length is already known to be impossible. What is not
        known yet (a parent still generates) is checked when the job opens."""
        sampling = request.sampling
        if sampling is not None and sampling.logit_bias:
            self._check_token(max(sampling.logit_bias), "logit_bias")
        num_top = request.num_scored if sampling is None else sampling.logprobs
        if (num_top or 0) > self.vocab_size:
            text = f"there are {self.vocab_size} tokens, not {num_top}"
            raise InvalidRequest(text, param="logprobs")
        for ids in request.drafts.texts:
            self._check_token(max(ids, default=0), "drafts")
        lengths: dict[int, int] = {}
        creators: dict[int, Piece] = {}
        last = len(request.pieces) - 1
        for index, piece in enumerate(request.pieces):
            if piece.token_ids:
                self._check_token(max(piece.token_ids), "token_ids")
            if piece.public_len > len(piece.token_ids):
                text = f"{piece.public_len} of {len(piece.token_ids)} tokens cannot be public"
                raise InvalidRequest(text, param="public_len")
            if (context := tree.get(piece.context_id)) is None:
                _check_fork(piece, creators.setdefault(piece.context_id, piece))
                _check_salt(tree.get(piece.parent_id), request, "parent_context_id")
            else:
                _check_salt(context, request, "context_id")
            length = _length_before(piece, lengths, tree) + len(piece.token_ids)
            self.check_length(length, request.sampling is not None and index == last)
            lengths[piece.context_id] = length

    def check_length(self, length: int, generates: bool) -> None:
        """Raise `PromptTooLong` if a context of that length, and one generated token, cannot be."""
        if length + generates > self.max_context_len:
            raise PromptTooLong(
                f"a context of {length} tokens does not fit this engine: at most "
                f"{self.max_context_len}, with the first generated token"
            )

    def _check_token(self, token_id: int, param: str) -> None:
        if token_id >= self.vocab_size:
            text = f"token id {token_id} is outside of the vocabulary of {self.vocab_size}"
            raise InvalidRequest(text, param=param)


def _check_salt(context: Context | None, request: EngineRequest, param: str) -> None:
    """Ids are easily guessed: what others have is to the request as if it did not exist."""
    if context is not None and context.salt != request.cache_salt:
        raise NotFound(f"no context {context.context_id} of this salt", param=param)


def _check_fork(piece: Piece, creator: Piece) -> None:
    if not piece.repeats_fork(creator):
        raise InvalidRequest(
            f"context {piece.context_id} cannot be forked from context {piece.parent_id}: an "
            "earlier piece of the request creates it otherwise",
            param="parent_context_id",
        )


def _length_before(piece: Piece, lengths: dict[int, int], tree: ContextTree) -> int:
    """Tokens that the piece's context will have at least, before the piece."""
    if (length := _length_of(piece.context_id, lengths, tree)) is not None:
        return length
    if piece.parent_id == NO_PARENT:
        return 0
    parent_length = _length_of(piece.parent_id, lengths, tree)
    if parent_length is None:
        raise NotFound(f"no context {piece.parent_id} to fork from", param="parent_context_id")
    if piece.parent_len is None:
        return parent_length
    parent = tree.get(piece.parent_id)
    may_grow = parent is None or parent.jobs or (parent.fork and parent.fork.length is None)
    if parent_length < piece.parent_len and not may_grow:
        raise NotFound(
            f"context {piece.parent_id} has {parent_length} tokens, cannot fork it at "
            f"{piece.parent_len}",
            param="parent_len",
        )
    return piece.parent_len


def _length_of(context_id: int, lengths: dict[int, int], tree: ContextTree) -> int | None:
    if context_id in lengths:
        return lengths[context_id]
    context = tree.get(context_id)
    if context is None:
        return None
    added = sum(len(job.piece.token_ids) for job in context.jobs if not job.is_open)
    return context.num_known + added
