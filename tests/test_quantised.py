"""Linear layers in int8 and int4, on every path of the kernel that this CPU has; how kernels in C++ are compiled."""

from __future__ import annotations

import math
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from copy import deepcopy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import linear, pad, silu

from conftest import require_compiler
from saguaro.engines import quantised
from saguaro.engines.manifest import QUANTISED, Bits, Dtype
from saguaro.engines.pytorch import PytorchEngine, convert
from saguaro.engines.quantised import Norm, QuantisedLinear, pack, unpack
from saguaro.errors import EngineError
from saguaro.plugins import cpp
from test_engines import VOCAB, feed, pytorch, tokens
from tiny_models import FAMILIES, save_engine, tiny_model

require_compiler()

GROUP = 32
in_both = pytest.mark.parametrize("bits", QUANTISED.values(), ids=QUANTISED)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other at every product cost a busy machine seconds."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def draw(kind: str, outputs: int, inputs: int, seed: int) -> Tensor:
    """Weights [outputs, inputs]."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=generator)
    if kind == "heavy tails":
        weight /= torch.rand(outputs, inputs, generator=generator) + 0.01
    if kind == "one sign":
        weight.abs_()
    if kind == "tiny":
        weight *= 1e-30
    if kind == "zeros":
        weight[:, : GROUP + 1] = 0
    if kind == "equal":
        weight[:] = weight[0, 0]
    return weight.bfloat16()


KINDS = ["normal", "heavy tails", "one sign", "tiny", "zeros", "equal"]


def stands_for(weight: Tensor, bits: Bits) -> Tensor:
    return unpack(pack([weight], bits), *weight.shape, bits)


# Weights --------------------------------------------------------------------------------------------------------------


def in_groups(values: Tensor) -> Tensor:
    """[rows, n] -> [rows, groups, 32], padded with zeros."""
    return pad(values, (0, -values.shape[1] % GROUP)).unflatten(1, (-1, GROUP)).double()


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(KINDS), st.integers(1, 40), st.integers(1, 300), st.integers(0, 99))
def test_in_8_bits_weights_are_127_steps_each_way_and_off_by_half_of_one(
    kind: str, outputs: int, inputs: int, seed: int
) -> None:
    weight = draw(kind, outputs, inputs, seed)
    found, groups = in_groups(stands_for(weight, 8)), in_groups(weight)
    step = (groups.abs().amax(-1, keepdim=True) / 127).bfloat16().double()
    assert ((found - groups).abs() <= step * 0.5001).all()
    steps = (found / step).nan_to_num(0)
    assert torch.equal(steps, steps.round())
    assert (steps.abs() <= 127).all()
    assert (steps.abs().amax(-1) == torch.where(step[..., 0] > 0, 127, 0)).all()


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(-127, 127), min_size=1, max_size=31), st.sampled_from([-127, 127]), st.integers(-20, 4))
def test_weights_that_8_bits_hold_come_back(levels: list[int], largest: int, exponent: int) -> None:
    weight = (torch.tensor([[*levels, largest]]) * 2.0**exponent).bfloat16()
    assert torch.equal(stands_for(weight, 8), weight.float())


def test_weights_too_small_for_a_scale_are_zero() -> None:
    assert (stands_for(torch.full((1, GROUP), 1e-39).bfloat16(), 8) == 0).all()


def plainly_rounded(groups: Tensor) -> Tensor:
    """15 steps from the least to the largest, a scale in bfloat16 and a zero in sixteenths."""
    low, high = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True).clamp(min=0)
    scale = ((high - low) / 15).bfloat16().double()
    steps = groups / scale
    zero = (-low / scale * 16).round() / 16
    return ((steps + zero).round().clamp(0, 15) - zero).mul(scale).nan_to_num(0)


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(KINDS), st.integers(1, 40), st.integers(1, 300), st.integers(0, 99))
def test_in_4_bits_weights_are_off_by_half_a_step_and_less_in_all_than_plain_rounding(
    kind: str, outputs: int, inputs: int, seed: int
) -> None:
    weight = draw(kind, outputs, inputs, seed)
    padded = pad(weight, (0, -inputs % GROUP))
    found = stands_for(padded, 4)
    assert torch.equal(stands_for(weight, 4), found[:, :inputs])
    groups, found = in_groups(padded), in_groups(found)
    assert (found[(groups == 0).all(-1)] == 0).all()

    error = found - groups
    plain = (plainly_rounded(groups) - groups).square().sum(-1)
    assert (error.square().sum(-1) <= plain * 1.0001 + groups.square().sum(-1) * 1e-9).all()

    # What a group stands for lies whole steps apart, and it is cut into seven steps at least.
    apart = found.sort().values.diff()
    step = torch.where(apart > 0, apart, math.inf).amin(-1, keepdim=True)
    step = step.minimum((groups.amax(-1, keepdim=True).clamp(min=0) - groups.amin(-1, keepdim=True).clamp(max=0)) / 7)
    beyond = (groups < found.amin(-1, keepdim=True)) | (groups > found.amax(-1, keepdim=True))
    assert ((error.abs() <= step * 0.505) | beyond).all()


def test_cutting_off_what_lies_far_out_pays() -> None:
    """With finer steps alone it is 0.945 of plain rounding's."""
    groups = in_groups(weight := draw("normal", 256, 512, 0))
    errors = [(found - groups).square().sum() for found in (in_groups(stands_for(weight, 4)), plainly_rounded(groups))]
    assert errors[0] < 0.93 * errors[1]


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_weights_that_lie_on_a_grid_come_back_in_4_bits(data: st.DataObject) -> None:
    """Those of a file in 4 bits: exactly where bfloat16 holds them, else on the same level."""
    top = data.draw(st.integers(7, 15))
    levels = torch.tensor(
        [*range(top + 1), *data.draw(st.lists(st.integers(0, top), min_size=31 - top, max_size=31 - top))]
    )
    sixteenths = data.draw(st.integers(0, 16 * top))
    exact = data.draw(st.booleans())
    mantissa = 1 if exact else data.draw(st.integers(128, 255))
    scale = mantissa * 2.0 ** data.draw(st.integers(-20, 4))
    weight = (scale * (levels - sixteenths / 16))[None].bfloat16()
    found = stands_for(weight, 4)
    if exact:
        assert torch.equal(found, weight.float())
        assert torch.equal(pack([found], 4), pack([weight], 4))
    assert torch.equal((found[0] / scale + sixteenths / 16).round().long(), levels)


@in_both
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30])
def test_weights_that_are_no_numbers_are_refused(value: float, bits: Bits) -> None:
    weight = draw("normal", 40, 300, 0)
    weight[39, 299] = value
    with pytest.raises(EngineError, match=f"int{bits}: a weight is not a finite number below 1e18. .*another dtype"):
        pack([weight], bits)


# Products -------------------------------------------------------------------------------------------------------------


def layer(
    bits: Bits, outputs: int = 70, inputs: int = 300, kind: str = "normal", seed: int = 0
) -> tuple[QuantisedLinear, Tensor, Tensor]:
    """A layer, the weights that it computes with, and its bias."""
    made = nn.Linear(inputs, outputs)
    made.weight.data = draw(kind, outputs, inputs, seed)
    made.bias.data = torch.linspace(-1, 1, outputs)
    return QuantisedLinear(made, bits=bits), stands_for(made.weight.data, bits), made.bias.detach()


def rows(count: int, inputs: int, seed: int = 0) -> Tensor:
    """Rows of very different sizes, with outliers."""
    x = torch.randn(count, inputs, generator=torch.Generator().manual_seed(seed))
    x[:, 0] *= 30
    return x * 10.0 ** (torch.arange(count)[:, None] % 7 - 3)


def rounded(x: Tensor) -> Tensor:
    """Activations as the kernel rounds them: 8 bits, one scale for 32. In float64."""
    groups = pad(x, (0, -x.shape[-1] % GROUP)).unflatten(-1, (-1, GROUP))
    most = groups.abs().amax(-1, keepdim=True)
    inverse = torch.where(most > 0, 127 / most, 0).double()
    return ((groups.double() * inverse).round() * (most / 127).double()).flatten(-2)[..., : x.shape[-1]]


def one_step(x: Tensor, weight: Tensor) -> Tensor:
    """[N, 1]: what an activation that is rounded the other way changes at most."""
    return x.abs().amax(-1, keepdim=True) / 127 * weight.abs().max()


@in_both
@settings(deadline=None, max_examples=40)
@given(st.sampled_from(KINDS), st.integers(1, 20), st.integers(1, 300), st.integers(1, 40), st.integers(0, 99))
def test_products_are_those_of_the_rounded_numbers(
    bits: Bits, kind: str, count: int, inputs: int, outputs: int, seed: int
) -> None:
    made, weight, bias = layer(bits, outputs, inputs, kind, seed)
    x = rows(count, inputs, seed)
    found = rounded(x)
    expected = linear(found, weight.double(), bias.double())
    size = linear(found.abs(), weight.double().abs(), bias.double().abs())  # sums of 10 groups in float32
    assert ((made(x) - expected).abs() <= size * 1e-6).all()


@in_both
@pytest.mark.parametrize("count", [1, 20])
@pytest.mark.parametrize("x_sign", [1.0, -1.0])
@pytest.mark.parametrize("weight_sign", [1.0, -1.0])
def test_the_largest_sums_fit(weight_sign: float, x_sign: float, count: int, bits: Bits) -> None:
    """Every product at its largest, and of one sign."""
    made = nn.Linear(300, 20, bias=False)
    made.weight.data.fill_(weight_sign)
    weight, x = stands_for(made.weight.data, bits), torch.full((count, 300), x_sign)
    expected = linear(rounded(x), weight.double())
    torch.testing.assert_close(QuantisedLinear(made, bits=bits)(x).double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", ["normal", "one sign", "equal", "zeros"])
@settings(deadline=None, max_examples=20)
@given(st.integers(1, 20), st.integers(1, 300), st.integers(1, 40), st.integers(0, 99))
def test_in_8_bits_the_error_is_that_of_rounding_and_no_more(
    kind: str, count: int, inputs: int, outputs: int, seed: int
) -> None:
    made, _, bias = layer(8, outputs, inputs, kind, seed)
    weight, x = draw(kind, outputs, inputs, seed), rows(count, inputs, seed)
    expected = linear(x.double(), weight.double(), bias.double())
    # In each group: an activation and a weight are off by at most half a step; a product of both is the last term.
    x_groups, weight_groups = in_groups(x).abs().transpose(0, 1), in_groups(weight).abs().transpose(0, 1)
    step_x = x_groups.amax(-1, keepdim=True) / 127
    step_w = (weight_groups.amax(-1) / 127).bfloat16().double()[:, None]
    bound = x_groups.sum(-1, keepdim=True) * step_w / 2 + step_x / 2 * weight_groups.sum(-1)[:, None]
    bound = (bound + GROUP * step_x * step_w / 4).sum(0)
    assert ((made(x) - expected).abs() <= bound * 1.001 + 1e-5 * (1 + expected.abs())).all()


@in_both
def test_a_row_has_the_same_bits_in_any_company(bits: Bits) -> None:
    made, _, _ = layer(bits)
    x, gated = rows(40, 300), rows(40, 600)
    weights = 1 + torch.rand(300)
    for options in ({}, {"norm": Norm(weights.data_ptr(), 1e-6)}, {"gated": True}):
        of = gated if "gated" in options else x
        together = made.product(of, **options)
        for count in range(1, 40):
            assert torch.equal(made.product(of[:count], **options), together[:count])
            assert torch.equal(made.product(of[count:], **options), together[count:])


@in_both
@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf])
def test_what_is_no_number_stays_in_its_row(value: float, bits: Bits) -> None:
    made, _, _ = layer(bits)
    for count in (3, 20):
        x = rows(count, 300)
        expected = made(x)
        x[1, 299] = value
        found = made(x)
        assert not found[1].isfinite().any()
        others = [row for row in range(count) if row != 1]
        assert torch.equal(found[others], expected[others])


@in_both
def test_threads_share_the_channels_out_and_change_nothing(bits: Bits) -> None:
    made, _, _ = layer(bits)
    found = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        found.append([made(rows(count, 300)) for count in (1, 9, 20)])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@in_both
def test_layers_put_together_give_the_same_bits(bits: Bits) -> None:
    first, second = nn.Linear(300, 37), nn.Linear(300, 70, bias=False)
    x = rows(9, 300)
    with torch.no_grad():
        apart = [QuantisedLinear(one, bits=bits)(x) for one in (first, second)]
        assert torch.equal(QuantisedLinear(first, second, bits=bits)(x), torch.cat(apart, -1))


@in_both
@pytest.mark.parametrize("count", [1, 5, 20])
def test_what_is_taken_along_is_what_torch_would_have_done_before(count: int, bits: Bits) -> None:
    """Up to an activation of a row that is rounded the other way."""
    made, weight, _ = layer(bits)
    x, pairs = rows(count, 300), torch.randn(count, 600) * 5
    scales = 1 + 0.1 * torch.randn(300)
    normed = nn.functional.rms_norm(x, (300,), scales, 1e-2)
    gated = silu(pairs[:, :300]) * pairs[:, 300:]
    for found, before in (
        (made.product(x, norm=Norm(scales.data_ptr(), 1e-2)), normed),
        (made.product(pairs, gated=True), gated),
    ):
        assert ((found - made(before)).abs() <= one_step(before, weight) + 1e-4).all()
    sums = torch.randn(count, 70)
    expected = sums + made(x)
    assert made.product(x, add_to=sums) is sums
    torch.testing.assert_close(sums, expected)


@in_both
def test_the_gate_is_right_wherever_it_is(bits: Bits) -> None:
    """silu alone: one activation of the only group, and a weight that both widths hold."""
    largest = {4: 15, 8: 127}[bits]
    gates = torch.cat([torch.linspace(-100, 100, 2001), torch.tensor([0.0, -1e-30, 1e30])])
    made = nn.Linear(1, 1, bias=False)
    made.weight.data.fill_(largest)
    found = QuantisedLinear(made, bits=bits).product(torch.stack([gates, torch.ones_like(gates)], 1), gated=True)
    torch.testing.assert_close(found[:, 0], largest * silu(gates), rtol=1e-6, atol=1e-30)


# Paths ----------------------------------------------------------------------------------------------------------------


def cpu_has(*flags: str) -> bool:
    return set(flags) <= set(Path("/proc/cpuinfo").read_text().partition("flags")[2].partition("\n")[0].split())


AVX2, AVX512 = ("avx2", "fma", "bmi2", "f16c"), ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
PATHS = {
    "no AMX": (("-march=native", "-mno-amx-int8"), ()),
    "AVX-512": (("-march=x86-64-v4",), AVX512),
    "AVX-VNNI": (("-march=x86-64-v3", "-mavxvnni"), (*AVX2, "avx_vnni")),
    "AVX2": (("-march=x86-64-v3",), AVX2),
    "portable": (("-march=x86-64",), ()),
}


def results() -> Iterator[Tensor]:
    for bits, kind, outputs, inputs in product(QUANTISED.values(), ("normal", "equal"), (70, 16), (300, 128)):
        made, _, _ = layer(bits, outputs, inputs, kind)
        yield made._tiles
        for count in (1, 5, 20):
            x, scales = rows(count, inputs), torch.linspace(0.5, 2, inputs)
            yield made(x)
            yield made(torch.ones(count, inputs))
            yield made.product(x, norm=Norm(scales.data_ptr(), 1e-5))
            yield made.product(rows(count, 2 * inputs), gated=True)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="this CPU has one path")
@pytest.mark.parametrize("path", PATHS)
def test_every_path_gives_the_same_bits(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled once each, in 3 to 5 s, and kept beside this machine's own.

    Without FMA, which the portable path does not have on x86, a sum is rounded once more, and so may a weight be.
    """
    flags, needed = PATHS[path]
    if not cpu_has(*needed):
        pytest.skip(f"NOT TESTED: this CPU has no {path}")
    expected = list(results())
    monkeypatch.setattr(cpp, "_FLAGS", (*(flag for flag in cpp._FLAGS if "march" not in flag), *flags))
    monkeypatch.setattr(cpp, "load", cpp.load.__wrapped__)
    kernel = quantised._kernel.__wrapped__()
    monkeypatch.setattr(quantised, "_kernel", lambda: kernel)
    for found, native in zip(results(), expected, strict=True):
        if path != "portable" or not cpu_has("fma"):
            assert torch.equal(found, native)
        elif native.is_floating_point():
            torch.testing.assert_close(found, native, rtol=0, atol=float(native.abs().max()) * 0.02)


# Engines --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", QUANTISED)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_hugging_face_s_over_the_rounded_numbers(family: str, dtype: Dtype) -> None:
    model, plain = tiny_model(family), tiny_model(family)
    convert(model, dtype)
    for module in plain.modules():
        if isinstance(module, nn.Linear):
            module.weight.data = stands_for(module.weight.data, QUANTISED[dtype])
            module.register_forward_pre_hook(lambda _, inputs: rounded(inputs[0]).float())
    ids = tokens(60, VOCAB)
    with torch.no_grad():
        expected = plain(torch.tensor([ids])).logits[0, :, :VOCAB]
    found = feed(pytorch(model), ids, wanted=60)
    # Nearly always to 1e-6; an activation that is rounded the other way is seen in all that comes after it.
    assert (found - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize("dtype", QUANTISED)
@pytest.mark.parametrize("name", ["self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"])
def test_a_layer_in_which_one_product_is_another_s_is_computed_piece_by_piece(name: str, dtype: Dtype) -> None:
    """As in a tensor-parallel group, in which the ranks add their parts up."""

    parent, _, child = name.partition(".")
    ids, logits = tokens(20, VOCAB), []
    for wrapped in (False, True):
        model = tiny_model("qwen2")
        convert(model, dtype)
        if wrapped:
            part = getattr(model.model.layers[1], parent)
            setattr(part, child, nn.Sequential(getattr(part, child)))
        logits.append(feed(pytorch(model), ids, wanted=20))
    assert (logits[0] - logits[1]).norm() < 0.02 * logits[0].norm()


@pytest.mark.parametrize(("dtype", "error"), [("int8", 0.05), ("int4", 0.5)])
def test_an_engine_is_quantised_when_loaded(dtype: Dtype, error: float, tmp_path: Path) -> None:
    options: dict[str, Any] = {"tie_word_embeddings": True}
    save_engine(tiny_model("qwen2", torch.bfloat16, **options), tmp_path, dtype=dtype)
    engine = PytorchEngine.load(tmp_path, block_size=4, num_blocks=32)
    assert isinstance(engine._model.lm_head, QuantisedLinear)
    assert not any(isinstance(module, nn.Linear) for module in engine._model.modules())
    model = tiny_model("qwen2", torch.bfloat16, **options)
    ids = tokens(20, VOCAB)
    with torch.no_grad():
        expected = deepcopy(model).float()(torch.tensor([ids])).logits[0, :, :VOCAB]
    convert(model, dtype)
    logits = feed(engine, ids, wanted=20, table=range(32))
    assert torch.equal(logits, feed(pytorch(model), ids, wanted=20))
    assert logits.dtype == torch.float32
    assert (logits - expected).norm() < error * expected.norm()
    with pytest.raises(EngineError, match=f"{dtype} is computed on the CPU alone. Build it as bfloat16 for a GPU"):
        PytorchEngine.load(tmp_path, block_size=4, num_blocks=32, device=torch.device("cuda"))


# Compiling ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The source of a kernel `answer`, beside which `cpp` believes to be; nothing is compiled yet."""
    monkeypatch.setattr(cpp, "__file__", str(tmp_path / "cpp.py"))
    monkeypatch.setattr(cpp, "load", cpp.load.__wrapped__)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = tmp_path / "answer.cpp"
    source.write_text('extern "C" int answer() { return 42; }  // Σ\n')
    return source


def kept(tmp_path: Path) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in (tmp_path / "cache" / "saguaro" / "kernels").iterdir()}


def test_a_kernel_is_compiled_once_for_its_source_and_flags(
    kernel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cpp.load("answer").answer() == 42
    before = kept(tmp_path)
    assert cpp.load("answer").answer() == 42
    assert kept(tmp_path) == before
    assert len(before) == 1
    kernel.write_text('extern "C" int answer() { return 43; }\n')
    assert cpp.load("answer").answer() == 43
    monkeypatch.setattr(cpp, "_FLAGS", (*cpp._FLAGS, "-DOTHER"))
    cpp.load("answer")
    assert len(kept(tmp_path)) == 3


def test_a_compiler_may_have_arguments(kernel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "c++ 1").symlink_to(cpp.find_compiler()[0])  # type: ignore[index]
    kernel.write_text('extern "C" int answer() { return ANSWER; }\n')
    for answer in (1, 2):  # of the arguments, too, there is a library each
        monkeypatch.setenv("CXX", f"'{tmp_path}/c++ 1' -g -DANSWER={answer}")
        assert cpp.load("answer").answer() == answer
    assert len(kept(tmp_path)) == 2
    monkeypatch.setenv("CXX", "'c++")
    with pytest.raises(EngineError, match=r"no compiler here \('c\+\+\)"):
        cpp.load("answer")


def test_libraries_that_nobody_has_loaded_for_long_are_removed(
    kernel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others are not: they may be of another release, or of another machine that shares the folder."""
    libraries = []
    for options in (["-DA"], ["-DB"], ["-DC"]):
        with monkeypatch.context() as patch:
            patch.setattr(cpp, "_FLAGS", (*cpp._FLAGS, *options))
            libraries.append(Path(cpp.load("answer")._name))
    other = libraries[0].with_name("answers-0.so")
    other.touch()
    for library in (*libraries, other):
        os.utime(library, (0, 0))
    with monkeypatch.context() as patch:
        patch.setattr(cpp, "_FLAGS", (*cpp._FLAGS, "-DB"))
        loaded = cpp.load("answer")
    assert {other.name, *(path.name for path in libraries)} == set(kept(tmp_path))  # only a new one makes old ones go
    new = Path(cpp.load("answer")._name)
    assert {other.name, libraries[1].name, new.name} == set(kept(tmp_path))
    libraries[1].unlink()
    assert loaded.answer() == 42  # whoever has it keeps it


@pytest.mark.usefixtures("kernel")
def test_processes_that_compile_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    code = "import sys; from saguaro.plugins import cpp; cpp.__file__ = sys.argv[1]; print(cpp.load('answer').answer())"
    command = [sys.executable, "-c", code, str(tmp_path / "cpp.py")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [process.communicate(timeout=60)[0] for process in processes] == ["42\n"] * 3
    assert len(kept(tmp_path)) == 1


def test_what_cannot_be_compiled_kept_or_loaded_is_said(
    kernel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "compiler"
    broken.write_bytes(b"\x7fELF")
    broken.chmod(0o755)
    for compiler, message in (
        ("no-such-compiler", r"there is no compiler here \(no-such-compiler\).*apt-get install g\+\+.*another dtype"),
        (
            "false",
            r"answer cannot be compiled on this machine \(/.*false -std(?s:.*)Name another compiler in \$CXX",
        ),
        (str(broken), r"compiler cannot be run \(Exec format error\). Name another compiler in \$CXX"),
    ):
        monkeypatch.setenv("CXX", compiler)
        with pytest.raises(EngineError, match=message):
            cpp.load("answer")
    monkeypatch.delenv("CXX")
    assert not (tmp_path / "cache").exists()

    monkeypatch.setenv("XDG_CACHE_HOME", str(kernel))
    with pytest.raises(EngineError, match=r"answer cannot be kept in .*kernels \(Not a directory\).*\$XDG_CACHE_HOME"):
        cpp.load("answer")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with monkeypatch.context() as patched:
        patched.setattr("ctypes.CDLL", Path)
        library = cpp.load("answer")
    library.write_bytes(library.read_bytes()[:100])
    with pytest.raises(EngineError, match=rf"answer cannot be loaded \(.*\). Delete {library}, or .*XDG_CACHE_HOME"):
        cpp.load("answer")
    kernel.write_text("int answer( {")
    with pytest.raises(EngineError, match=r"(?s)answer cannot be compiled .*error: .*another dtype"):
        cpp.load("answer")
