"""Log probabilities with the text of their tokens, in OpenAI's chat form: what `postprocessing` does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer, decoders

from saguaro.orchestrator.types import TokenLogprobs

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """The character that stands for each byte in byte-level tokens: printable ones for themselves, others from 256."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


class TokenText:
    """Bytes and text of single tokens, and log probabilities in terms of them."""

    def __init__(self, tokenizer: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(tokenizer))
        self._added = {token.content for token in self._tokenizer.get_added_tokens_decoder().values()}
        byte_level = isinstance(self._tokenizer.decoder, decoders.ByteLevel)
        self._alphabet = _byte_level_alphabet() if byte_level else None

    def to_json(self, raw: bytes) -> bytes:
        """A JSON list of {token, logprob, bytes, top_logprobs} from a JSON list of TokenLogprobs."""
        entries = msgspec.json.decode(raw, type=list[TokenLogprobs])
        return msgspec.json.encode(
            [
                self._entry(entry.token, entry.logprob)
                | {"top_logprobs": [self._entry(token, logprob) for token, logprob in entry.top]}
                for entry in entries
            ]
        )

    def bytes_of(self, token: int) -> bytes:
        """What the token adds to a text; part of a character is what it is. Padding rows of a model have none."""
        piece = self._tokenizer.id_to_token(token)
        if piece is None:
            return b""
        if piece in self._added:
            return bytes(piece.encode())
        if self._alphabet is not None:
            return bytes(self._alphabet[character] for character in piece)
        if byte := _BYTE.fullmatch(piece):
            return bytes([int(byte[1], 16)])
        return bytes(piece.replace("▁", " ").encode())

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        data = self.bytes_of(token)
        return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}
