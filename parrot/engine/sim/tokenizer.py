"""A byte-level tokenizer: token i is byte i, then three special tokens. No model file needed."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from parrot.protocol.engine_api import SpecialIds, TokenizerResponse
from parrot.utils.byte_symbols import byte_symbols

UNKNOWN_ID, BOS_ID, EOS_ID = 256, 257, 258
VOCAB_SIZE = 259

_CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    vocab = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<unk>", "<bos>", "<eos>"]
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in special])
    return tokenizer


def byte_tokenizer_response() -> TokenizerResponse:
    return TokenizerResponse(
        tokenizer_json=byte_tokenizer().to_str(),
        chat_template=_CHAT_TEMPLATE,
        special_ids=SpecialIds(bos=BOS_ID, eos=[EOS_ID], add_bos=False),
        vocab_size=VOCAB_SIZE,
    )
