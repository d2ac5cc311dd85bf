"""Triton as a part: tritonserver with its Python stubs, serving the ensemble."""

from __future__ import annotations

from pathlib import Path

from saguaro.orchestrator.config import DeploymentConfig


class Triton:
    name = "triton"
    def __init__(self, config: DeploymentConfig, engine: Path, socket: Path, folder: Path) -> None: ...
