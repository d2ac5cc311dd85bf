"""Saguaro beside other engines: the same weights, prompts, tokens and cores, greedy, in one run (docs/bench.md)."""
