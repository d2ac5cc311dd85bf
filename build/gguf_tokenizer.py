"""The tokenizer a GGUF file describes, as a Hugging Face tokenizer.

GGUF only names the rule by which text is cut before merging ("pre"). A name whose rule is not known here is refused,
because a nearly right tokenizer gives nearly right answers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from saguaro.build.gguf_file import GgufFile
from saguaro.build.weights import save_tokenizer

# Kinds of token, as GGUF numbers them.
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5

_SPLITS: Final = ("qwen2", "llama-bpe", "smollm")

# Tokens that end an answer besides those the file states, where a vocabulary has them.
_END_TOKENS: Final = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>")


class GgufTokenizer:
    """Byte-level BPE from a file's metadata. Padding entries (unused ids) are no tokens. Raises ModelError."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        model, self._split = file.get("tokenizer.ggml.model", str), file.get("tokenizer.ggml.pre", str)
        if model != "gpt2" or self._split not in _SPLITS:
            raise file.refusal(f"its tokenizer ({model}, {self._split}) is none of {', '.join(_SPLITS)}")
        tokens = file.items("tokenizer.ggml.tokens", str)
        kinds = file.items("tokenizer.ggml.token_type", int)
        if len(kinds) != len(tokens):
            raise file.damage(f"it has {len(tokens)} tokens but {len(kinds)} kinds of token")
        self._tokens = {i: token for i, token in enumerate(tokens) if kinds[i] != _UNUSED}
        self._control = {i for i, kind in enumerate(kinds) if kind == _CONTROL}
        self._user_defined = {i for i, kind in enumerate(kinds) if kind == _USER_DEFINED}

    def end_ids(self) -> list[int]:
        """Ids that end an answer, the file's own first."""
        stated = (self._special(name) for name in ("eos", "eot", "eom"))
        by_name = (i for i in sorted(self._control) if self._tokens[i] in _END_TOKENS)
        return list(dict.fromkeys(index for index in (*stated, *by_name) if index is not None))

    def write(self, directory: Path, max_length: int) -> None:
        """Write tokenizer.json, tokenizer_config.json and the chat template."""
        names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
        special = {name: self._special(key) for name, key in names.items()}
        save_tokenizer(
            self._build(),
            directory,
            chat_template=self._file.optional("tokenizer.chat_template", str),
            model_max_length=max_length,
            **{name: self._tokens[index] for name, index in special.items() if index is not None},
        )

    def _build(self) -> Tokenizer:
        vocabulary = {token: index for index, token in self._tokens.items()}
        # Llama 3 takes a whole word that is in the vocabulary even where no merge leads to it.
        whole_words = self._split == "llama-bpe"
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=self._merges(vocabulary), ignore_merges=whole_words))
        if self._split == "qwen2":
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = _pre_tokenizer(self._split)
        tokenizer.decoder = decoders.ByteLevel()
        begin, stated = self._special("bos"), self._file.optional("tokenizer.ggml.add_bos_token", bool)
        if begin is not None and (self._split == "llama-bpe" if stated is None else stated):
            token = self._tokens[begin]
            tokenizer.post_processor = processors.TemplateProcessing(
                single=f"{token} $A", pair=f"{token} $A {token} $B", special_tokens=[(token, begin)]
            )
        tokenizer.add_tokens(
            [
                AddedToken(self._tokens[i], special=i in self._control, normalized=False)
                for i in sorted(self._control | self._user_defined)
            ]
        )
        return tokenizer

    def _merges(self, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
        merges = []
        for merge in self._file.items("tokenizer.ggml.merges", str):
            first, _, second = merge.partition(" ")
            if not {first, second, first + second} <= vocabulary.keys():
                raise self._file.damage(f"it merges {merge!r} although its tokens lack a part of it")
            merges.append((first, second))
        return merges

    def _special(self, name: str) -> int | None:
        index = self._file.optional(f"tokenizer.ggml.{name}_token_id", int)
        if index is not None and index not in self._tokens:
            raise self._file.damage(f"its {name} token {index} is not one of its tokens")
        return index


def _pre_tokenizer(split: str) -> pre_tokenizers.PreTokenizer:
    """How a vocabulary's merges expect text to be cut."""
    if split == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    number = r"\p{N}{1,3}" if split == "llama-bpe" else r"\p{N}"
    word = r"[^\r\n\p{L}\p{N}]?\p{L}+"
    other = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    pieces = pre_tokenizers.Split(Regex(rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|{word}|{number}|{other}"), behavior="isolated")
    return pre_tokenizers.Sequence([pieces, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
