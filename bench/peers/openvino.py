"""OpenVINO GenAI, with what it makes of the GGUF files of a Qwen2 or Llama pair."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import dequantize, quantize

from saguaro.bench.peers.peer import Answer, Arrivals, Method, Pair
from saguaro.orchestrator.types import Mode

_READ = {GGMLQuantizationType[name] for name in ("F32", "F16", "Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K")}


@dataclass
class OpenVino:
    pair: Pair
    threads: int
    folder: Path  # for the weights in its own format
    modes: tuple[Mode, ...] = ("ar", "sd")
    _pipelines: dict[bool, Any] = field(default_factory=dict, init=False)  # by whether there is a draft

    @property
    def name(self) -> str:
        return "openvino" if "ar" in self.modes else "openvino with draft"

    @property
    def precision(self) -> str:
        return f"{self.pair.quantisation}, what its reader does not know as Q8_0"

    @property
    def settings(self) -> str:
        return f"INFERENCE_NUM_THREADS={self.threads} for each model, num_assistant_tokens"

    def missing(self) -> str | None:
        return self.pair.missing_for("openvino_genai")

    def version(self) -> str:
        return version("openvino-genai")

    def load(self, methods: Sequence[Method]) -> None:
        import openvino_genai as genai

        threads = {"INFERENCE_NUM_THREADS": self.threads}
        for drafted in {bool(method.lookahead) for method in methods}:
            draft = {}
            if drafted:
                draft["draft_model"] = genai.draft_model(self._converted(self.pair.draft_gguf), "CPU", **threads)
            target = self._readable(self.pair.target_gguf)
            self._pipelines[drafted] = genai.LLMPipeline(target, "CPU", **draft, **threads)

    def generate(self, method: Method, prompt: Sequence[int], max_tokens: int) -> Answer:
        import numpy as np
        import openvino_genai as genai
        from openvino import Tensor

        arrivals = Arrivals()

        class Streamer(genai.StreamerBase):  # type: ignore[misc]
            def write(self, token: int | Sequence[int]) -> Any:
                arrivals.add([token] if isinstance(token, int) else list(token))
                return genai.StreamingStatus.RUNNING

            def end(self) -> None: ...

        config = genai.GenerationConfig(max_new_tokens=max_tokens, ignore_eos=True)
        if method.lookahead:
            config.num_assistant_tokens = method.lookahead
        result = self._pipelines[bool(method.lookahead)].generate(
            Tensor(np.array([prompt], dtype=np.int64)), config, Streamer()
        )
        if not method.lookahead:
            return arrivals.answer()
        return arrivals.answer(max_tokens - 1 - result.extended_perf_metrics.get_num_accepted_tokens())

    def close(self) -> None:
        self._pipelines.clear()

    def _readable(self, gguf: Path | None) -> Path:
        """The file, or one in which what its reader does not know is Q8_0, which loses nothing of five or six bits."""
        assert gguf is not None
        reader = GGUFReader(gguf)
        if all(tensor.tensor_type in _READ for tensor in reader.tensors):
            return gguf
        done = self.folder / gguf.name
        if not done.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.folder) as scratch:
                _rewrite(reader, Path(scratch) / gguf.name)
                (Path(scratch) / gguf.name).rename(done)
        return done

    def _converted(self, gguf: Path | None) -> Path:
        """The folder with the model in OpenVINO's own format: a draft is not taken from GGUF."""
        import openvino_genai as genai

        file = self._readable(gguf)
        done = self.folder / file.stem
        if not done.exists():
            with tempfile.TemporaryDirectory(dir=self.folder, ignore_cleanup_errors=True) as scratch:
                link = Path(scratch) / file.name  # it writes beside the file
                link.symlink_to(file.resolve())
                genai.LLMPipeline(link, "CPU", enable_save_ov_model=True)
                link.unlink()
                Path(scratch).rename(done)
        return done


def _rewrite(reader: GGUFReader, path: Path) -> None:
    writer = GGUFWriter(path, reader.fields["general.architecture"].contents())
    for name, entry in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            kinds = (*entry.types, None)
            writer.add_key_value(name, entry.contents(), kinds[0], kinds[-2] if len(entry.types) > 1 else None)
    for tensor in reader.tensors:
        data, kind = tensor.data, tensor.tensor_type
        if kind not in _READ:
            kind = GGMLQuantizationType.Q8_0
            data = quantize(dequantize(tensor.data, tensor.tensor_type), kind)
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
