"""The shape of the repository: who may import whom, and the traps of a root folder that is the package."""

import ast
import fnmatch
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from saguaro import cli
from saguaro.bench.peers import __main__ as peers

ROOT = Path(__file__).parents[1]
PACKAGES = (
    *("build", "engines", "plugins", "orchestrator", "triton_repo", "frontend", "bench", "supervisor", "doctor"),
    "commands",
)
MAY_IMPORT = {
    "errors": set(),
    "cache": set(),
    "plugins": {"errors", "cache"},
    "engines": {"errors", "plugins"},
    "orchestrator": {"errors", "plugins", "engines"},
    "build": {"errors", "plugins", "engines"},
    "triton_repo": {"errors", "engines", "orchestrator"},
    "frontend": {"errors", "engines", "orchestrator"},
    "bench": {"errors", "cache", "plugins", "engines", "orchestrator", "build", "supervisor", "llm", "simulate"},
    "doctor": {"errors", "plugins", "engines", "orchestrator", "build", "supervisor", "llm"},
    "supervisor": {"errors", "orchestrator", "triton_repo", "llm"},  # the front end is a process it starts
}
PURE_CORE = (
    "types",
    "sampling",
    "scores",
    "randomness",
    "analysis",
    "fan_out_policy",
    "estimators",
    "measured_fan_out",
    "costs",
    "speed_model",
    "rates",
    "mode_control",
    "prospects",
    "speculation_cache",
    "shards",
    "kv_blocks",
    "protocol",
)
ONLY_IN_ITS_FILE = {
    "tensorrt_llm": "trtllm",
    "tensorrt": "tensorrt",
    "triton": "triton_lang",
    "mpi4py": "mpi",
    "pynvml": "nvml",
}


def sources() -> list[Path]:
    folders = [path for name in PACKAGES for path in (ROOT / name).rglob("*.py")]
    return folders + list(ROOT.glob("*.py"))


def imports(path: Path, *, at_run_time: bool = False) -> set[str]:
    """Dotted names a file imports; `at_run_time` leaves out what only type checkers see."""
    names: set[str] = set()
    tree = ast.parse(path.read_text())
    hidden = {
        node
        for branch in ast.walk(tree)
        if at_run_time and isinstance(branch, ast.If) and "TYPE_CHECKING" in ast.unparse(branch.test)
        for node in ast.walk(branch)
    }
    for node in ast.walk(tree):
        if node in hidden:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    return names


def violations(path: Path, package: str) -> set[str]:
    found = set()
    for name in imports(path, at_run_time=True):
        parts = name.split(".")
        if parts[0] == "saguaro" and len(parts) > 1 and parts[1] not in MAY_IMPORT[package] | {package}:
            found.add(name)
    return found


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_who_imports_whom(package: str) -> None:
    files = [ROOT / f"{package}.py"] if package in ("errors", "cache") else list((ROOT / package).rglob("*.py"))
    assert {str(path): bad for path in files if (bad := violations(path, package))} == {}


def test_the_import_rule_can_fail(tmp_path: Path) -> None:
    planted = tmp_path / "planted.py"
    planted.write_text("from saguaro.orchestrator.types import Outcome\n")
    assert violations(planted, "plugins")
    assert not violations(planted, "bench")


def test_the_pure_core_knows_no_engine_channel_or_role() -> None:
    allowed = {f"saguaro.orchestrator.{name}" for name in PURE_CORE} | {
        "saguaro.errors",
        "saguaro.plugins.fan_out",
        "saguaro.plugins.transfers",
    }
    for name in PURE_CORE:
        path = ROOT / "orchestrator" / f"{name}.py"
        if not path.exists():
            continue
        for imported in imports(path):
            if imported.startswith("saguaro."):
                assert any(
                    imported == module or imported.startswith(module + ".") for module in allowed
                ) or imported in (
                    "saguaro.orchestrator",
                    "saguaro.plugins",
                ), f"{name} imports {imported}"


def test_heavy_libraries_are_imported_by_the_file_that_bears_their_name() -> None:
    for path in sources():
        tops = {name.split(".")[0] for name in imports(path)}
        for library, stem in ONLY_IN_ITS_FILE.items():
            # or by the folder: what takes more than a file to say.
            assert library not in tops or stem in (path.stem, path.parent.name), f"{path} imports {library}"


def test_every_folder_of_the_package_is_listed() -> None:
    """A folder left out works in an editable install and is missing from the wheel."""
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    folders = {path.parent for name in PACKAGES for path in (ROOT / name).rglob("*.py") if path.name != "model.py"}
    assert {"saguaro"} | {"saguaro." + str(folder.relative_to(ROOT)).replace("/", ".") for folder in folders} <= listed


def test_build_stays_a_namespace_and_the_builder_of_packages_is_found() -> None:
    assert not (ROOT / "build" / "__init__.py").exists()
    assert not (ROOT / "build" / "lib").exists(), "setuptools staged into our sources: is setup.cfg in place?"
    done = subprocess.run(
        [sys.executable, "-m", "build", "--version"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert "site-packages" in done.stdout


def test_no_second_copy_of_a_package_is_loaded() -> None:
    """From the root `import engines` would work and give another module than saguaro.engines."""
    assert not set(PACKAGES) - {"build"} & set(sys.modules)


def test_results_do_not_land_among_the_sources() -> None:
    """The folder a command writes into unless told otherwise is none of ours in a checkout, and git ignores it."""
    ignored = [line.strip("/") for line in (ROOT / ".gitignore").read_text().splitlines() if line.startswith("/")]
    for arguments in (
        cli._parser().parse_args(["bench"]),
        cli._parser().parse_args(["load"]),
        peers._parser().parse_args([]),
    ):
        assert not Path(arguments.out).is_absolute()
        assert any(fnmatch.fnmatch(str(arguments.out), pattern) for pattern in ignored), arguments.out


def test_importing_the_package_loads_nothing_heavy() -> None:
    for modules, heavy in (
        ("saguaro, saguaro.cli", {"torch", "transformers", "mpi4py", "zmq"}),
        ("saguaro.frontend.openai.__main__", {"torch", "transformers", "mpi4py"}),
        ("saguaro.commands.status, saguaro.supervisor.control", {"torch", "transformers", "mpi4py"}),
        ("saguaro.supervisor.serve, saguaro.triton_repo.prompt, saguaro.triton_repo.decoder", {"torch", "mpi4py"}),
    ):
        code = f"import sys, {modules}; print({heavy} & set(sys.modules))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout.strip() == "set()"


def test_nothing_but_the_command_line_prints() -> None:
    for path in sources():
        if path.name == "cli.py" or path.parent.name in ("commands", "frontend"):
            continue
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        assert not [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"], path
