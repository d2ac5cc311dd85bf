"""YAML into dataclasses: what fits comes through unchanged, what does not is named by file, key and remedy."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from saguaro.engines.schema import nearest, parse, read_yaml
from saguaro.errors import ConfigError


@dataclass(frozen=True)
class Engine:
    kind: Literal["pytorch", "trtllm"]
    threads: int = 1
    cores: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Settings:
    name: str
    target: Engine
    draft: Engine | None = None
    lookahead: int | Literal["auto"] = 4
    temperature: float = 0.0
    stream: bool = True
    level: Literal[0, 1] = 0
    engines: tuple[Engine, ...] = ()
    bias: dict[int, float] = field(default_factory=dict)
    labels: dict[str, Engine] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ConfigError(f"temperature must be 0 or more, got {self.temperature}")


MINIMAL: dict[str, Any] = {"name": "a", "target": {"kind": "pytorch"}}


def plain(value: object) -> object:
    """As YAML would hold it: tuples are lists there."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


engines = st.builds(
    Engine,
    kind=st.sampled_from(["pytorch", "trtllm"]),
    threads=st.integers(),
    cores=st.none() | st.lists(st.integers(), max_size=3).map(tuple),
)


@given(
    st.builds(
        Settings,
        name=st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs"))),
        target=engines,
        draft=st.none() | engines,
        lookahead=st.integers() | st.just("auto"),
        temperature=st.floats(0, 1e300),
        stream=st.booleans(),
        engines=st.lists(engines, max_size=3).map(tuple),
        bias=st.dictionaries(st.integers(), st.floats(allow_nan=False, allow_infinity=False), max_size=3),
        labels=st.dictionaries(st.sampled_from(["x", "y"]), engines),
    )
)
def test_what_is_written_is_read(settings: Settings) -> None:
    text = yaml.safe_dump(plain(dataclasses.asdict(settings)), allow_unicode=True)
    assert parse(yaml.safe_load(text), Settings, "test") == settings


def test_defaults_and_whole_numbers_as_numbers() -> None:
    settings = parse(MINIMAL | {"temperature": 1}, Settings, "test")
    assert settings == Settings("a", Engine("pytorch"), temperature=1.0)
    assert isinstance(settings.temperature, float)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"temprature": 1}, ["temprature", "unknown key (did you mean temperature?)", "Valid keys: name, target"]),
        ({"qqqq": 1}, ["qqqq: unknown key. Valid keys"]),
        ({"target": {"kind": "pytorch", "thread": 2}}, ["target.thread", "did you mean threads?"]),
        ({"target": {}}, ["target.kind: is missing; it must be one of pytorch, trtllm"]),
        ({"target": "pytorch"}, ["target: must be a mapping with the keys kind, threads, cores; got 'pytorch'"]),
        ({"target": {"kind": "pytroch"}}, ["target.kind", "one of pytorch, trtllm", "did you mean pytorch?"]),
        ({"target": {"kind": "pytorch", "threads": True}}, ["target.threads", "a whole number", "got true"]),
        ({"target": {"kind": "pytorch", "threads": 1.5}}, ["target.threads", "a whole number", "1.5"]),
        ({"target": {"kind": "pytorch", "cores": [1, "x"]}}, ["target.cores[1]", "a whole number", "'x'"]),
        ({"target": {"kind": "pytorch", "cores": 1}}, ["target.cores: must be a list"]),
        ({"engines": [{"kind": "pytorch"}, {"kind": 3}]}, ["engines[1].kind"]),
        ({"lookahead": "aut"}, ["lookahead: must be a whole number or auto", "did you mean auto?"]),
        ({"lookahead": None}, ["lookahead", "got nothing"]),
        ({"temperature": "1e-3"}, ["temperature: must be a number", "write it as 0.001, without quotes"]),
        ({"temperature": -1}, ["test.yaml: temperature must be 0 or more, got -1.0"]),
        ({"level": True}, ["level: must be one of 0, 1; got true"]),
        ({"stream": "yes please"}, ["stream: must be true or false"]),
        ({"bias": {"a": 1.0}}, ["bias (key): must be a whole number"]),
        ({"name": 3}, ["name: must be text; got 3"]),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, change: dict[str, Any], said: list[str]) -> None:
    path = tmp_path / "test.yaml"
    path.write_text(yaml.safe_dump(MINIMAL | change))
    with pytest.raises(ConfigError) as caught:
        read_yaml(path, Settings)
    for part in ["test.yaml", *said]:
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "must be a mapping with the keys name, target"),
        (b"- 1\n", "got a list"),
        (b"name: [", "is not valid YAML"),
        (b"name: a\nname: b\n", "the key 'name' is given twice"),
        (b"name: \xff\xfe", "cannot be read as UTF-8 text"),
        (b"name: !!python/object/apply:os.getcwd []\n", "is not valid YAML"),
    ],
)
def test_files_that_are_not_such_a_document(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "test.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="test.yaml") as caught:
        read_yaml(path, Settings)
    assert said in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.yaml: cannot be read"):
        read_yaml(tmp_path / "nothing.yaml", Settings)


def test_nearest_stays_silent_when_nothing_is_near() -> None:
    assert nearest("lookahed", ["lookahead", "mode"]) == " (did you mean lookahead?)"
    assert nearest("zzz", ["lookahead", "mode"]) == ""
