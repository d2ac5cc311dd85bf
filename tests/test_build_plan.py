"""Plans of compiled engines: commands against TensorRT-LLM 1.2.1's parsers, memory against sums by hand, goldens."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ConfigDict, create_model

from saguaro import cli
from saguaro.build.driver import find_recipe, plan
from saguaro.build.gpu_memory import CARDS, GIB, weight_items
from saguaro.build.model_shape import SHAPES, ModelShape, read_shape
from saguaro.build.plan import Plan
from saguaro.build.plan_text import build_config, plan_json, plan_text
from saguaro.build.recipe import Plugins, Recipe, TrtllmOptions, read_recipe, shipped_recipes
from saguaro.build.shards import ShardPlan
from saguaro.build.trtllm_plan import plan_trtllm
from saguaro.build.weights import stored_shapes
from saguaro.errors import CapacityError, ConfigError, ModelError
from tiny_models import tiny_model
from trtllm_tools import CONTRACT, Refused, parser, program_of

GOLDEN = Path(__file__).parent / "golden" / "plans"
LLAMA_70B, LLAMA_8B = "meta-llama/Llama-3.1-70B-Instruct", "meta-llama/Llama-3.1-8B-Instruct"
QWEN_32B = "Qwen/Qwen3-32B"
NOWHERE = Path("/nowhere")
COMPILED = [name for name in shipped_recipes() if find_recipe(name).engine in ("trtllm", "tensorrt")]


def shipped(name: str) -> Plan:
    return plan(find_recipe(name), NOWHERE)


def trtllm(model: str = LLAMA_70B, *, tp: int = 4, dtype: Any = "bfloat16", length: int = 8192, **options: Any) -> Plan:
    recipe = Recipe(
        "r", "trtllm", model=model, tp=tp, dtype=dtype, max_model_len=length, trtllm=TrtllmOptions(**options)
    )
    return plan_trtllm(recipe, SHAPES[model])


def parsed(made: Plan) -> list[Any]:
    """Every command of a plan, as the program takes it."""
    found = []
    for step in made.steps:
        program, arguments = program_of(step.command)
        found.append(parser(program).parse_args(arguments))
    return found


# Command lines ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in COMPILED if find_recipe(name).engine == "trtllm"])
def test_commands_of_shipped_recipes_are_those_of_tensorrt_llm(name: str) -> None:
    recipe = find_recipe(name)
    checkpoint, engine = parsed(shipped(name))
    assert (checkpoint.model_dir, checkpoint.output_dir, checkpoint.dtype) == ("$MODEL", "$CHECKPOINT", "bfloat16")
    assert checkpoint.tp_size == recipe.tp
    assert (engine.checkpoint_dir, engine.output_dir) == ("$CHECKPOINT", "$ENGINE")
    assert engine.max_beam_width == 1
    assert engine.logits_dtype == "float32"
    assert (engine.kv_cache_type, engine.use_paged_context_fmha) == ("paged", "enable")
    assert (engine.remove_input_padding, engine.context_fmha) == ("enable", "enable")
    assert engine.workers == recipe.tp
    assert engine.input_timing_cache == engine.output_timing_cache == "$TIMING_CACHE"
    if "stock" in name:
        assert (engine.speculative_decoding_mode, engine.max_draft_len) == (None, 0)
    else:
        assert (engine.speculative_decoding_mode, engine.max_draft_len) == ("draft_tokens_external", 8)
    assert engine.gather_generation_logits  # logprobs of the target; what the stock draft guesses from
    assert not engine.gather_context_logits  # an error beside draft tokens
    if recipe.dtype == "fp8":
        assert (checkpoint.qformat, checkpoint.kv_cache_dtype) == ("fp8", "fp8")
        assert (engine.gemm_plugin, engine.use_fp8_context_fmha) == ("disable", "enable")
    else:
        assert engine.gemm_plugin == "auto"


switches = st.sampled_from([None, "enable", "disable"])


@settings(max_examples=60, deadline=None)
@given(
    model=st.sampled_from(sorted(SHAPES)),
    tp=st.sampled_from([1, 2, 4, 8]),
    dtype=st.sampled_from(["bfloat16", "fp8"]),
    batch=st.integers(1, 16),
    k=st.integers(0, 16),
    length=st.sampled_from([512, 2048, 8192]),
    block=st.sampled_from([16, 32, 64]),
    logits=st.booleans(),
    plugins=st.builds(Plugins, multiple_profiles=switches, reduce_fusion=switches, user_buffer=switches),
)
def test_every_plan_that_is_made_parses(
    model: str, tp: int, dtype: Any, batch: int, k: int, length: int, block: int, logits: bool, plugins: Plugins
) -> None:
    try:
        made = trtllm(
            model,
            tp=tp,
            dtype=dtype,
            length=length,
            max_batch_size=batch,
            max_draft_len=k,
            tokens_per_block=block,
            gather_generation_logits=logits,
            plugins=plugins,
        )
    except (ConfigError, CapacityError):
        return
    engine = parsed(made)[-1]
    assert engine.max_num_tokens >= batch * (k + 1)
    # A context is computed whole, and a full batch of the longest in one iteration.
    assert engine.max_num_tokens == batch * length
    assert engine.opt_num_tokens is None or engine.multiple_profiles == "disable"
    assert (engine.speculative_decoding_mode is None) == (k == 0)
    assert made.memory.fixed < made.memory.card.usable
    check_fields(made)


@pytest.mark.parametrize(
    "words",
    [
        "--tp_size 4",  # of the conversion alone
        "--use_custom_all_reduce enable",
        "--multi_block_mode enable",
        "--max_output_len 1024",
        "--cluster_key H100",
        "--max_batchsize 8",
        "--max_batch 8",  # an abbreviation
        "--speculative_decoding_mode external_draft_tokens",
        "--kv_cache_type PAGED",
        "--gemm_plugin enable",
        "--logits_dtype bfloat16",
        "--use_paged_context_fmha true",
        "--max_draft_len eight",
        "--gather_generation_logits true",
    ],
)
def test_removed_and_misspelt_flags_do_not_parse(words: str) -> None:
    _, arguments = program_of(shipped("llama-3.1-70b-h100").steps[-1].command)
    parser("trtllm-build").parse_args(arguments)
    with pytest.raises(Refused):
        parser("trtllm-build").parse_args([*arguments, *words.split()])


def test_the_contract_names_no_flag_that_plans_avoid() -> None:
    avoided = {text.split()[0] for text in CONTRACT["cli"]["trtllm-build"]["not_flags"]}
    used = {word for name in COMPILED for step in shipped(name).steps for word in step.command if word.startswith("--")}
    compile_used = {word for name in COMPILED for word in shipped(name).steps[-1].command if word.startswith("--")}
    assert "--tp_size" in used  # of the conversion
    assert not avoided & compile_used


def test_an_exact_kv_cache_beside_fp8_weights() -> None:
    checkpoint, engine = parsed(made := trtllm(dtype="fp8", kv_dtype="bfloat16"))
    assert (checkpoint.qformat, checkpoint.kv_cache_dtype) == ("fp8", None)
    assert (engine.use_fp8_context_fmha, engine.use_paged_context_fmha) == ("disable", "enable")
    assert made.memory.kv_token_bytes == 2 * 80 * 2 * 128 * 2


# BuildConfig ------------------------------------------------------------------------------------------------------


def fields_of(name: str) -> dict[str, Any]:
    return {field["name"]: field for field in CONTRACT["classes"][name]["init"]}


def check_fields(made: Plan) -> None:
    fields = build_config(made.settings)
    plugins = fields.pop("plugin_config")
    assert fields.keys() <= fields_of("tensorrt_llm.builder.BuildConfig").keys()
    assert plugins.keys() <= fields_of("tensorrt_llm.plugin.PluginConfig").keys()


@pytest.mark.parametrize("name", [name for name in COMPILED if find_recipe(name).engine == "trtllm"])
def test_a_reason_stands_exactly_where_the_value_is_not_the_default(name: str) -> None:
    made = shipped(name)
    check_fields(made)
    flags = CONTRACT["cli"]["trtllm-build"]["flags"]
    for setting in made.settings:
        default = flags[setting.flag]["default"]
        if setting.flag == "--kv_cache_type":
            continue  # the default is worked out by the builder
        default = "disable" if setting.flag == "--gemm_plugin" else default
        assert bool(setting.reason) == (setting.value != default), setting


def test_a_misspelt_plugin_key_which_tensorrt_llm_drops_is_refused_here(tmp_path: Path) -> None:
    fields: dict[str, Any] = dict.fromkeys(fields_of("tensorrt_llm.plugin.PluginConfig"), (Any, None))
    extra = CONTRACT["classes"]["tensorrt_llm.plugin.PluginConfig"]["extra"]
    plugin_config = create_model("PluginConfig", __config__=ConfigDict(extra=extra), **fields)
    assert "reduce_fusoin" not in plugin_config(reduce_fusoin="enable").model_dump()  # without a word
    path = tmp_path / "r.yaml"
    text = "name: r\nengine: trtllm\nmodel: m/m\ntrtllm:\n  plugins:\n    {}: enable\n"
    path.write_text(text.format("reduce_fusoin"))
    with pytest.raises(ConfigError, match=r"trtllm\.plugins\.reduce_fusoin: unknown key \(did you mean reduce_fusion"):
        read_recipe(path)
    path.write_text(text.format("use_paged_context_fmha"))  # a real key, but not a choice
    with pytest.raises(ConfigError, match=r"trtllm\.plugins\.use_paged_context_fmha: unknown key"):
        read_recipe(path)
    path.write_text(text.format("gemm_plugin"))
    with pytest.raises(ConfigError, match=r"trtllm\.plugins\.gemm_plugin: must be one of auto"):
        read_recipe(path)


def test_the_switches_of_recipes_are_those_of_plugin_config() -> None:
    known = fields_of("tensorrt_llm.plugin.PluginConfig")
    assert {field.name for field in dataclasses.fields(Plugins)} <= known.keys()


# Memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "parameters"),  # as the published files have them
    [
        (LLAMA_70B, 70_553_706_496),
        (LLAMA_8B, 8_030_261_248),
        ("meta-llama/Llama-3.2-1B-Instruct", 1_235_814_400),
        (QWEN_32B, 32_762_123_264),
        ("Qwen/Qwen3-0.6B", 596_049_920),
    ],
)
def test_parameters_of_the_known_models(model: str, parameters: int) -> None:
    assert SHAPES[model].parameters == parameters


def test_memory_of_llama_70b_on_four_gpus_by_hand() -> None:
    memory = shipped("llama-3.1-70b-h100").memory
    # A layer: q and o 8192 x 8192, k and v 8192 x 1024, gate, up and down 8192 x 28672.
    layer = 2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672
    assert layer == 855_638_016
    # A rank: a quarter of 80 layers and of the head; embedding and norms (two a layer, one at the end) whole; bfloat16.
    weights = 2 * (80 * layer / 4 + 128_256 * 8192 / 4 + 128_256 * 8192 + 161 * 8192)
    assert weights == pytest.approx(36.85e9, rel=1e-3)
    # Sines and cosines in float32 for 131072 positions of 128.
    weights += 131_072 * 128 * 4
    # 8 sequences of 8192 tokens in one iteration; per token 3 x 8192 for the residual stream, 3 x 28672 / 4 in the MLP.
    activations = 8 * 8192 * (3 * 8192 + 3 * 28672 / 4) * 2
    logits = 5 * 8 * 9 * 128_256 * 4
    fixed = weights + activations + logits + 1.5 * 2**30
    assert memory.fixed == pytest.approx(fixed, rel=0.02)
    assert memory.card.usable == pytest.approx(79.1 * 2**30)
    # Keys and values of 80 layers, 2 of 8 KV heads of 128 values, 2 bytes.
    assert memory.kv_token_bytes == 2 * 80 * 2 * 128 * 2 == 81_920
    pool = 0.9 * (79.1 * 2**30 - fixed)
    assert memory.pool == pytest.approx(pool, rel=0.02)
    assert memory.pool_tokens == pytest.approx(pool / 81_920, rel=0.02)
    assert memory.pool_tokens % 32 == 0
    # 8 sequences of 8192 + 8 tokens: 257 blocks of 32 each.
    assert memory.wanted_tokens == 8 * 257 * 32


def test_memory_of_llama_70b_in_fp8_by_hand() -> None:
    made = shipped("llama-3.1-70b-fp8-h100")
    # The layers' matrices one byte a value, all else two.
    matrices = 80 * 855_638_016 / 4
    others = 2 * (128_256 * 8192 / 4 + 128_256 * 8192 + 161 * 8192)
    weights = matrices + others + 131_072 * 128 * 4
    fixed = weights + 8 * 8192 * (3 * 8192 + 3 * 28672 / 4) * 2 + 5 * 72 * 128_256 * 4 + 1.5 * 2**30
    assert made.memory.fixed == pytest.approx(fixed, rel=0.02)
    assert made.memory.kv_token_bytes == 40_960
    checkpoint, engine = (file.bytes for file in made.files)
    assert checkpoint == pytest.approx(matrices + others, rel=1e-3)
    assert engine == pytest.approx(weights, rel=1e-3)
    assert made.disk_bytes == 4 * (checkpoint + engine)
    assert made.host_bytes >= 2 * 70.5e9  # calibration holds the bfloat16 model


def test_memory_of_qwen3_32b_on_four_gpus_by_hand() -> None:
    memory = shipped("qwen3-32b-h100").memory
    # Heads of 128 are wider together (64 x 128 = 8192) than the hidden size of 5120.
    layer = 2 * 5120 * 8192 + 2 * 5120 * 1024 + 3 * 5120 * 25_600
    norms = 64 * (2 * 5120 + 2 * 128) + 5120
    weights = 2 * (64 * layer / 4 + 151_936 * 5120 / 4 + 151_936 * 5120 + norms) + 40_960 * 128 * 4
    activations = 8 * 8192 * (3 * 5120 + 3 * 25_600 / 4) * 2
    fixed = weights + activations + 5 * 72 * 151_936 * 4 + 1.5 * 2**30
    assert memory.fixed == pytest.approx(fixed, rel=0.02)
    assert memory.kv_token_bytes == 2 * 64 * 2 * 128 * 2 == 65_536


def test_memory_of_the_pair_for_one_gpu_by_hand() -> None:
    target, draft = shipped("llama-3.1-8b-h100").memory, shipped("llama-3.2-1b-h100").memory
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14_336
    weights = 2 * (32 * layer + 2 * 128_256 * 4096 + 65 * 4096) + 131_072 * 128 * 4
    fixed = weights + 8 * 8192 * (3 * 4096 + 3 * 14_336) * 2 + 5 * 72 * 128_256 * 4 + 0.8 * 2**30
    assert target.fixed == pytest.approx(fixed, rel=0.02)
    layer = 2 * 2048 * 2048 + 2 * 2048 * 512 + 3 * 2048 * 8192
    weights = 2 * (16 * layer + 128_256 * 2048 + 33 * 2048) + 131_072 * 64 * 4  # the head is the embedding
    rows = 512
    fixed = weights + rows * (3 * 2048 + 3 * 8192) * 2 + rows * 128_256 * 4 + 0.8 * 2**30
    assert draft.fixed == pytest.approx(fixed, rel=0.02)
    assert draft.kv_token_bytes == 2 * 16 * 8 * 64 * 2
    # Both, with every sequence at full length, on one card.
    full = sum(m.fixed + m.wanted_tokens * m.kv_token_bytes for m in (target, draft))
    assert full < CARDS["h100-80gb"].usable


def test_a_rank_has_a_kv_head_of_its_own_when_there_are_too_few() -> None:
    shape = dataclasses.replace(SHAPES[LLAMA_8B], kv_heads=2)
    recipe = Recipe("r", "trtllm", model="m", tp=4, max_model_len=512, trtllm=TrtllmOptions())
    made = plan_trtllm(recipe, shape)
    assert made.memory.kv_token_bytes == 2 * 32 * 1 * 128 * 2
    matrices = next(item for item in made.memory.items if item.name == "layers' matrices")
    assert matrices.bytes == 2 * 32 * ((2 * 4096 * 4096 + 3 * 4096 * 14_336) // 4 + 2 * 4096 * 128)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tp", [1, 2, 6])
def test_the_layers_of_a_rank_are_those_of_our_own_shards(tmp_path: Path, family: str, tp: int) -> None:
    """The pytorch builder cuts the same models by the names and shapes of their tensors."""
    config = tiny_model(family, intermediate_size=480).config
    config.save_pretrained(tmp_path)
    shapes = ShardPlan(config, tp).shapes(stored_shapes(config))
    ours = sum(math.prod(shape) for name, shape in shapes.items() if "layers." in name and len(shape) == 2)
    items = weight_items(read_shape(tmp_path), tp, matrix_bytes=2, separate_head=True, rotary=False)
    assert next(item.bytes for item in items if item.name == "layers' matrices") == 2 * ours
    if tp == 1:
        whole = sum(math.prod(shape) for shape in stored_shapes(config).values())
        assert sum(item.bytes for item in items) == 2 * whole


# Refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"length": 131_073}, "max_model_len is 131073, the model's limit is 131072"),
        ({"tp": 3}, "tp: 3 ranks cannot share 64 attention heads, 8 KV heads and 28672 MLP columns evenly"),
        ({"dtype": "fp8", "gpu": "a100-80gb"}, "fp8 needs a GPU of compute capability 8.9 or more"),
        ({"kv_dtype": "fp8"}, "trtllm.kv_dtype: fp8 with dtype bfloat16 makes TensorRT-LLM switch paged context"),
        ({"max_num_tokens": 8191}, "give 8192 or more"),
        ({"max_num_tokens": 65_537}, "no more than max_batch_size x max_model_len (65536)"),
        ({"length": 4, "max_num_tokens": 31}, "every row of a batch has 9 tokens: give 72 or more"),
        ({"length": 65_536}, "tensors of more than 2^31 values"),
        ({"plugins": Plugins(gemm_plugin="fp8")}, "trtllm.plugins.gemm_plugin: fp8 needs dtype: fp8"),
        ({"plugins": Plugins(user_buffer="enable")}, "user_buffer: it needs reduce_fusion: enable and dtype: fp8"),
        (
            {"model": QWEN_32B, "plugins": Plugins(reduce_fusion="enable")},
            "reduce_fusion: TensorRT-LLM switches it off for one rank and for all but Llama",
        ),
        ({"tp": 1, "model": LLAMA_8B, "plugins": Plugins(reduce_fusion="enable")}, "switches it off for one rank"),
    ],
)
def test_what_cannot_be_built_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        trtllm(**options)
    assert said in str(caught.value)
    assert "recipe r" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("max_batch_size: 0", "trtllm: max_batch_size must be at least 1, got 0"),
        ("max_draft_len: -1", "trtllm: max_draft_len must be 0 or more"),
        ("tokens_per_block: 24", "trtllm: tokens_per_block must be a power of two, at least 8, got 24"),
        ("workers: 0", "trtllm: workers must be at least 1"),
        (
            "gpu: h100",
            "trtllm.gpu: must be one of a100-80gb, h100-80gb, h200-141gb; got 'h100' (did you mean h100-80gb",
        ),
        ("max_input_len: 1024", "trtllm.max_input_len: unknown key"),
    ],
)
def test_options_out_of_range(tmp_path: Path, options: str, said: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(f"name: r\nengine: trtllm\nmodel: m/m\ntrtllm:\n  {options}\n")
    with pytest.raises(ConfigError) as caught:
        read_recipe(path)
    assert said in str(caught.value)


def test_what_does_not_fit_the_card_is_refused() -> None:
    with pytest.raises(CapacityError, match=r"GiB of weights and activations leave room for 0 tokens.*tp.*fp8"):
        trtllm(tp=1, max_batch_size=1)
    assert trtllm(tp=1, max_batch_size=1, dtype="fp8").memory.pool_tokens > 8200


def test_each_engine_has_its_dtypes() -> None:
    for engine, dtype in (
        ("trtllm", "int8"),
        ("trtllm", "float32"),
        ("tensorrt", "int4"),
        ("pytorch", "fp8"),
        ("tensorrt", "fp8"),
    ):
        with pytest.raises(ConfigError, match=f"dtype {dtype} is not for the engine {engine}"):
            Recipe("r", engine, model="m", dtype=dtype)  # type: ignore[arg-type]


# Shapes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "llama3.1", "qwen2", "qwen3"])
def test_a_shape_is_read_from_a_model_folder(tmp_path: Path, family: str) -> None:
    model = tiny_model(family)
    model.config.save_pretrained(tmp_path)
    shape = read_shape(tmp_path)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert (shape.rope_type, shape.rope_factor) == (("llama3", 8.0) if family == "llama3.1" else (None, None))
    assert shape.rope_theta == 10000.0
    older = json.loads((tmp_path / "config.json").read_text())  # as it is published
    rope = older.pop("rope_parameters")
    older["rope_theta"] = rope.pop("rope_theta")
    older["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    (tmp_path / "config.json").write_text(json.dumps(older))
    assert read_shape(tmp_path) == shape


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "cannot be read as a model configuration"),
        ('{"model_type": "gpt2"}', "is a model of type 'gpt2'; llama, qwen2, qwen3 can be built"),
        ('{"model_type": "llama", "num_attention_heads": 4}', "says nothing of 'hidden_size'"),
        ("[]", "cannot be read as a model configuration"),
    ],
)
def test_a_model_folder_that_says_too_little(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError) as caught:
        read_shape(tmp_path)
    assert said in str(caught.value)


def test_a_local_model_is_planned_by_its_own_shape(tmp_path: Path) -> None:
    tiny_model("llama").config.save_pretrained(tmp_path / "model")
    (tmp_path / "r.yaml").write_text("name: r\nengine: trtllm\nmodel: model\nmax_model_len: 256\n")
    made = plan(read_recipe(tmp_path / "r.yaml"), NOWHERE)
    assert made.shape == read_shape(tmp_path / "model")
    assert isinstance(made.shape, ModelShape)
    with pytest.raises(ConfigError, match=r"architecture of no/model is not known here.*saguaro models pull no/model"):
        plan(Recipe("r", "trtllm", model="no/model"), NOWHERE)
    with pytest.raises(ConfigError, match="nothing to plan for the engine pytorch"):
        plan(find_recipe("tiny-target"), NOWHERE)


# Goldens ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["llama-3.1-70b-h100", "llama-3.1-70b-fp8-h100", "qwen3-32b-h100", "llama-3.2-1b-stock-h100"]
)
def test_golden_plans(name: str) -> None:
    """After a wanted change: `saguaro build NAME --dry-run > tests/golden/plans/NAME.txt`, and read the difference."""
    assert plan_text(shipped(name)) + "\n" == (GOLDEN / f"{name}.txt").read_text()


def test_the_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = "build/recipes/llama-3.1-70b-h100.yaml"
    arguments = [str(Path(__file__).parents[1] / path), "qwen3-0.6b-h100", "--dry-run", "--store", str(tmp_path)]
    assert cli.main(["build", *arguments]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith((GOLDEN / "llama-3.1-70b-h100.txt").read_text())
    assert "qwen3-0.6b-h100: Qwen/Qwen3-0.6B for tensorrt" in printed
    assert cli.main(["build", *arguments, "--json"]) == 0
    plans = json.loads(capsys.readouterr().out)
    assert [made["recipe"]["name"] for made in plans] == ["llama-3.1-70b-h100", "qwen3-0.6b-h100"]
    assert plans[0] == json.loads(json.dumps(plan_json(shipped("llama-3.1-70b-h100"))))
    assert plans[0]["memory"]["fixed"] / GIB == pytest.approx(41.7, rel=0.02)
    assert list(tmp_path.iterdir()) == []
    assert cli.main(["build", "tiny-target", "--dry-run", "--store", str(tmp_path)]) == 1
    assert "nothing to plan" in capsys.readouterr().err
