"""Streams one answer with the official OpenAI client: python examples/openai_stream.py "Write a haiku." """

import argparse

from openai import OpenAI

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("prompt")
parser.add_argument("--url", default="http://localhost:8080/v1")
parser.add_argument("--max-tokens", type=int, default=64)
arguments = parser.parse_args()

client = OpenAI(base_url=arguments.url, api_key="none")  # or a key of serving.api_key_file
model = client.models.list().data[0].id
stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": arguments.prompt}],
    temperature=0,
    max_tokens=arguments.max_tokens,
    stream=True,
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
