"""`saguaro chat`: talk to the model in the terminal."""

from __future__ import annotations

import argparse

from saguaro.commands import decoding
from saguaro.commands.options import Subparsers, command


def add(commands: Subparsers) -> None:
    command(
        commands, "chat", run, "talk to the model in the terminal", "saguaro chat --temperature 0.7", decoding.options()
    )


def run(arguments: argparse.Namespace) -> None:
    from saguaro.frontend.chat import chat

    with decoding.start(arguments) as llm:
        chat(llm, decoding.sampling(arguments))
