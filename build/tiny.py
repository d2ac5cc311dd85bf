"""A small random model with a real tokenizer, for tests and first trials: no download, built in a second.

Equal recipes give equal bytes. Each tensor depends on its name and the seed alone, so models of different depth share
their first layers; that, and a little noise, makes drafts that are right most of the time.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.trainers import BpeTrainer
from torch import Tensor
from transformers import AutoConfig

from saguaro.build.recipe import Tiny
from saguaro.build.weights import save_tokenizer, stored_shapes
from saguaro.errors import ConfigError

_SPECIAL: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CHAT_TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SHARPNESS: Final = 4.0  # standard deviation of the logits: a clear favourite, but not a certain one
_DEPTH: Final = 0.25  # size of what a layer adds to the residual stream, so that the first layers say most

# What the tokenizer is trained on. It needs variety, not sense.
_CORPUS: Final = (
    "A saguaro grows slowly: an arm may take seventy years to appear, and a tall plant stands for two centuries.",
    "def fibonacci(count: int) -> list[int]:\n    numbers = [0, 1]\n    while len(numbers) < count:\n"
    "        numbers.append(numbers[-1] + numbers[-2])\n    return numbers[:count]\n",
    "Rain falls in summer storms; the roots lie shallow and wide, and drink within hours what must last for months.",
    "class Queue:\n    def __init__(self, limit: int = 16) -> None:\n        self.items: list[str] = []\n"
    "        self.limit = limit\n\n    def push(self, item: str) -> bool:\n        if len(self.items) >= self.limit:\n"
    "            return False\n        self.items.append(item)\n        return True\n",
    "At night the white flowers open, and bats, moths and doves carry the pollen from one ridge to the next.",
    "for index, value in enumerate(sorted(values, reverse=True)):\n    if index % 2 == 0 and value > 0:\n"
    "        print(f'{index}: {value:.2f}')\n    else:\n        continue\n",
    "Where woodpeckers have cut a hollow, owls, wrens and finches will live after them, each in its own season.",
    "import json\nfrom pathlib import Path\n\n\ndef read(path: Path) -> dict[str, object]:\n"
    "    with path.open() as file:\n        return dict(json.load(file))\n",
    "The fruit ripens before the rains: red, sweet and full of small black seeds that few will see grow into plants.",
    "SELECT name, height, age FROM plants WHERE height > 10 AND age BETWEEN 50 AND 150 ORDER BY height DESC;",
    "Write a short answer, then explain what the answer means and why nothing else could have been meant.",
)


class TinyWeights:
    """Weights of a `Tiny` recipe. Raises ConfigError when its vocabulary is too large or too small to be trained."""

    def __init__(self, tiny: Tiny) -> None:
        self._tiny = tiny
        self._tokenizer = tiny_tokenizer(tiny.vocab_size)
        begin, _, end = (self._tokenizer.token_to_id(token) for token in _SPECIAL)
        self.config: Any = AutoConfig.for_model(
            tiny.family,
            hidden_size=tiny.hidden_size,
            intermediate_size=2 * tiny.hidden_size,
            num_hidden_layers=tiny.layers,
            num_attention_heads=tiny.heads,
            num_key_value_heads=tiny.kv_heads,
            head_dim=tiny.hidden_size // tiny.heads,
            vocab_size=-(-tiny.vocab_size // 64) * 64,
            max_position_embeddings=tiny.max_model_len,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            tie_word_embeddings=False,
            bos_token_id=begin,
            eos_token_id=end,
            pad_token_id=begin,
        )
        self.generation: dict[str, Any] = {"bos_token_id": begin, "eos_token_id": [end, begin], "pad_token_id": begin}

        self.shapes = stored_shapes(self.config)

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        shape = self.shapes[name]
        mean, spread = self._distribution(name)
        drawn = mean + spread * self._normal(name, shape)
        if self._tiny.noise > 0:
            drawn += self._tiny.noise * spread * self._normal(f"{name} noise", shape)
        return drawn.to(dtype)

    def write_tokenizer(self, directory: Path) -> None:
        write_tiny_tokenizer(self._tokenizer, directory, self._tiny.max_model_len)

    def _distribution(self, name: str) -> tuple[float, float]:
        """Mean and standard deviation of a tensor's values."""
        if "norm" in name:
            return 1.0, 0.1
        if name.endswith(".bias"):
            return 0.0, 0.1
        if name == "model.embed_tokens.weight":
            return 0.0, 1.0
        scale = 1 / math.sqrt(self.shapes[name][1])
        if name == "lm_head.weight":
            return 0.0, _SHARPNESS * scale
        return 0.0, (_DEPTH if "o_proj" in name or "down_proj" in name else 1.0) * scale

    def _normal(self, key: str, shape: tuple[int, ...]) -> Tensor:
        seed = hashlib.sha256(f"{self._tiny.seed} {key}".encode()).digest()[:8]
        generator = torch.Generator().manual_seed(int.from_bytes(seed, "big") >> 1)  # it takes 63 bits
        return torch.randn(shape, generator=generator, dtype=torch.float32)


def write_tiny_tokenizer(tokenizer: Tokenizer, directory: Path, max_model_len: int) -> None:
    begin, _, end = _SPECIAL
    save_tokenizer(
        tokenizer,
        directory,
        bos_token=begin,
        eos_token=end,
        pad_token=begin,
        chat_template=_CHAT_TEMPLATE,
        model_max_length=max_model_len,
    )


def tiny_tokenizer(vocab_size: int) -> Tokenizer:
    """Byte-level BPE of exactly this many ids, special tokens first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in _SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ConfigError(
            f"tiny.vocab_size: {vocab_size} ids cannot be had; {tokenizer.get_vocab_size()} is the nearest."
        )
    return tokenizer
