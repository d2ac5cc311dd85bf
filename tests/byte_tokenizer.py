"""A small byte-level tokenizer: every byte is a token, so every text and every border can be had."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.trainers import BpeTrainer


def byte_level() -> Tokenizer:
    """Bytes, a few merges, one special token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=275,
        special_tokens=[AddedToken("<end>", special=True)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["one stop two STOP three", "the saguaro grows"] * 3, trainer)
    return tokenizer
