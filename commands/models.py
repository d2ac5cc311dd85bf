"""`saguaro models`: pull and list model weights."""

from __future__ import annotations

import argparse
import json

from saguaro.commands.options import Subparsers, common, store


def add(commands: Subparsers) -> None:
    models = commands.add_parser("models", help="pull and list model weights").add_subparsers(
        metavar="ACTION", required=True
    )
    pull = models.add_parser(
        "pull", parents=[common()], help="fetch and check weights", epilog="example: saguaro models pull qwen2.5-coder"
    )
    pull.add_argument(
        "name", help="a name from `saguaro models list`, a hub id (owner/name), or a local folder or .gguf"
    )
    pull.set_defaults(run=_pull)
    listing = models.add_parser(
        "list", parents=[common()], help="known models and what is here", epilog="example: saguaro models list --json"
    )
    listing.add_argument("--json", action="store_true", help="print one JSON array")
    listing.set_defaults(run=_list)


def _pull(arguments: argparse.Namespace) -> None:
    from saguaro.build.models import pull

    for path in pull(arguments.name, store(arguments)):
        print(path)


def _list(arguments: argparse.Namespace) -> None:
    from saguaro.build.models import CATALOGUE, PAIRS, installed

    present = installed(store(arguments))
    known = {name: (model.description, model.licence) for name, model in CATALOGUE.items()}
    known |= {name: (f"the pair {' + '.join(members)}", "") for name, members in PAIRS.items()}
    rows = [
        {
            "name": name,
            "installed": all(member in present for member in PAIRS.get(name, (name,))),
            "bytes": present[name].size if name in present else None,
            "description": known.get(name, ("", ""))[0],
            "licence": known.get(name, ("", ""))[1],
        }
        for name in sorted(known | present)
    ]
    if arguments.json:
        print(json.dumps(rows))
        return
    for row in rows:
        print(f"{row['name']:24} {'installed' if row['installed'] else '-':10} {row['description']} {row['licence']}")
