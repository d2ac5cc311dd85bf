"""The draft as a TensorRT engine: `network` is what is compiled, `engine` runs it, `cuda` is the device it runs on.

TensorRT is imported by files in folders, or of the name, `tensorrt` alone.
"""
