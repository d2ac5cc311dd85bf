"""The fields of a request as Python values, each checked against its declaration and its limits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from saguaro.errors import ConfigError
from saguaro.triton_repo.tensors import TensorSpec

MAX_LIST = 4096  # entries of a list
MAX_WORD = 1024  # bytes of a text in a list
MAX_TEXT = 2**20  # bytes of a text, prompts apart
# Keys that Triton's own clients and front ends put beside the tensors.
_TRITON_PARAMETERS = {
    "binary_data_output",
    "id",  # see id_of
    "sequence_end",
    "sequence_id",
    "sequence_start",
    "timeout",
    "triton_enable_empty_final_response",
}
_KINDS = {"INT32": "i4", "UINT64": "u8", "FP32": "f4", "BOOL": "b1", "STRING": "O"}


class Fields:
    """The inputs of one request, by name. Every method raises ConfigError naming the field and its limit."""

    def __init__(self, specs: Iterable[TensorSpec], inputs: Mapping[str, NDArray[Any]]) -> None:
        self._inputs = inputs
        known = {spec.name: spec for spec in specs}
        for name, array in inputs.items():
            if name not in known:
                raise ConfigError(f"{name} is not an input of this model; it has {', '.join(known)}")
            wanted = known[name]
            if array.dtype != np.dtype(_KINDS[wanted.dtype]):
                raise ConfigError(f"{name} must be {wanted.dtype}, got {array.dtype}")
            if wanted.dims == (1,) and array.size != 1:
                raise ConfigError(f"{name} must be one value, shape [1, 1], got shape {list(array.shape)}")

    def has(self, name: str) -> bool:
        return name in self._inputs

    def number(self, name: str) -> Any:
        """A Python number; of a 32-bit float the shortest decimal, which is what the client wrote."""
        value = self._inputs[name].reshape(-1)[0]
        return float(str(value)) if value.dtype.kind == "f" else value.item()

    def numbers(self, name: str) -> list[Any]:
        array = self._inputs[name].reshape(-1)
        if array.size > MAX_LIST:
            raise ConfigError(f"{name} must have at most {MAX_LIST} entries, got {array.size}")
        return [float(str(value)) if value.dtype.kind == "f" else value.item() for value in array]

    def flag(self, name: str) -> bool:
        """False where it is left out."""
        return self.has(name) and bool(self._inputs[name].reshape(-1)[0])

    def text(self, name: str, limit: int = MAX_TEXT) -> str:
        return self._decode(name, self._inputs[name].reshape(-1)[0], limit)

    def texts(self, name: str) -> list[str]:
        """Without the empty ones, which clients send for none; none at all where the field is left out."""
        if not self.has(name):
            return []
        array = self._inputs[name].reshape(-1)
        if array.size > MAX_LIST:
            raise ConfigError(f"{name} must have at most {MAX_LIST} entries, got {array.size}")
        return [text for value in array if (text := self._decode(name, value, MAX_WORD))]

    @staticmethod
    def _decode(name: str, value: bytes | str, limit: int) -> str:
        data = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else bytes(value)
        if len(data) > limit:
            raise ConfigError(f"{name} must be at most {limit} bytes long, got {len(data)}")
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise ConfigError(f"{name} must be UTF-8: {error.reason} at byte {error.start}") from error


def id_of(request_id: str, parameters: str) -> str:
    """The request's id. Triton 24.10 takes the key `id` of a JSON request for a parameter (`parameters`, JSON)."""
    if request_id or not parameters:
        return request_id
    given = msgspec.json.decode(parameters).get("id", "")
    if not isinstance(given, str):
        raise ConfigError(f"id must be a string, got {given!r}")
    return given


def check_parameters(text: str) -> None:
    """Refuse request parameters (JSON) that nobody would read: a misspelt field of a JSON request becomes one."""
    if not text:
        return
    for name in msgspec.json.decode(text):
        if name not in _TRITON_PARAMETERS and not name.startswith("triton_"):
            raise ConfigError(f"{name} is not a field of this model, nor a parameter it knows: leave it out")
