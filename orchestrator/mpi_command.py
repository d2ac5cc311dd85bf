"""The MPI of this environment: which it is, and how it is told to start a group.

Both hand their own environment and standard input (to rank 0) to the ranks they start on this machine, so nothing of
that needs a flag; `-x` and `-genv` are for ranks elsewhere. It knows nothing of what the ranks do.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from saguaro.errors import LaunchError

Flavour = Literal["mpich", "openmpi"]
Join = Literal["mpi", "unix"]

_TIMEOUT = 30.0  # seconds to say a version
# A rank must not mistake itself for part of an MPI job that this process may belong to.
_OF_ANOTHER_JOB = ("PMI_", "PMIX_", "OMPI_", "PRTE_", "HYDRA_", "MPI_LOCAL")
# Nor may mpiexec take a batch system's allocation for its own: it would ask for a job step, which this one keeps busy.
_OF_A_BATCH_SYSTEM = ("SLURM_", "PBS_", "LSB_", "FLUX_")


@dataclass(frozen=True)
class Mpi:
    """One installation."""

    mpiexec: str
    flavour: Flavour
    version: str

    @property
    def join(self) -> Join:
        """How two jobs of it meet. MPICH connects any two; Open MPI only under a name server or daemon of their own."""
        return "mpi" if self.flavour == "mpich" else "unix"

    def command(self, ranks: int, program: Sequence[str], *, root: bool) -> list[str]:
        """Starts `program` as `ranks` processes on this machine, which choose their cores themselves."""
        if self.flavour == "mpich":
            return [self.mpiexec, "-n", str(ranks), *program]
        # It refuses root and more ranks than cores unless told, and binds ranks to cores.
        flags = ["--allow-run-as-root"] * root + ["--oversubscribe", "--bind-to", "none"]
        return [self.mpiexec, *flags, "-n", str(ranks), *program]

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """`inherited` without what other jobs have left there."""
        others = (*_OF_ANOTHER_JOB, *_OF_A_BATCH_SYSTEM)
        kept = {name: value for name, value in inherited.items() if not name.startswith(others)}
        if self.flavour == "openmpi":
            # Its copies between processes need a right (ptrace) that containers do not have, and then fail one by one.
            kept["OMPI_MCA_btl_vader_single_copy_mechanism"] = "none"
        return kept


def find_mpi() -> Mpi:
    """Beside the interpreter first: the MPI that came with this environment is the one mpi4py loads.

    Raises LaunchError when there is none, or one that is not known.
    """
    found = _beside_the_interpreter() or shutil.which("mpiexec")
    if found is None:
        raise LaunchError(
            "no MPI was found (no `mpiexec` beside the interpreter or on PATH): install one with "
            "`pip install 'saguaro-serving[mpi]'`, or load your cluster's MPI module"
        )
    try:
        done = subprocess.run(
            [found, "--version"], capture_output=True, text=True, timeout=_TIMEOUT, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{found} --version does not work ({error}): install another MPI") from error
    return parse_version(found, done.stdout + done.stderr)


def _beside_the_interpreter() -> str | None:
    path = Path(sys.executable).with_name("mpiexec")
    return str(path) if path.exists() else None


def parse_version(mpiexec: str, text: str) -> Mpi:
    """What `mpiexec --version` has said. Raises LaunchError for an MPI that nobody has tried here."""
    if match := re.search(r"^mpi\w+ \((?:Open MPI|OpenRTE)\) (\d[\w.]*)", text, re.MULTILINE):
        return Mpi(mpiexec, "openmpi", match[1])
    if "HYDRA" in text and (match := re.search(r"^\s*Version:\s+(\d[\w.]*)", text, re.MULTILINE)):
        return Mpi(mpiexec, "mpich", match[1])
    said = next((line.strip() for line in text.splitlines() if line.strip()), "nothing")
    raise LaunchError(
        f"{mpiexec} is neither MPICH's nor Open MPI's (it says: {said}): put one of those first on PATH, for instance "
        "with `pip install 'saguaro-serving[mpi]'`"
    )
