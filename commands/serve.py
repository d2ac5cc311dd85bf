"""`saguaro serve`: serve a deployment."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from saguaro.commands.options import Subparsers, command, store


def add(commands: Subparsers) -> None:
    serve = command(
        commands, "serve", run, "serve a deployment over HTTP, gRPC and the OpenAI API", "saguaro serve tiny"
    )
    serve.add_argument("deployment", help="a .yaml file or a shipped name")
    serve.add_argument("--detach", action="store_true", help="in the background; returns when it is ready")
    serve.add_argument("--log-file", metavar="FILE", help="log there too; with --detach instead of the default place")
    serve.add_argument(
        "--host", metavar="ADDRESS", help="bind the ports to it instead of the deployment's serving.host"
    )
    serve.add_argument("--no-openai", dest="openai", action="store_false", help="without the OpenAI front end")


def run(arguments: argparse.Namespace) -> None:
    from saguaro.supervisor.serve import serve, serve_detached

    log_file = Path(arguments.log_file).absolute() if arguments.log_file else None
    if not arguments.detach:
        serve(arguments.deployment, store(arguments), openai=arguments.openai, host=arguments.host, log_file=log_file)
        return
    program = [sys.executable, "-m", "saguaro.cli", "serve", arguments.deployment, "--store", str(store(arguments))]
    program += ["--verbose"] * arguments.verbose + ["--no-openai"] * (not arguments.openai)
    program += ["--host", arguments.host] if arguments.host else []
    serve_detached(arguments.deployment, program, log_file, print)
