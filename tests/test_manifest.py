"""Engine directories: complete or refused, and target and draft compared by what their ids mean."""

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from saguaro.engines.manifest import (
    FILE,
    FORMAT,
    TOKENIZER,
    FileRecord,
    Manifest,
    compare_token_maps,
    file_sha256,
    token_map,
    token_map_digest,
)
from saguaro.errors import ConfigError, EngineError


def engine(directory: Path, tokens: dict[str, int], added: list[str] | None = None) -> Manifest:
    """A directory with a tokenizer of these tokens, a file, and the manifest of both."""
    directory.mkdir()
    tokenizer = Tokenizer(models.WordLevel(tokens, unk_token=next(iter(tokens))))
    tokenizer.add_tokens(added or [])
    tokenizer.save(str(directory / TOKENIZER))
    (directory / "model.safetensors").write_bytes(b"weights")
    known = token_map(directory)
    manifest = Manifest(
        format=FORMAT,
        recipe="r",
        recipe_hash="0" * 64,
        engine="pytorch",
        model="m",
        source_sha256="1" * 64,
        family="llama",
        dtype="bfloat16",
        tp=1,
        vocab_size=max(known) + 1,
        max_model_len=128,
        eos_token_ids=(0, 2),
        token_map_sha256=token_map_digest(known),
        device="any",
        shards={"lm_head": "whole"},
        versions={"torch": "2"},
        files={file.name: FileRecord(file.stat().st_size, file_sha256(file)) for file in directory.iterdir()},
    )
    manifest.write(directory)
    return manifest


def test_what_is_written_is_loaded(tmp_path: Path) -> None:
    manifest = engine(tmp_path / "e", {"a": 0, "b": 1})
    assert Manifest.load(tmp_path / "e") == manifest
    assert manifest.damaged(tmp_path / "e") == []


def test_a_directory_without_manifest_is_no_engine(tmp_path: Path) -> None:
    engine(tmp_path / "e", {"a": 0})
    (tmp_path / "e" / FILE).unlink()
    for directory in (tmp_path / "e", tmp_path / "nothing"):
        with pytest.raises(EngineError, match=r"manifest\.json is missing.*saguaro build"):
            Manifest.load(directory)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": FORMAT + 1}, f"has format {FORMAT + 1}; this version of saguaro reads {FORMAT}"),
        ({"dtype": "int7"}, "dtype: must be one of"),
        ({"vocab_siez": 1}, "did you mean vocab_size?"),
    ],
)
def test_a_manifest_that_says_something_else(tmp_path: Path, change: dict[str, object], said: str) -> None:
    manifest = engine(tmp_path / "e", {"a": 0})
    path = tmp_path / "e" / FILE
    path.write_text(json.dumps(dataclasses.asdict(manifest) | change))
    with pytest.raises(EngineError) as caught:
        Manifest.load(tmp_path / "e")
    assert said in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "{", "null"])
def test_a_manifest_that_is_no_mapping(tmp_path: Path, text: str) -> None:
    engine(tmp_path / "e", {"a": 0})
    (tmp_path / "e" / FILE).write_text(text)
    with pytest.raises(EngineError, match=r"manifest\.json"):
        Manifest.load(tmp_path / "e")


def test_a_file_that_is_missing_or_cut(tmp_path: Path) -> None:
    engine(tmp_path / "e", {"a": 0})
    weights = tmp_path / "e" / "model.safetensors"
    weights.write_bytes(b"weight")
    with pytest.raises(EngineError, match=r"model\.safetensors: is 6 bytes long, its manifest says 7"):
        Manifest.load(tmp_path / "e")
    weights.unlink()
    with pytest.raises(EngineError, match=r"model\.safetensors: is missing"):
        Manifest.load(tmp_path / "e")


def test_changed_bytes_of_the_same_length_are_found_when_asked_for(tmp_path: Path) -> None:
    manifest = engine(tmp_path / "e", {"a": 0})
    (tmp_path / "e" / "model.safetensors").write_bytes(b"wEights")
    assert Manifest.load(tmp_path / "e") == manifest
    assert manifest.damaged(tmp_path / "e") == ["model.safetensors"]


maps = st.dictionaries(st.integers(0, 20), st.text(max_size=3), max_size=5)


@given(maps, maps)
def test_digests_are_equal_exactly_when_the_maps_are(first: dict[int, str], second: dict[int, str]) -> None:
    assert (token_map_digest(first) == token_map_digest(second)) == (first == second)
    assert token_map_digest(first) == token_map_digest(dict(reversed(first.items())))


def test_equal_maps_pass_whatever_else_differs(tmp_path: Path) -> None:
    engine(tmp_path / "target", {"a": 0, "b": 1, "c": 2})
    engine(tmp_path / "draft", {"c": 2, "b": 1, "a": 0})
    compare_token_maps(tmp_path / "target", tmp_path / "draft")


def test_an_added_token_counts_like_any_other(tmp_path: Path) -> None:
    engine(tmp_path / "target", {"a": 0, "b": 1}, added=["<end>"])
    engine(tmp_path / "draft", {"a": 0, "b": 1, "<end>": 2})
    compare_token_maps(tmp_path / "target", tmp_path / "draft")
    assert Manifest.load(tmp_path / "target").vocab_size == 3


def test_the_first_five_differences_are_listed(tmp_path: Path) -> None:
    """I-14: mismatched tokenizers were accepted silently."""
    shared = {chr(97 + i): i for i in range(10)}
    engine(tmp_path / "target", shared)
    engine(tmp_path / "draft", {token.upper() if i % 2 else token: i for token, i in shared.items()} | {"new": 10})
    with pytest.raises(ConfigError) as caught:
        compare_token_maps(tmp_path / "target", tmp_path / "draft")
    said = str(caught.value)
    assert "6 token ids differ" in said
    for part in ("1 is 'b' / 'B'", "3 is 'd' / 'D'", "9 is 'j' / 'J'", str(tmp_path / "draft")):
        assert part in said
    assert "10 is" not in said


def test_an_id_only_one_side_knows_is_a_difference(tmp_path: Path) -> None:
    engine(tmp_path / "target", {"a": 0, "b": 1})
    engine(tmp_path / "draft", {"a": 0})
    with pytest.raises(ConfigError, match="1 is 'b' / nothing"):
        compare_token_maps(tmp_path / "target", tmp_path / "draft")
