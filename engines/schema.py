"""YAML into nested frozen dataclasses, strictly: what a dataclass does not state is an error.

One reader for recipes, deployments and manifests. Every error is a ConfigError of one paragraph with the file, the
dotted key, what is allowed and, for a misspelt key, the nearest valid one. A dataclass states the limits of its values
in `__post_init__` by raising ConfigError; the reader adds file and key. It knows nothing of any particular file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import types
import typing
from collections.abc import Hashable, Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, Union

import yaml

from saguaro.errors import ConfigError

T = TypeVar("T")

_SCALARS: dict[type, str] = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def read_yaml(path: Path, cls: type[T]) -> T:
    """Read the file into the dataclass `cls`. Raises ConfigError when it cannot be read or does not fit."""
    return parse(load_yaml(path), cls, str(path))


def load_yaml(path: Path) -> object:
    """The file's plain data (mappings, lists, scalars). Raises ConfigError when it is not readable YAML."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as UTF-8 text: {error}. Check the path and the file.") from error
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: is not valid YAML: {' '.join(str(error).split())}.") from error


def parse(document: object, cls: type[T], source: str) -> T:
    """Read plain data (mappings, lists, scalars) into the dataclass `cls`; `source` names it in errors."""
    return typing.cast(T, _Reader(source).dataclass(document, cls, ""))


def nearest(name: str, valid: Iterable[str]) -> str:
    """ " (did you mean X?)" with the valid name most like `name`, or "" when none is near: to be put after the name."""
    close = get_close_matches(name, list(valid), n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else ""


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice instead of keeping the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                continue
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key_node.value!r} is given twice", key_node.start_mark
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep=deep)


class _Reader:
    """Converts values by type hint; `key` is the dotted path to the value, "" for the whole document."""

    def __init__(self, source: str) -> None:
        self._source = source

    def _fail(self, key: str, message: str) -> NoReturn:
        raise ConfigError(f"{self._source}: {key}: {message}" if key else f"{self._source}: {message}")

    def dataclass(self, value: object, cls: type, key: str) -> object:
        fields = {field.name: field for field in dataclasses.fields(cls)}
        if not isinstance(value, dict):
            self._fail(key, f"must be a mapping with the keys {', '.join(fields)}; got {_show(value)}.")
        for name in value:
            if name not in fields:
                self._fail(
                    _join(key, name), f"unknown key{nearest(str(name), fields)}. Valid keys: {', '.join(fields)}."
                )
        hints = typing.get_type_hints(cls)
        for name, field in fields.items():
            required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
            if required and name not in value:
                self._fail(_join(key, name), f"is missing; it must be {_describe(hints[name])}.")
        arguments = {name: self.value(item, hints[name], _join(key, name)) for name, item in value.items()}
        try:
            return cls(**arguments)
        except ConfigError as error:
            self._fail(key, str(error))

    def value(self, value: object, hint: Any, key: str) -> object:
        origin, members = typing.get_origin(hint), typing.get_args(hint)
        if origin in (Union, types.UnionType):
            fitting = [member for member in members if _fits(value, member)]
            if not fitting:
                self._fail(key, f"must be {_describe(hint)}; got {_show(value)}{_hint(value, hint)}.")
            return self.value(value, fitting[0], key)
        if not _fits(value, hint):
            self._fail(key, f"must be {_describe(hint)}; got {_show(value)}{_hint(value, hint)}.")
        if dataclasses.is_dataclass(hint):
            return self.dataclass(value, typing.cast(type, hint), key)
        if origin is tuple:
            items = typing.cast("list[object]", value)
            return tuple(self.value(item, members[0], f"{key}[{i}]") for i, item in enumerate(items))
        if origin is dict:
            mapping = typing.cast("dict[object, object]", value)
            return {
                self.value(name, members[0], f"{key} (key)"): self.value(item, members[1], _join(key, name))
                for name, item in mapping.items()
            }
        return float(typing.cast(float, value)) if hint is float else value


def _fits(value: object, hint: Any) -> bool:
    """Whether a value has the kind a hint asks for; what is inside a mapping or list is checked later."""
    origin = typing.get_origin(hint)
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in typing.get_args(hint))
    if dataclasses.is_dataclass(hint) or origin is dict:
        return isinstance(value, dict)
    if origin is tuple:
        return isinstance(value, list)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is type(None):
        return value is None
    if hint in _SCALARS:
        return type(value) is hint
    raise TypeError(f"a configuration dataclass cannot hold {hint!r}")


def _describe(hint: Any) -> str:
    origin, members = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(_describe(member) for member in members)
    if origin is Literal:
        return ("one of " if len(members) > 1 else "") + ", ".join(str(choice) for choice in members)
    if dataclasses.is_dataclass(hint):
        return f"a mapping with the keys {', '.join(field.name for field in dataclasses.fields(hint))}"
    if origin is tuple:
        return f"a list, each item {_describe(members[0])}"
    if origin is dict:
        return f"a mapping of {_describe(members[0])} to {_describe(members[1])}"
    return "empty" if hint is type(None) else _SCALARS[hint]


def _hint(value: object, hint: Any) -> str:
    """A likely cure for a value of the wrong kind, or nothing."""
    if not isinstance(value, str):
        return ""
    members = typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)
    choices = [str(c) for m in members if typing.get_origin(m) is Literal for c in typing.get_args(m)]
    if choices:
        return nearest(value, choices)
    if float in members:
        # YAML 1.1 reads 1e-3 as text: it wants a point.
        with contextlib.suppress(ValueError):
            return f"; write it as {float(value)!r}, without quotes"
    return ""


def _join(key: str, name: object) -> str:
    return f"{key}.{name}" if key else str(name)


def _show(value: object) -> str:
    """A value as its author would recognise it, shortened."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (dict, list)):
        return "a mapping" if isinstance(value, dict) else "a list"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
