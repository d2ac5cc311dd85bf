"""Lays a model repository out: `config.pbtxt` generated, `model.py` copied from the package."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from saguaro.engines.manifest import Manifest
from saguaro.orchestrator.config import DeploymentConfig
from saguaro.triton_repo.tensors import ENSEMBLE, STEPS, ModelSpec, TensorSpec


def write_repository(folder: Path, *, config: DeploymentConfig, engine: Path, socket: Path) -> None:
    """A model repository for one deployment: preprocessing, ssd, postprocessing, ensemble.

    `engine` is the target's directory, for its tokenizer; `socket` is the service's. What is in `folder` is replaced.
    Raises EngineError when the engine is not complete.
    """
    parameters = {
        "deployment": config.name,
        "engine": str(engine.resolve()),
        "socket": str(socket),
        "max_model_len": str(Manifest.load(engine).max_model_len),
    }
    for model, text in render(parameters).items():
        version = folder / model / "1"
        version.mkdir(parents=True, exist_ok=True)
        (folder / model / "config.pbtxt").write_text(text)
        source = resources.files("saguaro.triton_repo") / model / "model.py"
        if source.is_file():  # the ensemble has none
            (version / "model.py").write_text(source.read_text())


def render(parameters: Mapping[str, str]) -> dict[str, str]:
    """The text of each model's config.pbtxt; `parameters` are what its model.py is told."""
    configs = [*(_step(spec, parameters) for spec in STEPS), _ensemble()]
    return {config.name: text_format.MessageToString(config) for config in configs}


def _model(spec: ModelSpec) -> Any:
    config = pb.ModelConfig(name=spec.name, max_batch_size=1)
    for tensor in spec.inputs:
        config.input.add(name=tensor.name, data_type=_type(tensor), dims=tensor.dims, optional=not tensor.required)
    for tensor in spec.outputs:
        config.output.add(name=tensor.name, data_type=_type(tensor), dims=tensor.dims)
    return config


def _step(spec: ModelSpec, parameters: Mapping[str, str]) -> Any:
    config = _model(spec)
    config.backend = "python"
    config.model_transaction_policy.decoupled = spec.decoupled
    # One instance of each. With two of postprocessing the chunks of a stream would come out of order.
    config.instance_group.add(count=1, kind=pb.ModelInstanceGroup.KIND_CPU)
    for name, value in sorted(parameters.items()):
        config.parameters[name].string_value = value
    return config


def _ensemble() -> Any:
    config = _model(ENSEMBLE)
    config.platform = "ensemble"
    outside = {tensor.name for tensor in ENSEMBLE.inputs}
    final = {tensor.name for tensor in ENSEMBLE.outputs}
    for spec in STEPS:
        step = config.ensemble_scheduling.step.add(model_name=spec.name, model_version=-1)
        last = spec is STEPS[-1]
        for name in _names(spec.inputs):
            if last or name in outside or name == "input_ids":
                step.input_map[name] = f"ssd_{name}" if last else name
        for name in _names(spec.outputs):
            step.output_map[name] = f"ssd_{name}" if spec.name == "ssd" else name
    if not final <= {name for step in config.ensemble_scheduling.step for name in step.output_map.values()}:
        raise ValueError("the ensemble has an output that no step makes")
    return config


def _names(tensors: Iterable[TensorSpec]) -> list[str]:
    return [tensor.name for tensor in tensors]


def _type(tensor: TensorSpec) -> Any:
    return pb.DataType.Value(f"TYPE_{tensor.dtype}")
