"""What the measurement of the CPU engine says of accuracy: hand-made logits, and its own texts."""

from __future__ import annotations

import math

import pytest
import torch

from saguaro.bench.cpu_engine import compare, read_texts


def test_agreement_and_perplexity_are_those_of_the_definition() -> None:
    ids = [0, 2, 1, 2]  # what follows is predicted from rows 0 to 2
    probs = torch.tensor([[0.1, 0.2, 0.7], [0.2, 0.5, 0.3], [0.4, 0.3, 0.3], [0.8, 0.1, 0.1]])
    others = torch.tensor([[0.1, 0.2, 0.7], [0.6, 0.2, 0.2], [0.5, 0.2, 0.3], [0.8, 0.1, 0.1]])
    accuracy = compare(ids, probs.log() + 3, others.log() - 1)
    assert accuracy.tokens == 4
    assert accuracy.agreement == 3 / 4  # of row 1 the best token is another one
    assert accuracy.perplexity_bfloat16 == pytest.approx((0.7 * 0.5 * 0.3) ** (-1 / 3), rel=1e-6)
    assert accuracy.perplexity_int8 == pytest.approx((0.7 * 0.2 * 0.3) ** (-1 / 3), rel=1e-6)
    uniform = compare(ids, torch.zeros(4, 3), torch.zeros(4, 3))
    assert math.isclose(uniform.perplexity_int8, 3, rel_tol=1e-6)


def test_texts_are_prose_and_code() -> None:
    texts = read_texts()
    assert set(texts) == {"prose", "code"}
    compile(texts["code"], "accuracy.yaml", "exec")
