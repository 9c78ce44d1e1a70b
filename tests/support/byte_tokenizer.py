"""A real tokenizer.json without a download: a token per byte, plus special tokens."""

import hashlib
from collections.abc import Mapping
from types import MappingProxyType

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from parrot.protocol.engine_api import SpecialIds, TokenizerResponse

BOS, EOS = "<s>", "<|im_end|>"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer(
    *, add_bos: bool = False, chat_template: str | None = CHATML
) -> TokenizerResponse:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True) for text in (BOS, EOS, "<|im_start|>")]
    )
    bos, eos = tokenizer.token_to_id(BOS), tokenizer.token_to_id(EOS)
    return TokenizerResponse(
        tokenizer_json=tokenizer.to_str(),
        chat_template=chat_template,
        special_ids=SpecialIds(bos=bos, eos=[eos], add_bos=add_bos),
        vocab_size=tokenizer.get_vocab_size(),
    )


def plain_byte_tokenizer(
    vocab_size: int, special_tokens: Mapping[str, int] = MappingProxyType({})
) -> TokenizerResponse:
    """A tokenizer with ids 0 to 255 for bytes, then `special_tokens`. The model's vocabulary,
    `vocab_size`, may be larger."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate(alphabet)} | dict(special_tokens)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.add_special_tokens(list(special_tokens))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return TokenizerResponse(
        tokenizer_json=tokenizer.to_str(), special_ids=SpecialIds(), vocab_size=vocab_size
    )


def tokenizer_id_of(response: TokenizerResponse) -> str:
    return hashlib.sha256(response.tokenizer_json.encode()).hexdigest()
