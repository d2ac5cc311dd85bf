"""The draft as a TensorRT engine: `network` is what is compiled, `engine` runs it.

TensorRT is imported by files in folders, or of the name, `tensorrt` alone.
"""
