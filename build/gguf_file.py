"""Reads the GGUF container: metadata and tensors, every length checked against the file before it is used.

A damaged, truncated or hostile file is a ModelError, never a crash or a large allocation. Tensor data stays on disk
until asked for. The format is the ggml project's GGUF specification, versions 2 and 3, little-endian. It knows nothing
of what the metadata and tensors mean.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from saguaro.errors import ModelError

T = TypeVar("T")
Value = int | float | bool | str | list["Value"]

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4
_CHUNK = 1 << 22  # values dequantised at a time: bounds the memory used beside the result


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor lies and how it is stored."""

    shape: tuple[int, ...]  # as torch has it, slowest dimension first
    kind: GGMLQuantizationType
    offset: int  # from the start of the file
    size: int  # bytes


class GgufFile:
    """One GGUF file. Raises ModelError when it is not GGUF, damaged or truncated."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._bytes = np.memmap(path, dtype=np.uint8, mode="r")
        except (OSError, ValueError) as error:  # ValueError: an empty file
            raise ModelError(f"{path}: cannot be read ({error}). Fetch it again.") from error
        cursor = _Cursor(path, self._bytes.data)
        if cursor.take(4) != b"GGUF":
            raise ModelError(f"{path}: is not a GGUF file (it does not begin with the letters GGUF).")
        version = cursor.integer("I")
        if version not in (2, 3):
            raise ModelError(f"{path}: is GGUF version {version}; versions 2 and 3 can be read. Convert it anew.")
        tensors, pairs = cursor.integer("Q"), cursor.integer("Q")
        self.metadata: dict[str, Value] = {}
        for _ in range(pairs):
            key = cursor.text()
            self.metadata[key] = cursor.value(cursor.integer("I"))
        entries = [cursor.tensor() for _ in range(tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ModelError(f"{path}: its alignment is {alignment!r}; the file is damaged. Fetch it again.")
        start = -(-cursor.position // alignment) * alignment
        self.tensors = {name: self._place(name, shape, code, start + at) for name, shape, code, at in entries}

    def _place(self, name: str, shape: tuple[int, ...], code: int, offset: int) -> GgufTensor:
        try:
            kind = GGMLQuantizationType(code)
        except ValueError as error:
            raise ModelError(f"{self.path}: tensor {name} is stored as type {code}, which is unknown here.") from error
        block, block_bytes = GGML_QUANT_SIZES[kind]
        size = math.prod(shape) // block * block_bytes
        if shape[-1] % block or offset + size > len(self._bytes):
            raise ModelError(
                f"{self.path}: tensor {name} ends at byte {offset + size}, the file at {len(self._bytes)}; the file is "
                "truncated or damaged. Fetch it again."
            )
        return GgufTensor(shape, kind, offset, size)

    def get(self, key: str, kind: type[T]) -> T:
        """A metadata value that must be there."""
        value = self.optional(key, kind)
        if value is None:
            raise self.damage(f"its header lacks {key}")
        return value

    def optional(self, key: str, kind: type[T]) -> T | None:
        """A metadata value of a given type, None where it is absent."""
        value = self.metadata.get(key)
        if value is not None and type(value) is not kind:
            raise self.refusal(f"its {key} is a {type(value).__name__}, not a {kind.__name__}")
        return value

    def items(self, key: str, kind: type[T]) -> list[T]:
        """A metadata list that must be there, all of one type."""
        values: list[T] = self.get(key, list)
        if not all(type(value) is kind for value in values):
            raise self.refusal(f"its {key} is not a list of {kind.__name__}")
        return values

    def damage(self, what: str) -> ModelError:
        return ModelError(f"{self.path}: {what}; the file is damaged. Fetch it again.")

    def refusal(self, what: str) -> ModelError:
        """For files that are sound, but say something that has no known meaning here."""
        return ModelError(f"{self.path}: {what}, which is not supported. Use the model's safetensors folder instead.")

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """One tensor, dequantised to float32 and then rounded to `dtype`."""
        tensor = self.tensors[name]
        block, block_bytes = GGML_QUANT_SIZES[tensor.kind]
        raw = self._bytes[tensor.offset : tensor.offset + tensor.size]
        result = torch.empty(math.prod(tensor.shape), dtype=dtype)
        for first in range(0, len(result), _CHUNK):  # _CHUNK is a multiple of every block length
            part = raw[first // block * block_bytes :][: _CHUNK // block * block_bytes]
            try:
                values = dequantize(part, tensor.kind)
            except NotImplementedError as error:
                raise ModelError(f"{self.path}: {error}. Choose another quantisation of this model.") from error
            # A copy, because float32 values are a view of the file.
            result[first : first + len(values)] = torch.from_numpy(np.array(values, dtype=np.float32))
        return result.view(tensor.shape)


class _Cursor:
    """Reads values one after another; nothing is read or allocated beyond the end of the file."""

    def __init__(self, path: Path, data: memoryview) -> None:
        self._path = path
        self._data = data
        self.position = 0

    def take(self, size: int) -> bytes:
        end = self.position + size
        if end > len(self._data):
            raise ModelError(f"{self._path}: ends inside its header; it is truncated or damaged. Fetch it again.")
        taken = bytes(self._data[self.position : end])
        self.position = end
        return taken

    def numbers(self, code: str, count: int) -> tuple[int | float | bool, ...]:
        return struct.unpack(f"<{count}{code}", self.take(count * struct.calcsize(f"<{code}")))

    def integer(self, code: str) -> int:
        return int(self.numbers(code, 1)[0])

    def text(self) -> str:
        raw = self.take(self.integer("Q"))
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise ModelError(f"{self._path}: holds text that is not UTF-8; it is damaged. Fetch it again.") from error

    def value(self, kind: int) -> Value:
        if kind in _NUMBERS:
            return self.numbers(_NUMBERS[kind], 1)[0]
        if kind == _TEXT:
            return self.text()
        if kind == _ARRAY:
            element, count = self.integer("I"), self.integer("Q")
            if element in _NUMBERS:
                return list(self.numbers(_NUMBERS[element], count))
            if element == _TEXT:
                return [self.text() for _ in range(count)]
            kind = element
        raise ModelError(f"{self._path}: holds a value of type {kind}, which is unknown here; it may be damaged.")

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape, type and offset from the start of the tensor data."""
        name, dimensions = self.text(), self.integer("I")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise ModelError(f"{self._path}: tensor {name} has {dimensions} dimensions; the file is damaged.")
        shape = tuple(int(length) for length in reversed(self.numbers("Q", dimensions)))
        return name, shape, self.integer("I"), self.integer("Q")
