"""`saguaro build`: turn recipes into engine directories."""

from __future__ import annotations

import argparse
import json

from saguaro.commands.options import Subparsers, command, store


def add(commands: Subparsers) -> None:
    build = command(
        commands, "build", run, "turn recipes into engine directories", "saguaro build qwen2.5-coder-1.5b-cpu"
    )
    build.add_argument("recipe", nargs="+", help="a .yaml file or the name of a shipped recipe")
    build.add_argument(
        "--dry-run", action="store_true", help="show commands, files and memory instead; needs no weights and no GPU"
    )
    build.add_argument("--json", action="store_true", help="print one JSON array, of plans or of directories")


def run(arguments: argparse.Namespace) -> None:
    from saguaro.build.driver import build, find_recipe, plan

    recipes = [find_recipe(name) for name in arguments.recipe]
    if arguments.dry_run:
        from saguaro.build.plan_text import plan_json, plan_text

        plans = [plan(recipe, store(arguments)) for recipe in recipes]
        print(
            json.dumps([plan_json(made) for made in plans]) if arguments.json else "\n\n\n".join(map(plan_text, plans))
        )
        return
    directories = []
    for recipe in recipes:
        directories.append(str(build(recipe, store(arguments))))
        if not arguments.json:
            print(directories[-1])
    if arguments.json:
        print(json.dumps(directories))
