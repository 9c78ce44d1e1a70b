"""The KV that a server of another maker is believed to keep of what it has computed.

    used last                                     used first
    |-- tip --|-- tip --|---- tip ----|-- tip --|  dropped ..
     '------------- as much as it keeps --------'

Such a server frees by itself what was not used for longest, whatever ServeCore expects of it. So
nothing is gained by other orders here: what it must have dropped is retired, so that nobody is sent
to where it was. Contexts that the ledger has freed count until they would be dropped, since the
server does not know that nobody wants them any more. A context that nothing here was forked from
later is a *tip*, and stands for one prompt."""

from collections.abc import Callable, Collection

from parrot.serve.contexts.index import Context

_HORIZON_S = 60.0  # what is expected to be used later than this counts for less


class Kept:
    """The contexts on one engine whose KV its server is believed to have, the one used last at the
    end. Sizes are in the ledger's units."""

    def __init__(
        self,
        size: Callable[[Context], int],
        next_use: Callable[[Context, float], float],
        drop: Callable[[Context], None],
    ) -> None:
        """`next_use`: when a context is expected to be used, seen from a time. `drop` is told of
        those that the server must have freed."""
        self.max_size: int | None = None
        self.max_prompts: int | None = None
        self._size = size
        self._next_use = next_use
        self._drop = drop
        self._sizes: dict[Context, int] = {}
        self._tips: dict[Context, None] = {}  # as far as prompts are counted: few
        self._used = 0
        self._gone: set[Context] = set()  # of these, those that the ledger has freed

    def bound(self, max_size: int | None, max_prompts: int | None) -> None:
        """The server keeps so much; None: any amount."""
        self.max_size, self.max_prompts = max_size, max_prompts

    def use(self, context: Context) -> None:
        """A run reads all of it and of what it was forked from, or has changed its size."""
        if self.max_size is None and self.max_prompts is None:
            return
        for link in context.lineage():
            self._remove(link)
            self._sizes[link] = size = self._size(link)
            self._used += size
        if self.max_prompts is not None and not self._tips_below(context):
            self._tips[context] = None

    def freed(self, context: Context) -> None:
        """The ledger has freed it. What was never computed takes no room."""
        if context not in self._sizes:
            return
        if context.is_computed:
            self._gone.add(context)
            return
        was_tip, parent = context in self._tips, context.parent
        self._remove(context)
        if was_tip and parent in self._sizes and not self._tips_below(parent):
            self._tips[parent] = None

    def trim(self) -> None:
        """Drop what cannot be kept, but for what runs use. Nobody may be about to use the rest."""
        while self.max_prompts is not None and len(self._tips) > self.max_prompts:
            idle = [tip for tip in self._tips if not tip.users]
            if not idle:
                break
            self._leave(self._only_below(next(filter(self._is_continued, idle), idle[0])))
        while self.max_size is not None and self._used > self.max_size:
            oldest = next((context for context in self._sizes if not context.pins), None)
            if oldest is None:
                break
            self._leave([oldest])

    def loss(self, match: Context | None, num_new: int, now: float) -> float:
        """The size of what would be dropped for a prompt that begins with what `match` has, and has
        `num_new` more: what is expected to be used again only later counts for less."""
        safe = set() if match is None else set(match.lineage())
        lost: list[Context] = []
        if self._tips and self.max_prompts is not None and len(self._tips) >= self.max_prompts:
            below = [] if match is None else self._tips_below(match)
            lost = self._only_below(below[0] if below else next(iter(self._tips)))
        if self.max_size is not None:
            excess = self._used + num_new - self.max_size
            for context, size in self._sizes.items():
                if excess <= 0:
                    break
                if context not in safe:
                    lost.append(context)
                    excess -= size
        wanted = [c for c in dict.fromkeys(lost) if c not in safe and c not in self._gone]
        return sum([self._sizes[c] * self._weight(c, now) for c in wanted])

    def check_integrity(self, live: Collection[Context]) -> None:
        assert self._used == sum(self._sizes.values()), (self._used, self._sizes)
        assert self._tips.keys() <= self._sizes.keys(), self._tips
        assert all(self._tips_below(tip) == [tip] for tip in self._tips), self._tips
        assert self._gone <= self._sizes.keys(), self._gone
        assert self._gone == self._sizes.keys() - set(live), self._gone

    def _weight(self, context: Context, now: float) -> float:
        return _HORIZON_S / (_HORIZON_S + max(0.0, self._next_use(context, now) - now))

    def _is_continued(self, tip: Context) -> bool:
        """Whether a later prompt begins as this one: it has taken its place in the server."""
        later = list(self._tips)[list(self._tips).index(tip) + 1 :]
        taken = {link for other in later for link in other.lineage()}
        return not taken.isdisjoint(tip.lineage())

    def _tips_below(self, context: Context) -> list[Context]:
        return [tip for tip in self._tips if context in tip.lineage()]

    def _only_below(self, tip: Context) -> list[Context]:
        """The contexts that no other prompt begins with, the tip first."""
        others = {link for other in self._tips if other is not tip for link in other.lineage()}
        return [link for link in tip.lineage() if link in self._sizes and link not in others]

    def _leave(self, contexts: Collection[Context]) -> None:
        gone = [context in self._gone for context in contexts]
        for context in contexts:
            self._remove(context)
        for context, is_gone in zip(contexts, gone, strict=True):
            if not is_gone:
                self._drop(context)

    def _remove(self, context: Context) -> None:
        self._used -= self._sizes.pop(context, 0)
        self._tips.pop(context, None)
        self._gone.discard(context)
