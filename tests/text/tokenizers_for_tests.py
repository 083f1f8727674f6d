"""Small tokenizers, one for each way in which tokens become text."""

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from inflight.text import Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. The dog sleeps; the fox doesn't.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "你好世界。今天天气很好。",
    "smile 😀😃 family 👨‍👩‍👧 flag 🇩🇪 thumb 👍🏽",
    "e\u0301 a\u0308 o\u0302 combining",
] * 4
SPECIAL = ["<unk>", "<s>", "</s>"]


def byte_level() -> Tokenizer:
    """Like GPT-2 and Llama 3: a token is any bytes, even parts of several characters."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=420,
            special_tokens=SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return _wrap(backend)


def straddling() -> Tokenizer:
    """A byte-level tokenizer in which each token except the single bytes ends one emoji and begins the next."""
    byte_to_character = dict(zip(range(256), _bytes_as_characters(), strict=True))
    vocabulary = {character: byte for byte, character in byte_to_character.items()}
    straddle = "😀".encode()[1:] + "😀".encode()[:1]
    vocabulary["".join(byte_to_character[byte] for byte in straddle)] = 256
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return _wrap(backend)


def byte_fallback() -> Tokenizer:
    """Like Llama 2: words with a mark for the preceding space, and a token for each byte."""
    words = [f"▁{word}" for line in CORPUS[:2] for word in line.split()]
    letters = sorted(set("▁abcdefghijklmnopqrstuvwxyz.,;:!?'") | set("ABCDEFGHIJKLMNOPQRSTUVWXYZ"))
    pieces = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *dict.fromkeys(words)]
    backend = Backend(
        models.Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], unk_id=0, byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return _wrap(backend)


def metaspace() -> Tokenizer:
    """Like T5 and XLM-R: SentencePiece without byte fallback."""
    backend = Backend(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.train_from_iterator(
        CORPUS, trainers.UnigramTrainer(vocab_size=150, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    )
    return _wrap(backend)


def word_piece() -> Tokenizer:
    """Like BERT: a space before each token that does not begin with ##."""
    backend = Backend(models.WordPiece(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s+"), "removed")
    backend.decoder = decoders.WordPiece()
    backend.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=200, special_tokens=SPECIAL, show_progress=False)
    )
    return _wrap(backend)


def slow_bytes() -> Tokenizer:
    """A tokenizer in Python; bytes that form no character are omitted from its text."""
    return Tokenizer(ByT5Tokenizer(extra_ids=2))


def _wrap(backend: Backend) -> Tokenizer:
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    backend.add_special_tokens(["<reserved>"])  # special, although it has no role: decoding skips it, too
    backend.add_tokens([AddedToken("<tool>", normalized=False)])  # added and not special: part of the text
    inner = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=True,
    )
    return Tokenizer(inner)


def _bytes_as_characters() -> list[str]:
    """GPT-2's printable stand-in for each byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    stand_ins = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [stand_ins[byte] for byte in range(256)]


ALL = {make.__name__: make() for make in (byte_level, straddling, byte_fallback, metaspace, word_piece, slow_bytes)}
