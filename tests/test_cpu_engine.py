"""What the measurement of the CPU engine says of accuracy: hand-made logits, and its own texts."""

from __future__ import annotations

import pytest
import torch

from saguaro.bench.cpu_engine import compare, read_texts


def test_agreement_and_perplexity_are_those_of_the_definition() -> None:
    ids = [0, 2, 1, 2]  # what follows is predicted from rows 0 to 2
    probs = torch.tensor([[0.1, 0.2, 0.7], [0.2, 0.5, 0.3], [0.4, 0.3, 0.3], [0.8, 0.1, 0.1]])
    others = torch.tensor([[0.1, 0.2, 0.7], [0.6, 0.2, 0.2], [0.5, 0.2, 0.3], [0.8, 0.1, 0.1]])
    accuracy = compare(ids, {"bfloat16": probs.log() + 3, "int8": others.log() - 1, "int4": torch.zeros(4, 3)})
    assert accuracy.tokens == 4
    # Of row 1 int8's best token is another one; int4 has the first everywhere.
    assert accuracy.agreement == {"bfloat16": 1, "int8": 3 / 4, "int4": 1 / 2}
    expected = {
        "bfloat16": (0.7 * 0.5 * 0.3) ** (-1 / 3),
        "int8": (0.7 * 0.2 * 0.3) ** (-1 / 3),
        "int4": 3,
    }
    assert accuracy.perplexity == pytest.approx(expected, rel=1e-6)


def test_texts_are_prose_and_code() -> None:
    texts = read_texts()
    assert set(texts) == {"prose", "code"}
    compile(texts["code"], "accuracy.yaml", "exec")
