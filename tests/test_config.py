"""Deployments: what is shipped loads, and what is wrong is said with file, key, limit and remedy."""

from pathlib import Path

import pytest

from saguaro.build.recipe import find_recipe
from saguaro.errors import ConfigError
from saguaro.orchestrator.config import find_deployment, read_deployment, shipped_deployments

MINIMAL = "name: mine\ntarget:\n  recipe: tiny-target\n"
DRAFT = "draft:\n  recipe: tiny-draft\n"


@pytest.mark.parametrize("name", shipped_deployments())
def test_shipped_deployments_load_and_name_shipped_recipes(name: str) -> None:
    config = read_deployment(find_deployment(name))
    assert config.name == name
    assert config.draft is not None
    engines = [find_recipe(model.recipe).engine for model in (config.target, config.draft)]
    assert engines in (["pytorch"] * 2, ["simulated"] * 2, ["trtllm", "tensorrt"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            MINIMAL + DRAFT + "speculation:\n  lookahed: 3\n",
            r"speculation\.lookahed: unknown key \(did you mean lookahead\?\)",
        ),
        (
            MINIMAL + DRAFT + "speculation:\n  lookahead: 0\n",
            "speculation: lookahead must be `auto`, or between 1 and 32, got 0",
        ),
        (MINIMAL + DRAFT + "speculation:\n  lookahead: many\n", r"speculation\.lookahead: must be a whole number"),
        (
            MINIMAL + DRAFT + "speculation:\n  mode: sdd\n",
            r"speculation\.mode: must be one of ar, sd, ssd or auto; got .*sdd",
        ),
        (
            MINIMAL + DRAFT + "speculation:\n  fan_out:\n    budget: 9999\n",
            "budget must be `auto`, or between 0 and 512 branches, got 9999",
        ),
        (
            MINIMAL + DRAFT + "speculation:\n  fan_out:\n    counts: [1, -1]\n",
            r"counts must be .* 0 or more, got \[1, -1\]",
        ),
        (
            MINIMAL + DRAFT + "speculation:\n  fan_out:\n    counts: [1, 1]\n    policy: auto\n",
            "policy must be left out beside `counts`, got auto",
        ),
        (
            MINIMAL + DRAFT + "speculation:\n  fan_out:\n    policy: geometrical\n",
            r"policy: must be one of uniform, geometric, auto, ranked.*did you mean geometric\?",
        ),
        (MINIMAL + DRAFT + "speculation:\n  fan_out:\n    acceptance: 2\n", "acceptance must be between 0 and 1"),
        (MINIMAL + DRAFT + "speculation:\n  backup: ngramm\n", r"backup: must be one of .*did you mean ngram\?"),
        (MINIMAL + DRAFT + "speculation:\n  cache_aware: 0\n", "cache_aware must be above 0"),
        (MINIMAL, "speculation.mode must be `ar` without a `draft:` section, got ssd"),
        ("name: mine\n", "target: is missing"),
        (MINIMAL.replace("tiny-target", "tiny-target\n  kv_tokens: 3"), "kv_tokens must be at least a block"),
    ],
)
def test_what_is_wrong_is_named(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        read_deployment(path)
    assert str(path) in str(error.value)


def test_an_unknown_deployment_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"did you mean tiny\?.*shipped: .*qwen-coder-cpu"):
        find_deployment("tinny")
    with pytest.raises(ConfigError, match="does not exist"):
        find_deployment(str(tmp_path / "none.yaml"))
