"""What `saguaro serve` does: in this process, or in one of its own with `--detach`."""

from __future__ import annotations

import asyncio
import logging
import logging.handlers
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from saguaro.errors import ConfigError, LaunchError
from saguaro.llm import build_engines
from saguaro.orchestrator.config import DeploymentConfig, ServingConfig, find_deployment, read_deployment
from saguaro.supervisor import janitor
from saguaro.supervisor.ports import choose_ports
from saguaro.supervisor.state import RunState, StateFolder, process_start
from saguaro.supervisor.supervisor import Stop, Supervisor

_log = logging.getLogger(__name__)
_FORMAT = "%(asctime)s %(levelname)s %(message)s"
_STOP_TIMEOUT = 60.0  # seconds


def serve(
    deployment: str, store: Path | None, *, openai: bool, host: str | None = None, log_file: Path | None = None
) -> None:
    """Serve in this process until a signal comes; `host` takes the place of the deployment's.

    Raises SaguaroError when it cannot start or cannot go on.
    """
    _log_to(log_file)
    path = find_deployment(deployment)
    config = read_deployment(path)
    if host is not None:
        config = replace(config, serving=replace(config.serving, host=host))
    folder = StateFolder(config.name)
    with folder.locked():
        if (old := folder.read()) is not None:
            _log.warning("the last supervisor of %s was killed: taking away what it has left", config.name)
            janitor.clean(old)
            folder.clear()
        engines = build_engines(config, path, store)
        config = replace(config, serving=choose_ports(config.serving))
        state = _new_state(config, path, openai)
        os.environ[janitor.MARK] = state.run  # this process exists to serve: all its children carry the mark
        folder.write(state)
        guard = janitor.start(config.name)
        try:
            asyncio.run(_run(Supervisor(config, engines, state, openai=openai, on_change=folder.write)))
        finally:
            folder.clear()
            shutil.rmtree(state.folder, ignore_errors=True)
            guard.communicate()


def _log_to(file: Path | None) -> None:
    """What happens is worth a line each in a process that runs for months; with `file` it goes there as well."""
    logger, root = logging.getLogger("saguaro"), logging.getLogger()
    if logger.level > logging.INFO and "SAGUARO_LOG_LEVEL" not in os.environ:
        logger.setLevel(logging.INFO)
    if file is not None:
        try:
            root.addHandler(logging.handlers.WatchedFileHandler(file))  # opens it anew after a rotation
        except OSError as error:
            raise ConfigError(f"--log-file {file} cannot be written ({error.strerror}): name another") from error
    for handler in root.handlers:
        handler.setFormatter(logging.Formatter(_FORMAT))


async def _run(supervisor: Supervisor) -> None:
    stop = Stop()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.ask)
    await supervisor.run(stop)
    _log.info("stopped")


def _new_state(config: DeploymentConfig, path: Path, openai: bool) -> RunState:
    started = process_start(os.getpid())
    if started is None:
        raise LaunchError("/proc does not show this process: mount it")
    return RunState(
        name=config.name,
        deployment=str(path.resolve()),
        pid=os.getpid(),
        pid_started=started,
        run=secrets.token_hex(8),
        since=time.time(),
        folder=tempfile.mkdtemp(prefix="saguaro-"),
        grace_s=config.serving.grace_s,
        addresses=_addresses(config.serving, openai),
    )


def _addresses(serving: ServingConfig, openai: bool) -> dict[str, str]:
    host = f"[{serving.host}]" if ":" in serving.host else serving.host
    monitor = f"http://{host}:{serving.monitor_port}"
    return ({"openai": f"http://{host}:{serving.openai_port}/v1"} if openai else {}) | {
        "http": f"http://{host}:{serving.http_port}/v2/models/ensemble/generate",
        "grpc": f"{host}:{serving.grpc_port}",
        "health": f"{monitor}/health",
        "metrics": f"{monitor}/metrics",
        "triton metrics": f"http://{host}:{serving.triton_metrics_port}/metrics",
    }


def serve_detached(deployment: str, command: list[str], log_file: Path | None, say: Callable[[str], None]) -> None:
    """Start `command`, a `saguaro serve`, in the background and return when it is ready.

    Raises LaunchError with its reason when it ends before that.
    """
    config = read_deployment(find_deployment(deployment))
    folder = StateFolder(config.name)
    with folder.locked():  # a supervisor that serves it already is said at once
        log = log_file or folder.log
    with log.open("ab") as output:
        begin = output.tell()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        while not ((state := folder.read()) and state.pid == process.pid and state.status in ("ok", "degraded")):
            if process.poll() is not None:
                raise LaunchError(_last_words(log, begin))
            time.sleep(0.1)
    except KeyboardInterrupt:
        process.terminate()
        process.wait(_STOP_TIMEOUT)
        raise
    say(f"{config.name} is served by process {process.pid}, which logs to {log}")
    for what, address in state.addresses.items():
        say(f"{what:14} {address}")


def _last_words(log: Path, begin: int) -> str:
    """The error a supervisor ended with, from its log."""
    with log.open("rb") as file:
        file.seek(begin)
        lines = file.read().decode(errors="replace").splitlines()
    errors = [line.removeprefix("saguaro: ") for line in lines if line.startswith("saguaro: ")]
    return errors[-1] if errors else f"it ended without a reason: {' | '.join(lines[-6:]) or 'it said nothing'} ({log})"
