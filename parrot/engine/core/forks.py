"""Forks that wait until their parents have computed what they take."""

from collections.abc import Iterator

from parrot.engine.core.contexts import Context, ContextTree, Fork
from parrot.engine.core.jobs import Job, JobLines, Piece


class PendingForks:
    """The contexts whose fork has not been carried out, in order of their creation."""

    def __init__(self, tree: ContextTree, lines: JobLines) -> None:
        self._tree = tree
        self._lines = lines
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
        child = self._tree.create(piece.context_id, self._fork(parent, piece.parent_len))
        self._children[child] = None
        return child

    def _fork(self, parent: Context, length: int | None) -> Fork:
        if length is not None:
            return Fork(parent, length, None)
        if line := self._lines.line(parent):
            return Fork(parent, None, line[-1].job_id)
        if parent.fork is not None:  # nothing was ever added to it: the same fork again
            return parent.fork
        return Fork(parent, len(parent.token_ids), None)

    def settle_lengths(self, job: Job) -> None:
        """The job has left its context's line: forks that want all tokens up to its end now want
        those up to the end of the job before it, or know how many there are."""
        for child, fork in self.of(job.context):
            if fork.after == job.job_id:
                child.fork = self._fork_up_to(job)

    def _fork_up_to(self, job: Job) -> Fork:
        parent = job.context
        before = [other.job_id for other in self._lines.line(parent) if other.job_id < job.job_id]
        if before:
            return Fork(parent, None, max(before))
        return parent.fork or Fork(parent, len(parent.token_ids), None)

    def carry_out(self, child: Context, length: int) -> None:
        del self._children[child]
        self._tree.carry_out_fork(child, length)

    def discard(self, child: Context) -> None:
        """The child is about to be freed."""
        self._children.pop(child, None)
