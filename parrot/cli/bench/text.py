"""Prompt texts of given lengths, which differ between the sides of a comparison."""

import hashlib
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class PromptText:
    """A part of a prompt and its length in tokens. `is_data`: the caller passes it in at run time;
    otherwise the part belongs to the function, like an instruction."""

    content: str
    tokens: int
    is_data: bool = False


class TextSource:
    """Random words. The same words, salt and key give the same text. Another salt gives another
    text of the same number of words."""

    def __init__(
        self, words: Sequence[str], *, salt: object = 0, tokens_per_word: float = 1.0
    ) -> None:
        """`tokens_per_word`: the mean, by the tokenizer of the model."""
        self._words = words
        self._salt = salt
        self._tokens_per_word = tokens_per_word

    def salted(self, salt: object) -> "TextSource":
        return TextSource(self._words, salt=salt, tokens_per_word=self._tokens_per_word)

    def of_side(self, place: int) -> "TextSource":
        """The texts for one side of a comparison. At each position, two sides have different words
        of the same length in bytes. Texts that are equal on one side are equal on every side."""
        words = substituted(self._words, place)
        return TextSource(words, salt=self._salt, tokens_per_word=self._tokens_per_word)

    def constant(self, tokens: int, *key: object) -> PromptText:
        rng = random.Random(hashlib.sha256(repr((self._salt, key)).encode()).digest())
        num_words = max(1, round(tokens / self._tokens_per_word))
        return PromptText("".join(rng.choices(self._words, k=num_words)), tokens)

    def data(self, tokens: int, *key: object) -> PromptText:
        return replace(self.constant(tokens, *key), is_data=True)

    def document(self, number: int, tokens: int, chunk: int) -> list[PromptText]:
        """A document of `tokens` in chunks, the last of which may be shorter."""
        sizes = [min(chunk, tokens - start) for start in range(0, tokens, chunk)]
        return [self.data(n, "document", number, i, chunk) for i, n in enumerate(sizes)]


def substituted(words: Sequence[str], shift: int) -> list[str]:
    """For each word, the word that is `shift` places later among the words of its length."""
    alike: dict[int, list[int]] = defaultdict(list)
    for at, word in enumerate(words):
        alike[len(word.encode())].append(at)
    found = list(words)
    for places in alike.values():
        for number, at in enumerate(places):
            found[at] = words[places[(number + shift) % len(places)]]
    return found


# Words that most vocabularies have as one token each, with the space before them. At least 11 words
# have the same length, so that 11 sides can have different words.
_WORDS = """
about after again all also always and another any area around ask away back because become before
begin being best better between big book both bring but call came can car change child city close
come company could country course day did do does door down each early end even every face fact
family far feel few find first follow food for form found four friend from full game gave get girl
give go good great group grow had half hand hard has have head hear help here high him hold home
hour house how human idea in into it job just keep kind know land large last late law lead learn
leave left less let letter life light like line list little live local long look lost made main make
man many may mean meet member men mind minute money month more morning most mother move much music
must name near need never new next night no not now number of off office often old on once one only
open or order other our out over own page paper part party past pay people place plan play point
power problem public put read real reason right river road room run said same saw say school sea see
seem service set she short should show side since small so some sound state still stop story street
such sun sure system table take talk team tell than that the them then there these they thing think
third this those thought three through time to today told too took top town tree true turn two under
until up us use very voice walk want war was watch water way we week well went were what when where
which while white who whole why will with without woman word work world would write year yes yet
young your
"""
COMMON_WORDS = [" " + word for word in _WORDS.split()]
