"""A byte-level tokenizer: token i is byte i, then three special tokens. No model file needed."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from parrot.protocol.engine_api import SpecialIds, TokenizerResponse

UNKNOWN_ID, BOS_ID, EOS_ID = 256, 257, 258
VOCAB_SIZE = 259

_CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    vocab = {symbol: byte for byte, symbol in enumerate(_byte_symbols())}
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


def _byte_symbols() -> list[str]:
    """The printable character that byte-level BPE writes for each byte: itself where it is
    printable Latin-1, else the next free code point from 256 on (GPT-2's table)."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (byte for byte in range(256) if byte not in printable)
    moved = {byte: chr(256 + offset) for offset, byte in enumerate(others)}
    return [moved.get(byte) or chr(byte) for byte in range(256)]
