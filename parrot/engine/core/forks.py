"""Forks that wait until their parents have computed what they take."""

from parrot.engine.core.contexts import Context, ContextTree, Fork
from parrot.engine.core.jobs import Job, Piece
from parrot.protocol.engine_api import NO_PARENT


def forks_of(tree: ContextTree, parent: Context) -> list[tuple[Context, Fork]]:
    """The forks of a context that have not been carried out, in order of their creation."""
    return [(c, c.fork) for c in tree.pending if c.fork is not None and c.fork.parent is parent]


def forks_wanting(tree: ContextTree, job: Job) -> list[Context]:
    """The forks that want all tokens of the job's context, those of the job included."""
    forks = forks_of(tree, job.context)
    return [c for c, fork in forks if fork.after is not None and fork.after >= job.job_id]


def create_context(tree: ContextTree, piece: Piece, salt: str) -> Context:
    """Create the context of a piece whose parent, if it has one, exists."""
    if piece.parent_id == NO_PARENT:
        return tree.create(piece.context_id, salt=salt, public_len=piece.public_len)
    parent, length = tree.get(piece.parent_id), piece.parent_len
    assert parent is not None, f"context {piece.parent_id} vanished"
    fork = _fork_of_all(parent) if length is None else Fork(parent, length, None)
    return tree.create(piece.context_id, fork)


def settle_lengths(tree: ContextTree, job: Job) -> None:
    """The job has left its context: forks that want all tokens up to its end now want those up to
    the end of the job before it, or know how many there are."""
    for child, fork in forks_of(tree, job.context):
        if fork.after == job.job_id:
            child.fork = _fork_of_all(job.context, before=job)


def _fork_of_all(parent: Context, before: Job | None = None) -> Fork:
    """A fork of all that the parent has once its jobs (those that came before one) have ended."""
    jobs = [job for job in parent.jobs if before is None or job.job_id < before.job_id]
    if jobs:
        return Fork(parent, None, jobs[-1].job_id)
    # If it has no tokens yet, since it waits for its own fork, this is the same fork again.
    return parent.fork or Fork(parent, len(parent.token_ids), None)
