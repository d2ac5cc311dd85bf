"""Draft methods. Each answers hypothetical outcomes; see `base`."""
