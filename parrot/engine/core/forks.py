"""Forks that wait until their parents have computed what they take."""

from collections.abc import Iterator

from parrot.engine.core.contexts import Context, ContextTree, Fork
from parrot.engine.core.jobs import Job, Piece


class PendingForks:
    """The contexts whose fork has not been carried out, in order of their creation."""

    def __init__(self, tree: ContextTree) -> None:
        self._tree = tree
        self._children: dict[Context, None] = {}

    def __len__(self) -> int:
        return len(self._children)

    def __contains__(self, context: Context) -> bool:
        return context in self._children

    def __iter__(self) -> Iterator[tuple[Context, Fork]]:
        """Iterates over a snapshot of the contexts, so the loop may carry forks out."""
        for child in list(self._children):
            assert child.fork is not None, f"context {child.context_id} is forked already"
            yield child, child.fork

    def of(self, parent: Context) -> list[tuple[Context, Fork]]:
        return [(child, fork) for child, fork in self if fork.parent is parent]

    def wanting(self, job: Job) -> list[Context]:
        """The forks that want all tokens of the job's context, those of the job included."""
        forks = self.of(job.context)
        return [c for c, fork in forks if fork.after is not None and fork.after >= job.job_id]

    def create(self, piece: Piece) -> Context:
        """Create the context of a piece whose parent exists."""
        parent = self._tree.get(piece.parent_id)
        assert parent is not None, f"context {piece.parent_id} vanished"
        length = piece.parent_len
        fork = _fork_of_all(parent) if length is None else Fork(parent, length, None)
        child = self._tree.create(piece.context_id, fork)
        self._children[child] = None
        return child

    def settle_lengths(self, job: Job) -> None:
        """The job has left its context: forks that want all tokens up to its end now want those up
        to the end of the job before it, or know how many there are."""
        for child, fork in self.of(job.context):
            if fork.after == job.job_id:
                child.fork = _fork_of_all(job.context, before=job)

    def carry_out(self, child: Context, length: int) -> None:
        del self._children[child]
        self._tree.carry_out_fork(child, length)

    def discard(self, child: Context) -> None:
        """The child is about to be freed."""
        self._children.pop(child, None)


def _fork_of_all(parent: Context, before: Job | None = None) -> Fork:
    """A fork of all that the parent has once its jobs (those that came before one) have ended."""
    jobs = [job for job in parent.jobs if before is None or job.job_id < before.job_id]
    if jobs:
        return Fork(parent, None, jobs[-1].job_id)
    # If it has no tokens yet, since it waits for its own fork, this is the same fork again.
    return parent.fork or Fork(parent, len(parent.token_ids), None)
