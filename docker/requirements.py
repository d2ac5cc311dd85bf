"""What has to be added to NVIDIA's image, from pyproject.toml: `python requirements.py pyproject.toml`.

That image has a Triton server, and PyTorch, transformers and all that hangs together with them in the versions
TensorRT-LLM was made for; none of these may be replaced.
"""

import re
import sys
import tomllib
from pathlib import Path

OF_THE_IMAGE = {
    "huggingface_hub",
    "mpi4py",
    "numpy",
    "nvidia-pytriton",
    "safetensors",
    "tokenizers",
    "torch",
    "transformers",
}


def requirements(pyproject: Path) -> list[str]:
    project = tomllib.loads(pyproject.read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["serve"]]
    return sorted({one for one in wanted if re.split(r"[\[<>=!~; ]", one)[0] not in OF_THE_IMAGE})


if __name__ == "__main__":
    sys.stdout.write("\n".join(requirements(Path(sys.argv[1]))) + "\n")
