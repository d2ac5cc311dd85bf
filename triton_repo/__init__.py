"""The Triton model repository of a deployment, and the server that runs it.

The folders hold each model's `model.py`: a Triton request in, a call into a module beside them, an answer out.
"""
