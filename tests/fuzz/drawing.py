"""Draw a random trace from a seed. The same seed gives the same trace."""

import random
from typing import Any

from tests.fuzz.traces import Act, Ask, Op, Piece, Setup, Trace

BACKGROUND = 2**31
POISON = 258  # a token that the tokenizer does not know
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def draw_trace(seed: int) -> Trace:
    rng = random.Random(seed)
    return _Draw(rng, draw_setup(rng)).trace(rng.choice([20, 40, 80]))


def draw_setup(rng: random.Random) -> Setup:
    block_size = rng.choice([1, 4, 4, 16])
    max_seq_len = rng.choice([96, 200])
    least = -(-max_seq_len // block_size)
    num_blocks = rng.choice([3 * least // 4, least + 2, 2 * least, 6 * least])
    prefix_caching = rng.random() < 0.8
    host = rng.choice([0, num_blocks, 4 * num_blocks]) if prefix_caching else 0
    return Setup(
        num_blocks=max(4, num_blocks),
        block_size=block_size,
        num_host_blocks=host,
        max_seq_len=max_seq_len,
        chunk=rng.choice([None, None, 1, 7, 32]),
        max_batch=rng.choice([1, 2, 8, 16, 32]),
        max_batched=rng.choice([4, 16, 64, 256]),
        max_total=rng.choice([None, None, None, 64, 300]),
        mixed_fill=rng.choice([2, 512]),
        policy=rng.choice(["priority", "priority", "fcfs"]),
        prefix_caching=prefix_caching,
        max_draft=rng.choice([0, 4, 32]),
        launches=rng.random() < 0.5,
        reports_late=rng.random() < 0.5,
        shares_prefix=rng.random() < 0.7,
        poison=rng.choice([None, None, POISON]),
        seed=rng.randrange(1000),
    )


class _Draw:
    def __init__(self, rng: random.Random, setup: Setup) -> None:
        self.rng = rng
        self.setup = setup
        self.ops: list[Op] = []
        self.beginnings = [self._text(rng.choice([2, 8, 20, 35])) for _ in range(3)]
        self.salt_of: dict[int, str] = {}
        self.num_asked = 0
        self.next_context = 0

    def trace(self, num_ops: int) -> Trace:
        disturbs = self.rng.choice([0.3, 1.0, 2.0])
        kinds = [self.ask, self.steps, self.cancel, self.free, self.follow, self.leave]
        weights = [10.0, 8.0, 2 * disturbs, 2 * disturbs, 1.0, 0.7]
        kinds += [self.fault, self.reset]
        weights += [0.7 * disturbs, 0.06 * disturbs]
        for _ in range(num_ops):
            self.rng.choices(kinds, weights)[0]()
        return Trace(self.setup, tuple(self.ops))

    def steps(self) -> None:
        self.ops.append(Act("steps", self.rng.choice([1, 1, 3, 6, 20])))

    def cancel(self) -> None:
        self._about("cancel")

    def follow(self) -> None:
        self._about("follow")

    def leave(self) -> None:
        self._about("leave")

    def fault(self) -> None:
        self.ops.append(Act("fault"))

    def reset(self) -> None:
        self.salt_of.clear()
        self.ops.append(Act("reset"))

    def free(self) -> None:
        if self.salt_of:
            count = min(len(self.salt_of), self.rng.randint(1, 3))
            chosen = self.rng.sample(sorted(self.salt_of), count)
            for context in chosen:
                del self.salt_of[context]
            self.ops.append(Act("free", contexts=tuple(chosen)))

    def _about(self, kind: Any) -> None:
        """Add an action on one of the last requests, since earlier ones have probably ended."""
        if self.num_asked:
            last = self.rng.choice([1, 4, 12])
            first = max(1, self.num_asked - last + 1)
            self.ops.append(Act(kind, self.rng.randint(first, self.num_asked)))

    def ask(self) -> None:
        rng = self.rng
        self.num_asked += 1
        kind = rng.choices(["generate", "fill", "background", "read"], [10, 3, 1, 0.5])[0]
        salt = rng.choice(["", "", "", "other"])
        if kind == "read":
            pieces = [Piece(-10 - self.num_asked, self._text(rng.randint(1, 50)))]
            self.ops.append(
                Ask(self.num_asked, tuple(pieces), salt=salt, read=rng.choice(["mean", "scores"]))
            )
            return
        count = rng.choice([1, 1, 2, 3]) if kind == "generate" else 1
        pieces = [self._piece(salt) for _ in range(count)]
        sampling = self._sampling() if kind == "generate" else None
        priority = BACKGROUND if kind == "background" else rng.choice([0, 0, 0, -1, 5])
        stream = kind == "generate" and rng.random() < 0.4
        drafts: tuple[tuple[int, ...], ...] = ()
        if sampling and self.setup.max_draft and rng.random() < 0.4:
            drafts = tuple(self._text(rng.randint(1, 40)) for _ in range(rng.choice([1, 2])))
        echoes = bool(sampling and self.setup.max_draft) and rng.random() < 0.4
        self.ops.append(
            Ask(self.num_asked, tuple(pieces), sampling, priority, stream, salt, drafts, echoes)
        )

    def _piece(self, salt: str) -> Piece:
        rng = self.rng
        usable = [c for c, of in self.salt_of.items() if of == salt]
        kind = rng.choice(["root", "root", "fork", "fork", "append"])
        if kind != "root" and usable:
            chosen = rng.choice(usable[-8:])
            if kind == "append":
                return Piece(chosen, self._text(rng.choice([0, 1, 4, 12])))
            length = rng.choice([None, None, None, 0, 1, 4, 8, 13, 40])
            tokens = self._text(rng.choice([0, 1, 4, 12]) or int(length == 0))
            return Piece(self._new(salt), tokens, chosen, length)
        tokens = (*rng.choice(self.beginnings), *self._text(rng.choice([1, 3, 20])))
        return Piece(self._new(salt), tokens)

    def _new(self, salt: str) -> int:
        self.next_context += 1
        self.salt_of[self.next_context] = salt
        return self.next_context

    def _text(self, length: int) -> tuple[int, ...]:
        """Return letters with repetitions."""
        rng = self.rng
        found: list[int] = []
        while len(found) < length:
            if found and rng.random() < 0.3:
                at = rng.randrange(len(found))
                found += found[at : at + 6]
            else:
                found.append(rng.choice(b"abcdef {}:0123"))
        if found and self.setup.poison is not None and rng.random() < 0.02:
            found[rng.randrange(len(found))] = self.setup.poison
        return tuple(found[:length])

    def _sampling(self) -> dict[str, Any]:
        rng = self.rng
        found: dict[str, Any] = {"max_gen_length": rng.choice([1, 3, 8, 16, 40])}
        if rng.random() < 0.6:
            found["temperature"] = 0.0
        else:
            found |= {"temperature": rng.choice([0.5, 1.0, 1.5]), "seed": rng.randrange(2**40)}
            found |= rng.choice([{}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05}])
        if rng.random() < 0.25:
            found |= rng.choice(
                [
                    {"presence_penalty": 0.8},
                    {"frequency_penalty": 1.0, "repetition_penalty": 1.2},
                    {"repetition_penalty": 1.3},
                    {"logit_bias": {"97": 4.0, "98": 3.5, "32": 3.0}},
                    {"logit_bias": {"97": 60.0, "98": 59.0}, "frequency_penalty": 0.4},
                ]
            )
        if rng.random() < 0.25:
            found["stop_str"] = rng.choice(["a", ["b", "cd"], "\ufffd", [" ", "e"]])
        if rng.random() < 0.2:
            found["stop_token_ids"] = [rng.randrange(256) for _ in range(12)]
        if rng.random() < 0.2:
            found["ignore_tokenizer_eos"] = True
        if rng.random() < 0.2:
            found["logprobs"] = rng.choice([0, 3])
        if rng.random() < 0.25:
            found |= rng.choice(
                [
                    {"json_schema": SCHEMA},
                    {"regex": "[a-f]{2,9}(x|yz)*"},
                    {"regex": "(abc|abd)+[0-9]?"},
                    {"choices": ["abc", "abd", "fed cba"]},
                    {"grammar": 'start: "a" start "b" | "c"'},
                ]
            )
        return found
