"""Saguaro serves a large language model faster without changing what it says.

It is a production package of speculative speculative decoding (SSD, arXiv 2603.03251): while the target model verifies
one speculation, the draft model already prepares the next one for the likeliest outcomes of that verification.
"""

__version__ = "0.1.0"

__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> object:
    """`LLM` and `SamplingParams` on first use: importing the package loads no torch, transformers or MPI."""
    if name == "LLM":
        from saguaro.llm import LLM

        return LLM
    if name == "SamplingParams":
        from saguaro.orchestrator.types import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
