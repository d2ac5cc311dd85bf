"""TensorRT's messages in Python's log."""

from __future__ import annotations

import logging

import tensorrt as trt

_log = logging.getLogger("tensorrt")
_LEVELS = {
    trt.ILogger.INTERNAL_ERROR: logging.CRITICAL,
    trt.ILogger.ERROR: logging.ERROR,
    trt.ILogger.WARNING: logging.WARNING,
    trt.ILogger.INFO: logging.INFO,
    trt.ILogger.VERBOSE: logging.DEBUG,
}


class Log(trt.ILogger):  # type: ignore[misc]
    """What runtimes and builders are given to write to."""

    def __init__(self) -> None:
        trt.ILogger.__init__(self)  # the bindings know no super()

    def log(self, severity: trt.ILogger.Severity, msg: str) -> None:
        _log.log(_LEVELS[severity], "%s", msg)
