"""Reads the tokenizer of a model for ServeCore: tokenizer.json, special ids and chat template."""

import json
from collections.abc import Mapping, Sequence
from itertools import chain, islice, product
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from parrot.protocol.engine_api import SpecialIds, TokenizerResponse
from parrot.utils.config import ConfigError

_MAX_FILE = 2**27  # Largest size of a text file, in bytes.
_MAX_TOKEN = 1024  # Most characters of a token whose merges are derived from scores.
_CONTROL, _USER_DEFINED = 3, 4  # GGUF token types

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")

# The pattern that splits text before BPE, by `tokenizer.ggml.pre`; None: GPT-2's own pattern.
_SPLITS: dict[str, str | None] = {
    "default": None,
    "gpt-2": None,
    "llama-bpe": _LLAMA3_SPLIT,
    "llama3": _LLAMA3_SPLIT,
    "llama-v3": _LLAMA3_SPLIT,
    "qwen2": _QWEN2_SPLIT,
    "deepseek-r1-qwen": _QWEN2_SPLIT,
}
_SINGLE_DIGITS = ("smollm",)

# The first tokens of `word_tokenizer`. "?" is the unknown token.
_CHARACTERS = ("?", *(chr(i) for i in (9, 10, *range(32, 127)) if chr(i) != "?"))
_WORD_LETTERS = 4  # Letters of a word of `word_tokenizer`.


def folder_tokenizer(folder: Path, config: Mapping[str, Any]) -> TokenizerResponse:
    """Read tokenizer.json, or convert the folder's other files with transformers."""
    path = folder / "tokenizer.json"
    text = _read_text(path) if path.exists() else _convert(folder)
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # noqa: BLE001  (the library raises bare Exception)
        raise ConfigError(f"{path}: not a usable tokenizer: {error}") from None
    settings = read_json(folder / "tokenizer_config.json")
    generation = read_json(folder / "generation_config.json")
    bos = _special_id(tokenizer, settings, config, "bos")
    eos = _as_ids(generation.get("eos_token_id")) + _as_ids(config.get("eos_token_id"))
    own_eos = _special_id(tokenizer, settings, {}, "eos")
    eos += [] if own_eos is None else [own_eos]
    begins_with_bos = bos is not None and tokenizer.encode("a").ids[:1] == [bos]
    return TokenizerResponse(
        tokenizer_json=text,
        chat_template=_chat_template(folder, settings),
        special_ids=SpecialIds(
            bos=bos,
            eos=list(dict.fromkeys(eos)),
            add_bos=bos is not None and bool(settings.get("add_bos_token", begins_with_bos)),
        ),
        vocab_size=int(config.get("vocab_size") or tokenizer.get_vocab_size()),
    )


def gguf_tokenizer(metadata: Mapping[str, Any], source: str) -> TokenizerResponse:
    """Rebuild the tokenizer of a GGUF file. Raises `ConfigError` for an unknown tokenizer."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama") or "tokenizer.ggml.tokens" not in metadata:
        raise ConfigError(f"{source}: tokenizer model {kind!r} is not supported; use gpt2 or llama")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    tokenizer = (
        _byte_level(metadata, tokens, source)
        if kind == "gpt2"
        else _sentencepiece(metadata, tokens)
    )
    types = metadata.get("tokenizer.ggml.token_type", ())
    added = list(zip(tokens, types, strict=False))
    tokenizer.add_special_tokens(
        [AddedToken(t, normalized=False, special=True) for t, kind in added if kind == _CONTROL]
    )
    tokenizer.add_tokens(
        [AddedToken(t, normalized=False) for t, kind in added if kind == _USER_DEFINED]
    )
    eos = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    adds_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", kind == "llama"))
    return TokenizerResponse(
        tokenizer_json=tokenizer.to_str(),
        chat_template=metadata.get("tokenizer.chat_template"),
        special_ids=SpecialIds(
            bos=bos,
            eos=list(dict.fromkeys(i for i in eos if i is not None)),
            add_bos=bos is not None and adds_bos,
        ),
        vocab_size=len(tokens),
    )


def word_tokenizer(vocab_size: int) -> TokenizerResponse:
    """A tokenizer for random weights. Each id has a distinct text, as with a real model.

        ids   0 ...... 96 | 97 ...................... vocab_size - 1
        text  ASCII chars | " aaaa", " aaab", ... one word each

    Text of these words is encoded and decoded exactly. In other text each character is a token, and
    characters beyond ASCII become "?"."""
    words = (" " + "".join(letters) for letters in product(ascii_lowercase, repeat=_WORD_LETTERS))
    if vocab_size > len(_CHARACTERS) + len(ascii_lowercase) ** _WORD_LETTERS:
        raise ConfigError(f"a vocabulary of {vocab_size} is too large for `load_format: dummy`")
    texts = islice(chain(_CHARACTERS, words), vocab_size)
    vocab = {text: i for i, text in enumerate(texts)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=[], ignore_merges=True, unk_token=_CHARACTERS[0])
    )
    word = Regex(f" [a-z]{{{_WORD_LETTERS}}}")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(word, behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return TokenizerResponse(
        tokenizer_json=tokenizer.to_str(), special_ids=SpecialIds(), vocab_size=vocab_size
    )


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str], source: str) -> Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in _SPLITS and pre not in _SINGLE_DIGITS:
        known = ", ".join((*_SPLITS, *_SINGLE_DIGITS))
        raise ConfigError(f"{source}: pre-tokenizer {pre!r} is not supported; known: {known}")
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    split = _SPLITS.get(pre)
    steps: list[Any] = []
    if pre in _SINGLE_DIGITS:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if split is not None:
        steps.append(pre_tokenizers.Split(Regex(split), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: Mapping[str, Any], tokens: Sequence[str]) -> Tokenizer:
    """Llama 2's tokenizer: BPE with merges derived from scores, and unknown characters as bytes."""
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = _merges_from_scores(vocab, metadata["tokenizer.ggml.scores"])
    unknown = tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    steps: list[Any] = [normalizers.Replace(" ", "\u2581")]
    tail: list[Any] = []
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend("\u2581"))
        tail.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *tail]
    )
    return tokenizer


def _merges_from_scores(vocab: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """All pairs of tokens whose concatenation is a token, highest score first."""
    if any(len(token) > _MAX_TOKEN for token in vocab):
        raise ConfigError(f"a token of the vocabulary has more than {_MAX_TOKEN} characters")
    found = [
        (-scores[i], vocab[token[:cut]], vocab[token[cut:]], token[:cut], token[cut:])
        for token, i in vocab.items()
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    return [(left, right) for _, _, _, left, right in sorted(found)]


def _convert(folder: Path) -> str:
    from transformers import AutoTokenizer  # Takes seconds to import, and is rarely needed.

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder}: no usable tokenizer: {error}") from None
    return str(tokenizer.backend_tokenizer.to_str())


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.exists():
        return _read_text(path)
    template = settings.get("chat_template")
    if isinstance(template, list):  # Several templates with names.
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def _special_id(
    tokenizer: Tokenizer, settings: Mapping[str, Any], config: Mapping[str, Any], name: str
) -> int | None:
    token = settings.get(f"{name}_token")
    content = token.get("content") if isinstance(token, Mapping) else token
    if isinstance(content, str):
        return tokenizer.token_to_id(content)
    ids = _as_ids(config.get(f"{name}_token_id"))
    return ids[0] if ids else None


def _as_ids(value: object) -> list[int]:
    if value is None:
        return []
    return [int(i) for i in value] if isinstance(value, list) else [int(value)]  # type: ignore[call-overload]


def _read_text(path: Path) -> str:
    if not path.is_file():  # Opening a pipe would block.
        raise FileNotFoundError(path)
    if path.stat().st_size > _MAX_FILE:
        raise ConfigError(f"{path}: is larger than {_MAX_FILE} bytes")
    return path.read_text(encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if the file does not exist."""
    try:
        content = json.loads(_read_text(path))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: not a JSON object")
    return content
