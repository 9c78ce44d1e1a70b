"""Words that are one token each."""

import random
import re
from collections.abc import Sequence

from tokenizers import Tokenizer

_WORD = re.compile(r"[a-z]{3,8}")
_MAX_WORDS = 4096
_TRIAL = 64  # Words that are checked together.


def one_token_words(tokenizer_json: str, seed: int = 0) -> list[str]:
    """Texts " word" (or single letters, if the vocabulary has no words) whose sequences have one
    token each. Raises `ValueError` if the tokenizer has too few."""
    tokenizer = Tokenizer.from_str(tokenizer_json)
    candidates = _word_candidates(tokenizer) or [chr(i) for i in range(ord("a"), ord("z") + 1)]
    random.Random(seed).shuffle(candidates)
    words: list[str] = []
    for start in range(0, len(candidates), _TRIAL):
        if len(words) >= _MAX_WORDS:
            break
        trial = candidates[start : start + _TRIAL]
        words += trial if _is_exact(tokenizer, trial) else _exact_ones(tokenizer, trial)
    if len(words) < 8 or not _is_exact(tokenizer, words):
        raise ValueError("the tokenizer has too few words of one token")
    return words


def _word_candidates(tokenizer: Tokenizer) -> list[str]:
    """Words of letters that the vocabulary has with a space before them, in any model family."""
    tokens = sorted(tokenizer.get_vocab())
    return [
        " " + token[1:]
        for token in tokens
        if token[:1] in (" ", "\u0120", "\u2581") and _WORD.fullmatch(token[1:])
    ]


def _exact_ones(tokenizer: Tokenizer, trial: Sequence[str]) -> list[str]:
    return [word for word in trial if _is_exact(tokenizer, [word, word])]


def _is_exact(tokenizer: Tokenizer, words: Sequence[str]) -> bool:
    """Compared with the same text twice, because some tokenizers add a token at the beginning."""
    text = "".join(words)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    twice = tokenizer.encode(text + text, add_special_tokens=False).ids
    is_counted = len(twice) - len(ids) == len(words) and 0 <= len(ids) - len(words) <= 1
    return is_counted and tokenizer.decode(ids).strip() == text.strip()
