"""From recipes to engine directories: the weights come out as they went in, and nothing half-made can be loaded."""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from conftest import require_compiler
from gguf_writer import rounded, write_gguf
from saguaro.build import driver, store
from saguaro.build.driver import build, engine_directory, find_recipe
from saguaro.build.gguf_file import GgufFile
from saguaro.build.pytorch import PytorchBuild
from saguaro.build.recipe import Recipe, Tiny, read_recipe, shipped_recipes
from saguaro.build.shards import SafetensorsWriter, ShardPlan
from saguaro.build.tiny import TinyWeights
from saguaro.build.weights import open_weights
from saguaro.engines.manifest import FILE, QUANTISED, TOKENIZER, Dtype, Manifest, compare_token_maps, token_map
from saguaro.errors import CapacityError, ConfigError, EngineError, ModelError
from saguaro.plugins import cpp
from tiny_models import FAMILIES, tiny_model

TINY = Tiny("qwen2", layers=2, hidden_size=32, heads=4, kv_heads=2, vocab_size=300, max_model_len=64)
TOKENS = torch.tensor([[5, 300, 17, 499, 2, 80, 80, 3, 250, 41]])


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The shipped tiny target and draft."""
    folder = tmp_path_factory.mktemp("shipped")
    return build(find_recipe("tiny-target"), folder), build(find_recipe("tiny-draft"), folder)


def recipe(**fields: Any) -> Recipe:
    given = {"name": "test", "engine": "pytorch", "dtype": "float32"} | fields
    if "model" not in given:
        given.setdefault("tiny", TINY)
    return Recipe(**given)


def published(folder: Path, model: Any, tokenizer: Path, **options: Any) -> Path:
    """A model folder as people publish it."""
    model.save_pretrained(folder, **options)
    for name in (TOKENIZER, "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tokenizer / name, folder / name)
    return folder


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(TOKENS).logits  # type: ignore[no-any-return]


def built_logits(directory: Path, dtype: torch.dtype = torch.float32) -> Tensor:
    return logits(AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager").eval())


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "engines").glob("*"))


# Tiny models ------------------------------------------------------------------------------------------------------


def test_the_shipped_pair_shares_its_tokenizer_and_agrees_often_but_not_always(shipped: tuple[Path, Path]) -> None:
    target, draft = shipped
    compare_token_maps(target, draft)
    assert (target / TOKENIZER).read_bytes() == (draft / TOKENIZER).read_bytes()
    manifest = Manifest.load(target)
    assert manifest.vocab_size == 500
    models = [AutoModelForCausalLM.from_pretrained(path).eval() for path in shipped]
    assert models[0].config.vocab_size == 512
    tokenizer = AutoTokenizer.from_pretrained(target)
    prompt = tokenizer("def read(path):", return_tensors="pt")
    text = models[0].generate(**prompt, max_new_tokens=150, do_sample=False, eos_token_id=None, pad_token_id=0)
    with torch.no_grad():
        target_logits, draft_logits = (model(text).logits[0, prompt.input_ids.shape[1] :, :500] for model in models)
    agreement = (target_logits.argmax(-1) == draft_logits.argmax(-1)).float().mean()
    overlap = torch.minimum(target_logits.softmax(-1), draft_logits.softmax(-1)).sum(-1).mean()
    assert 0.4 < agreement < 0.9
    assert 0.4 < overlap < 0.9


def test_the_tiny_tokenizer_is_complete(shipped: tuple[Path, Path]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(shipped[0])
    text = "def f(x):\n\treturn x  # naïve 日本 \U0001f600"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.eos_token == "<|im_end|>"
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, return_dict=False
    )
    assert tokenizer.decode(prompt) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert sorted(token_map(shipped[0])) == list(range(500))
    assert Manifest.load(shipped[0]).eos_token_ids == (2, 0)


def test_equal_recipes_give_equal_bytes_in_another_process(tmp_path: Path) -> None:
    here = build(recipe(), tmp_path / "here")
    code = (
        "import sys; from pathlib import Path; from saguaro.build.driver import build;"
        "from saguaro.build.recipe import Recipe, Tiny;"
        f"print(build({recipe()!r}, Path(sys.argv[1])))"
    )
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    there = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "there"], capture_output=True, text=True, check=True, env=environment
    )
    assert Manifest.load(Path(there.stdout.strip())) == Manifest.load(here)


def test_fewer_layers_are_the_first_layers(tmp_path: Path) -> None:
    deep = load_file(build(recipe(), tmp_path) / "model.safetensors")
    shallow = load_file(build(recipe(tiny=dataclasses.replace(TINY, layers=1)), tmp_path) / "model.safetensors")
    assert deep.keys() > shallow.keys()
    assert all(torch.equal(deep[name], tensor) for name, tensor in shallow.items())


def test_noise_is_as_large_as_asked(tmp_path: Path) -> None:
    calm = load_file(build(recipe(), tmp_path) / "model.safetensors")["model.embed_tokens.weight"]
    noisy_recipe = recipe(tiny=dataclasses.replace(TINY, noise=0.1))
    noisy = load_file(build(noisy_recipe, tmp_path) / "model.safetensors")["model.embed_tokens.weight"]
    assert ((noisy - calm).std() / calm.std()).item() == pytest.approx(0.1, rel=0.05)


@pytest.mark.parametrize("size", [100, 100_000])
def test_a_vocabulary_that_cannot_be_trained(tmp_path: Path, size: int) -> None:
    with pytest.raises(ConfigError, match=rf"tiny\.vocab_size: {size} ids cannot be had"):
        build(recipe(tiny=dataclasses.replace(TINY, vocab_size=size)), tmp_path)
    assert left_in(tmp_path) == []


# Weights as people have them -------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_safetensors_come_out_as_they_went_in(tmp_path: Path, shipped: tuple[Path, Path], family: str) -> None:
    model = tiny_model(family)
    folder = published(tmp_path / "source", model, shipped[0], max_shard_size="100kB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    directory = build(recipe(model=str(folder)), tmp_path)
    assert torch.equal(built_logits(directory), logits(model))
    manifest = Manifest.load(directory)
    assert (manifest.family, manifest.tp, manifest.dtype) == (model.config.model_type, 1, "float32")
    assert manifest.max_model_len == model.config.max_position_embeddings
    assert manifest.damaged(directory) == []
    assert (directory / TOKENIZER).read_bytes() == (shipped[0] / TOKENIZER).read_bytes()


def test_tied_embeddings_are_stored_once(tmp_path: Path, shipped: tuple[Path, Path]) -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    directory = build(recipe(model=str(published(tmp_path / "source", model, shipped[0]))), tmp_path)
    assert "lm_head.weight" not in load_file(directory / "model.safetensors")
    assert torch.equal(built_logits(directory), logits(model))


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "int4"])
def test_casting_rounds_each_weight_once(tmp_path: Path, shipped: tuple[Path, Path], dtype: str) -> None:
    if dtype in QUANTISED:
        require_compiler()
    model = tiny_model("qwen2")
    folder = published(tmp_path / "source", model, shipped[0])
    directory = build(recipe(model=str(folder), dtype=dtype), tmp_path)
    stored = load_file(directory / "model.safetensors")
    assert all(torch.equal(stored[name], tensor.bfloat16()) for name, tensor in model.state_dict().items())
    assert Manifest.load(directory).dtype == dtype


@pytest.mark.parametrize("dtype", QUANTISED)
def test_a_quantised_model_without_a_compiler_is_refused_before_anything_is_fetched(
    dtype: Dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpp, "load", cpp.load.__wrapped__)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(EngineError, match=r"quantised_linear is C\+\+ .*no compiler here .*apt-get install g\+\+"):
        build(recipe(model="qwen2.5-coder-0.5b", dtype=dtype), tmp_path)
    assert list(tmp_path.iterdir()) == []


GGUF_CASES = [(family, "qwen2") for family in FAMILIES if family != "llama3.1"] + [("llama", "smollm")]


@pytest.mark.parametrize(("family", "split"), GGUF_CASES)
def test_gguf_comes_out_as_it_went_in(tmp_path: Path, shipped: tuple[Path, Path], family: str, split: str) -> None:
    model = tiny_model(family)
    write_gguf(tmp_path / "m.gguf", model, Tokenizer.from_file(str(shipped[0] / TOKENIZER)), split=split)
    directory = build(recipe(model=str(tmp_path / "m.gguf")), tmp_path)
    torch.testing.assert_close(built_logits(directory), logits(model), rtol=1e-6, atol=1e-6)
    stored = load_file(directory / "model.safetensors")
    assert all(torch.equal(stored[name], tensor) for name, tensor in model.state_dict().items())
    assert token_map(directory) == token_map(shipped[0])
    manifest = Manifest.load(directory)
    assert (manifest.vocab_size, manifest.eos_token_ids) == (500, (2, 0))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "F16", "BF16"])
def test_quantised_gguf_is_what_the_quantisation_left(tmp_path: Path, shipped: tuple[Path, Path], kind: str) -> None:
    stored_as = GGMLQuantizationType[kind]
    model = tiny_model("llama", tie_word_embeddings=True)
    write_gguf(tmp_path / "m.gguf", model, Tokenizer.from_file(str(shipped[0] / TOKENIZER)), kind=stored_as)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(rounded(parameter, stored_as))
    directory = build(recipe(model=str(tmp_path / "m.gguf")), tmp_path)
    assert "lm_head.weight" not in load_file(directory / "model.safetensors")
    torch.testing.assert_close(built_logits(directory), logits(model), rtol=1e-5, atol=1e-5)


def test_llama_3_scaling_is_recovered_from_its_factors(tmp_path: Path, shipped: tuple[Path, Path]) -> None:
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model = tiny_model("llama", rope_parameters=scaling, max_position_embeddings=65536)
    plain = 500000.0 ** -(torch.arange(0, 16, 2, dtype=torch.float32) / 16)
    factors = plain / model.model.rotary_emb.inv_freq
    assert factors.min().item() == pytest.approx(1)
    assert ((factors > 1.1) & (factors < 7.9)).any()
    tokenizer = Tokenizer.from_file(str(shipped[0] / TOKENIZER))
    write_gguf(tmp_path / "m.gguf", model, tokenizer, split="llama-bpe", tensors={"rope_freqs.weight": factors})
    directory = build(recipe(model=str(tmp_path / "m.gguf")), tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
    torch.testing.assert_close(loaded.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)
    torch.testing.assert_close(logits(loaded), logits(model), rtol=1e-5, atol=1e-5)
    write_gguf(tmp_path / "n.gguf", model, tokenizer, tensors={"rope_freqs.weight": factors * 1.1})
    with pytest.raises(ModelError, match="rotary factors"):
        open_weights(tmp_path / "n.gguf")


def test_gguf_splits_text_as_its_name_says(tmp_path: Path, shipped: tuple[Path, Path]) -> None:
    source = Tokenizer.from_file(str(shipped[0] / TOKENIZER))
    text = "It's 12345 <|im_end|>cafe\u0301"

    def pieces(split: str) -> tuple[list[str], Any]:
        write_gguf(tmp_path / f"{split}.gguf", tiny_model("llama"), source, split=split)
        open_weights(tmp_path / f"{split}.gguf").write_tokenizer(tmp_path)
        tokenizer = AutoTokenizer.from_pretrained(tmp_path)
        assert tokenizer.encode("<|im_end|>", add_special_tokens=False) == [2]
        return [piece for piece, _ in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text[:8])], tokenizer

    words, qwen = pieces("qwen2")
    assert words == ["It", "'s", "Ġ", "1", "2", "3"]
    assert qwen.decode(qwen.encode(text)) == text.replace("e\u0301", "é")
    words, llama = pieces("llama-bpe")
    assert words == ["It", "'s", "Ġ", "123"]
    assert llama.encode("a")[0] == 0  # begins with <|endoftext|>, as Llama 3 does unless the file says otherwise
    words, smol = pieces("smollm")
    assert words == ["It", "'s", "Ġ", "1", "2", "3"]
    assert smol.decode(smol.encode(text)) == text


# Damage ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory, shipped: tuple[Path, Path]) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    write_gguf(path, tiny_model("qwen2"), Tokenizer.from_file(str(shipped[0] / TOKENIZER)))
    return path.read_bytes()


@settings(max_examples=60)
@given(st.data())
def test_truncated_gguf_is_always_noticed(
    gguf: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("cut") / "m.gguf"
    path.write_bytes(gguf[: data.draw(st.integers(0, len(gguf) - 1))])
    with pytest.raises(ModelError, match=r"m\.gguf"):
        GgufFile(path)


@settings(max_examples=150)
@given(st.data())
def test_damaged_gguf_headers_never_crash(
    gguf: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Whatever the bytes say, the file is read or refused, and no memory beyond its size is asked for."""
    damaged = bytearray(gguf)
    for at in data.draw(st.lists(st.integers(0, 1500), min_size=1, max_size=8)):
        damaged[at] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("damaged") / "m.gguf"
    path.write_bytes(damaged)
    with contextlib.suppress(ModelError):
        GgufFile(path)


def test_a_truncated_gguf_builds_nothing(tmp_path: Path, gguf: bytes) -> None:
    (tmp_path / "m.gguf").write_bytes(gguf[: len(gguf) // 2])
    with pytest.raises(ModelError, match="truncated or damaged"):
        build(recipe(model=str(tmp_path / "m.gguf")), tmp_path)
    assert left_in(tmp_path) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tokenizer.ggml.pre": "mystery"}, "mystery"),
        ({"tokenizer.ggml.model": "llama"}, "is none of qwen2, llama-bpe, smollm"),
        ({"qwen2.rope.scaling.type": "yarn"}, "'yarn'"),
        ({"split.count": 3}, "cut into several files"),
        ({"tokenizer.ggml.eos_token_id": 510}, "eos token 510"),
        ({"qwen2.rope.dimension_count": 8}, "8 of 16 dimensions"),
        ({"qwen2.block_count": "three"}, "is a str, not a int"),
        ({"qwen2.block_count": 2**31}, "announces 2147483648 layers and has 3"),
        ({"qwen2.attention.head_count": 0}, "attention.head_count is 0"),
        ({"qwen2.attention.head_count": 5}, "describes no possible model"),
    ],
)
def test_gguf_that_would_come_out_wrong_is_refused(
    tmp_path: Path, shipped: tuple[Path, Path], change: dict[str, Any], said: str
) -> None:
    path = tmp_path / "m.gguf"
    tokenizer = Tokenizer.from_file(str(shipped[0] / TOKENIZER))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gguf.gguf_writer.logger.warning", lambda *arguments: None)  # of the duplicated key
        write_gguf(path, tiny_model("qwen2"), tokenizer, metadata=change)
    with pytest.raises(ModelError) as caught:
        open_weights(path)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), "model.norm.weight is missing, not (96,)"),
        (lambda tensors: tensors.update(extra=torch.zeros(3)), "extra is (3,), not expected"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.zeros(95)}), "is (95,), not (96,)"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.zeros(96).int()}), "not floating point"),
    ],
)
def test_tensors_that_are_not_the_models(tmp_path: Path, shipped: tuple[Path, Path], damage: Any, said: str) -> None:
    folder = published(tmp_path / "source", tiny_model("llama"), shipped[0])
    tensors = load_file(folder / "model.safetensors")
    damage(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError) as caught:
        build(recipe(model=str(folder)), tmp_path)
    assert said in str(caught.value)
    assert left_in(tmp_path) == []


def test_truncated_and_missing_safetensors(tmp_path: Path, shipped: tuple[Path, Path]) -> None:
    folder = published(tmp_path / "source", tiny_model("llama"), shipped[0], max_shard_size="100kB")
    first, second = sorted(folder.glob("*.safetensors"))[:2]
    first.write_bytes(first.read_bytes()[:-1])
    with pytest.raises(ModelError, match=rf"{first.name}: cannot be read as safetensors"):
        build(recipe(model=str(folder)), tmp_path)
    first.unlink()
    with pytest.raises(ModelError, match=rf"{first.name}: cannot be read as safetensors"):
        build(recipe(model=str(folder)), tmp_path)
    assert second.exists()
    assert left_in(tmp_path) == []


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"model_type": "mamba"}, EngineError, "'mamba'; models of type llama, qwen2, qwen3"),
        ({"quantization_config": {"quant_method": "gptq"}}, EngineError, "quantised (gptq)"),
        ({"intermediate_size": 161}, ModelError, "tensors are not those of a llama model"),
        ({"intermediate_size": "many"}, ModelError, "describes no possible model"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, EngineError, "dynamic"),
    ],
)
def test_configurations_that_cannot_be_built(
    tmp_path: Path, shipped: tuple[Path, Path], change: dict[str, Any], error: type[Exception], said: str
) -> None:
    folder = published(tmp_path / "source", tiny_model("llama"), shipped[0])
    config = json.loads((folder / "config.json").read_text())
    if "rope_scaling" in change:
        del config["rope_parameters"]
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(error) as caught:
        build(recipe(model=str(folder)), tmp_path)
    assert said in str(caught.value)
    assert left_in(tmp_path) == []


def test_code_named_by_a_configuration_is_neither_run_nor_kept(tmp_path: Path, shipped: tuple[Path, Path]) -> None:
    model = tiny_model("llama")
    folder = published(tmp_path / "source", model, shipped[0])
    config = json.loads((folder / "config.json").read_text())
    auto_map = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": auto_map}))
    (folder / "evil.py").write_text("raise SystemExit('code of a model folder was run')")
    directory = build(recipe(model=str(folder)), tmp_path)
    assert torch.equal(built_logits(directory), logits(model))
    assert "evil" not in (directory / "config.json").read_text()
    assert not (directory / "evil.py").exists()


# Sharding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "llama with biases"])
def test_shards_are_the_model(tmp_path: Path, shipped: tuple[Path, Path], family: str, tp: int) -> None:
    """With 8 heads on 2 KV heads; on 4 ranks each KV head is on two of them."""
    biases = {"attention_bias": True, "mlp_bias": True} if family == "llama with biases" else {}
    model = tiny_model(family.split()[0], num_attention_heads=8, hidden_size=64, head_dim=8, **biases)
    folder = published(tmp_path / "source", model, shipped[0])
    directory = build(recipe(model=str(folder), tp=tp), tmp_path)
    shards = [load_file(directory / f"model-{rank}-of-{tp}.safetensors") for rank in range(tp)]
    whole = model.state_dict()
    assert all(shard.keys() == whole.keys() for shard in shards)
    for name, tensor in whole.items():
        assert torch.equal(joined(name, [shard[name] for shard in shards]), tensor), name
        assert all(shard[name].is_contiguous() for shard in shards)
    manifest = Manifest.load(directory)
    assert manifest.shards["model.layers.*.self_attn.q_proj"] == "colwise"
    assert manifest.shards["model.layers.*.mlp.down_proj"] == "rowwise"
    assert manifest.shards["lm_head"] == manifest.shards["model.embed_tokens"] == "whole"
    assert set(manifest.files) >= {f"model-{rank}-of-{tp}.safetensors" for rank in range(tp)}


def joined(name: str, shares: list[Tensor]) -> Tensor:
    """Put the ranks' shares together again, by what each layer computes rather than by how it was cut."""
    if ".o_proj." in name or ".down_proj." in name:
        return torch.cat(shares, dim=1) if name.endswith(".weight") else torch.stack(shares).sum(0)
    if ".k_proj." in name or ".v_proj." in name:
        copies = max(1, len(shares) // 2)
        assert all(torch.equal(share, shares[rank // copies * copies]) for rank, share in enumerate(shares))
        return torch.cat(shares[::copies])
    if ".q_proj." in name or ".gate_proj." in name or ".up_proj." in name:
        return torch.cat(shares)
    assert all(torch.equal(share, shares[0]) for share in shares)
    return shares[0]


@given(
    st.integers(1, 6).flatmap(lambda kv: st.tuples(st.just(kv), st.integers(1, 6).map(lambda group: kv * group))),
    st.integers(1, 12),
)
def test_a_rank_has_the_kv_heads_its_query_heads_read(heads: tuple[int, int], tp: int) -> None:
    kv_heads, query_heads = heads
    config = LlamaConfig(
        num_attention_heads=query_heads, num_key_value_heads=kv_heads, hidden_size=query_heads, intermediate_size=tp * 3
    )
    fits = query_heads % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0)
    if not fits:
        with pytest.raises(ConfigError, match=f"tp: {tp} ranks cannot share {query_heads} attention heads"):
            ShardPlan(config, tp)
        return
    plan = ShardPlan(config, tp)
    for rank in range(tp):
        mine = plan.split("model.layers.0.self_attn.q_proj.weight").cut(torch.arange(query_heads), rank, tp)
        keys = plan.split("model.layers.0.self_attn.k_proj.weight").cut(torch.arange(kv_heads), rank, tp)
        group = len(mine) // len(keys)
        for local, head in enumerate(mine.tolist()):
            assert keys[local // group] == head // (query_heads // kv_heads)


def test_an_impossible_tp_names_the_possible_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tp: 3 ranks cannot share 4 attention heads.*possible: 1, 2, 4\."):
        build(recipe(tp=3), tmp_path)
    assert left_in(tmp_path) == []


def test_the_writer_writes_what_the_library_reads(tmp_path: Path) -> None:
    tensors = {"b": torch.randn(3, 5), "a": torch.randn(7), "empty": torch.zeros(0, 2), "t": torch.randn(4, 6).T}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    with SafetensorsWriter(tmp_path / "x.safetensors", torch.float32, shapes) as writer:
        with pytest.raises(ValueError, match="expected tensor b next"):
            writer.write("a", tensors["a"])
        for name, tensor in tensors.items():
            writer.write(name, tensor)
        record = writer.close()
    read = load_file(tmp_path / "x.safetensors")
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
    content = (tmp_path / "x.safetensors").read_bytes()
    assert record.size == len(content)
    assert (8 + int.from_bytes(content[:8], "little")) % 64 == 0


# The driver ------------------------------------------------------------------------------------------------------


def test_a_second_run_builds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = build(recipe(), tmp_path)
    assert directory == engine_directory(recipe(), tmp_path)
    before = {path.name: path.stat().st_mtime_ns for path in directory.iterdir()}

    def again(*arguments: object) -> None:
        raise AssertionError("built again")

    monkeypatch.setattr(driver, "_build_from_weights", again)
    assert build(recipe(), tmp_path) == directory
    assert {path.name: path.stat().st_mtime_ns for path in directory.iterdir()} == before
    with pytest.raises(AssertionError, match="built again"):
        build(recipe(dtype="bfloat16"), tmp_path)


def test_the_directory_depends_on_the_bytes_of_the_weights(tmp_path: Path, gguf: bytes) -> None:
    (tmp_path / "a.gguf").write_bytes(gguf)
    (tmp_path / "b.gguf").write_bytes(gguf)
    (tmp_path / "c.gguf").write_bytes(gguf[:-4] + b"\0\0\0\1")
    places = [engine_directory(recipe(model=str(tmp_path / f"{name}.gguf")), tmp_path) for name in "abc"]
    assert places[0] == places[1]
    assert places[0] != places[2]


def test_a_damaged_engine_directory_is_built_again(tmp_path: Path) -> None:
    directory = build(recipe(), tmp_path)
    content = (directory / "model.safetensors").read_bytes()
    (directory / "model.safetensors").write_bytes(content[:-1])
    assert build(recipe(), tmp_path) == directory
    assert (directory / "model.safetensors").read_bytes() == content
    (directory / FILE).unlink()
    build(recipe(), tmp_path)
    Manifest.load(directory)


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit, OSError(28, "No space left on device")])
def test_an_interrupted_build_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interruption: BaseException | type[BaseException]
) -> None:
    def interrupted(self: SafetensorsWriter, name: str, tensor: Tensor) -> None:
        assert left_in(tmp_path)[0].startswith(".building-test-")
        raise interruption

    monkeypatch.setattr(SafetensorsWriter, "write", interrupted)
    expected = CapacityError if isinstance(interruption, OSError) else interruption
    with pytest.raises(expected):  # type: ignore[arg-type]
        build(recipe(), tmp_path)
    assert left_in(tmp_path) == []


KILLED = """
import sys, time
from pathlib import Path
from saguaro.build.driver import build
from saguaro.build.recipe import Recipe, Tiny
from saguaro.engines.manifest import Manifest

def stop(self, directory):
    print("all but the manifest is written", flush=True)
    time.sleep(600)

Manifest.write = stop
build({recipe!r}, Path(sys.argv[1]))
"""


def test_a_killed_build_is_never_loaded_and_is_cleaned_up_by_the_next(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED.format(recipe=recipe()), tmp_path], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("all but")
    [half] = left_in(tmp_path)
    assert half.startswith(".building-test-")
    assert not engine_directory(recipe(), tmp_path).exists()
    # Another recipe's build meanwhile leaves a living build alone.
    build(recipe(name="other"), tmp_path)
    assert half in left_in(tmp_path)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    with pytest.raises(EngineError, match="holds no complete engine"):
        Manifest.load(tmp_path / "engines" / half)
    build(recipe(name="another"), tmp_path)
    assert half not in left_in(tmp_path)
    (tmp_path / "engines" / half).mkdir()
    Manifest.load(build(recipe(), tmp_path))
    assert half not in left_in(tmp_path)


def test_two_builds_at_once_build_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Path] = []
    real = driver._build_from_weights

    def counted(recipe: Recipe, paths: list[Path], staging: Path, *rest: Any) -> None:
        built.append(staging)
        real(recipe, paths, staging, *rest)

    monkeypatch.setattr(driver, "_build_from_weights", counted)
    threads = [threading.Thread(target=build, args=(recipe(), tmp_path)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1
    assert left_in(tmp_path) == [engine_directory(recipe(), tmp_path).name]


def test_no_disk_space_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(store.shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 10**6, 10**6))
    with pytest.raises(CapacityError, match=r"the engine test: 67\.\d MB needed, 1 MB available"):
        build(recipe(), tmp_path)
    assert left_in(tmp_path) == []


def test_without_tensorrt_nothing_is_pulled_or_built_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "find_spec", lambda name: None)
    with pytest.raises(EngineError, match="TensorRT is not installed here. Build it in NVIDIA's image"):
        build(recipe(engine="tensorrt"), tmp_path)
    assert left_in(tmp_path) == []


def test_a_context_longer_than_the_models(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_model_len is 65, the model's limit is 64"):
        build(recipe(max_model_len=65), tmp_path)
    assert Manifest.load(build(recipe(max_model_len=32), tmp_path)).max_model_len == 32


def test_a_damaged_tokenizer(tmp_path: Path, shipped: tuple[Path, Path]) -> None:
    folder = published(tmp_path / "source", tiny_model("llama"), shipped[0])
    (folder / TOKENIZER).write_text((folder / TOKENIZER).read_text()[:-20])
    with pytest.raises(ModelError, match=r"tokenizer\.json: is not a tokenizer"):
        build(recipe(model=str(folder)), tmp_path)
    assert left_in(tmp_path) == []


def test_a_tokenizer_larger_than_the_model(tmp_path: Path, shipped: tuple[Path, Path]) -> None:
    folder = published(tmp_path / "source", tiny_model("llama", vocab_size=448), shipped[0])
    with pytest.raises(ModelError, match="ids up to 499, but the model has 448 rows"):
        build(recipe(model=str(folder)), tmp_path)


def test_memory_does_not_grow_with_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors are read one at a time, each only after the one before was written."""
    events = []
    real_write = SafetensorsWriter.write

    class Counted:
        def __init__(self, weights: Any) -> None:
            self._weights = weights

        def __getattr__(self, name: str) -> Any:
            return getattr(self._weights, name)

        def read(self, name: str, dtype: torch.dtype) -> Tensor:
            events.append(f"read {name}")
            return self._weights.read(name, dtype)  # type: ignore[no-any-return]

    def write(self: SafetensorsWriter, name: str, tensor: Tensor) -> None:
        events.append(f"write {name}")
        real_write(self, name, tensor)

    monkeypatch.setattr(SafetensorsWriter, "write", write)
    PytorchBuild(recipe(), Counted(TinyWeights(TINY))).write(tmp_path, "0" * 64, lambda size: None)
    assert len(events) > 10
    assert all(
        first.removeprefix("read") == second.removeprefix("write") for first, second in zip(events[::2], events[1::2])
    )


# Recipes ---------------------------------------------------------------------------------------------------------


def test_shipped_recipes_can_be_read() -> None:
    assert set(shipped_recipes()) >= {
        "qwen2.5-coder-0.5b-cpu",
        "qwen2.5-coder-0.5b-int4-cpu",
        "qwen2.5-coder-1.5b-cpu",
        "qwen2.5-coder-1.5b-int4-cpu",
        "qwen2.5-coder-1.5b-int8-cpu",
        "smollm2-135m-cpu",
        "tiny-draft",
        "tiny-target",
    }
    for name in shipped_recipes():
        assert find_recipe(name).name == name


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name: a\nengine: pytorch\nmodle: b\n", "modle: unknown key (did you mean model?)"),
        ("name: a\nengine: pytorhc\nmodel: b\n", "one of pytorch, trtllm, tensorrt"),
        ("name: a\nengine: pytorch\n", "exactly one of model, tiny and simulated"),
        ("name: a/b\nengine: pytorch\nmodel: b\n", "name must be letters"),
        ("name: a\nengine: pytorch\nmodel: b\ntp: 0\n", "tp must be at least 1"),
        ("name: a\nengine: pytorch\nmodel: b\ndtype: fp4\n", "one of float32, bfloat16, int8, int4"),
        ("name: a\nengine: pytorch\nmodel: b\ntrtllm: {}\n", "trtllm is given, but engine is pytorch"),
        (
            "name: a\nengine: pytorch\ntiny: {family: llama, layers: 1, hidden_size: 30, heads: 4, kv_heads: 2}\n",
            "tiny: hidden_size must be a multiple of 2 * heads (8)",
        ),
        (
            "name: a\nengine: pytorch\ntiny: {family: llama, layers: 1, hidden_size: 32, heads: 4, kv_heads: 3}\n",
            "tiny: heads must be a multiple of kv_heads",
        ),
    ],
)
def test_recipes_that_do_not_fit(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        find_recipe(str(path))
    assert said in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_recipe_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"no recipe named 'tiny-traget' \(did you mean tiny-target\?\)"):
        find_recipe("tiny-traget")
    with pytest.raises(ConfigError, match=r"missing\.yaml: cannot be read"):
        find_recipe("missing.yaml")


def test_a_linked_gguf_needs_no_suffix(tmp_path: Path, gguf: bytes) -> None:
    """As download caches keep them: a link named model.gguf to a file named by its hash."""
    (tmp_path / "blob").write_bytes(gguf)
    (tmp_path / "model.gguf").symlink_to(tmp_path / "blob")
    linked = build(recipe(model=str(tmp_path / "model.gguf")), tmp_path)
    assert build(recipe(model=str(tmp_path / "blob")), tmp_path) == linked


def test_paths_in_a_recipe_are_relative_to_it(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    path.write_text("name: a\nengine: pytorch\nmodel: m.gguf\n")
    assert read_recipe(path).model == str(tmp_path / "m.gguf")
    path.write_text("name: a\nengine: pytorch\nmodel: smollm2-135m\n")
    (tmp_path / "smollm2-135m").mkdir()
    assert read_recipe(path).model == "smollm2-135m"
