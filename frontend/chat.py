"""A conversation in the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from saguaro.errors import ConfigError

if TYPE_CHECKING:
    from saguaro.llm import LLM
    from saguaro.orchestrator.types import SamplingParams


def chat(llm: LLM, params: SamplingParams) -> None:
    """Read a line, stream the answer, remember both; until end of input or `/exit`.

    Ctrl-C ends an answer, and at the prompt the conversation. `/clear` forgets what was said.
    """
    messages: list[dict[str, str]] = []
    print("Ask something. /clear forgets the conversation, /exit or Ctrl-D leaves.")
    while True:
        try:
            line = input("\n> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if line == "/exit":
            return
        if line == "/clear":
            messages.clear()
            continue
        if line:
            messages.append({"role": "user", "content": line})
            messages.append({"role": "assistant", "content": _answer(llm, messages, params)})


def _answer(llm: LLM, messages: list[dict[str, str]], params: SamplingParams) -> str:
    """Streams one answer and returns as much of it as was shown."""
    shown = ""
    stream = llm.stream(messages, params)
    try:
        for chunk in stream:
            print(chunk.text, end="", flush=True)
            shown += chunk.text
    except KeyboardInterrupt:
        stream.close()
    except ConfigError as error:
        print(f"saguaro: {error}")
    print()
    return shown
