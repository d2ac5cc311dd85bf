"""`saguaro top`, on metrics that come from real rounds, over HTTP."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from saguaro import cli
from saguaro.errors import ProtocolError
from saguaro.frontend.figures import Scrape, figures
from saguaro.frontend.top import Top, render
from saguaro.orchestrator.config import find_deployment
from saguaro.supervisor.state import RunState, StateFolder, process_start
from test_telemetry import BACKWARDS, Rig

HEALTH = {
    "status": "degraded",
    "deployment": "tiny",
    "parts": {"target": {"state": "ready", "restarts": 0}, "draft": {"state": "away", "restarts": 2, "detail": "died"}},
}


@contextmanager
def monitor(rig: Rig, health: str, status: int = 200) -> Iterator[str]:
    """A monitor as the supervisor has one. Between two scrapes 13 tokens are decoded."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = health
            if self.path == "/metrics":
                rig.run((13, "ssd"))
                rig.telemetry.emitted(13, 0.1, first=False)
                body = rig.telemetry.text()
            self.send_response(200 if self.path == "/metrics" else status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    with monitor(Rig(), json.dumps(HEALTH), status=503) as url:  # a deployment that is down is shown all the same
        assert cli.main(["top", "--url", url, "--json", "--interval", "0.05"]) == 0
    frame = json.loads(capsys.readouterr().out)
    assert (frame["status"], frame["mode"], frame["streams"], frame["waiting"]) == ("degraded", "ssd", 0, 0)
    assert (frame["lookahead"], frame["fan_out"], frame["draft_connected"]) == (3, [1, 1, 1, 1], True)
    assert frame["blocks"]["draft"] == {"free": 50, "cached": 3, "all": 50}
    now, start = frame["now"], frame["since_start"]
    assert (now["tokens"], start["tokens"]) == (13, 26)
    assert now["tokens_per_second"] == pytest.approx(13 / frame["seconds"])
    assert (now["hit_rate"], now["e_hit"], now["e_miss"], now["acceptance_length"]) == (1, 4, None, 4)
    assert 0 < now["speed_up"] < 4
    assert now["t_p"] > 0
    assert now["t_b"] is None  # no miss, no backup
    assert start["tokens_per_second"] is None


def test_one_frame_for_people_has_the_hit_rate_in_company() -> None:
    with monitor(Rig(), json.dumps(HEALTH)) as url:
        view = Top(url)
        view.frame()
        frame = view.frame()
    out = StringIO()
    Console(file=out, width=80).print(render(frame))
    text = out.getvalue()
    assert "…" not in text
    assert text.splitlines()[0].split()[:4] == ["tiny", "degraded", "mode", "ssd"]
    header = next(line for line in text.splitlines() if "hit rate" in line)
    assert {"E_hit", "speed-up"} <= set(header.split())
    assert "1.00   4.00" in next(line for line in text.splitlines() if line.startswith("since start"))
    assert "draft: away, 2 restarts (died)" in text


def test_a_collapse_is_shown() -> None:
    rig = Rig(BACKWARDS)
    for _ in range(100):
        rig.control.alarm.add(accepted=0)
    with monitor(rig, json.dumps(HEALTH)) as url:
        frame = Top(url).frame()
    assert frame["acceptance_collapsed"]
    out = StringIO()
    Console(file=out, width=110).print(render(frame))
    assert "acceptance has collapsed" in out.getvalue()


@pytest.mark.parametrize(
    ("health", "message"),
    [("<html>", "is not the health of a deployment"), ("[1]", "is not the health of a deployment")],
)
def test_what_is_no_monitor_is_said(health: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with monitor(Rig(), health) as url:
        assert cli.main(["top", "--url", url, "--once", "--interval", "0.05"]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "nonsense"])
def test_nobody_there_is_said_in_one_paragraph(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["top", "--url", url]) == 1
    error = capsys.readouterr().err
    assert error.startswith("saguaro: nothing answers at ")
    assert error.count("\n") == 1


@pytest.mark.parametrize("interval", ["0", "-1", "nan", "inf", "x"])
def test_an_interval_that_cannot_be_is_refused(interval: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        cli.main(["top", f"--interval={interval}"])
    assert leaving.value.code == 2
    assert "must be between 0.01 and 3600 seconds" in capsys.readouterr().err


def test_a_counter_that_began_anew_counts_from_zero() -> None:
    before, after = (Scrape(f'a_total{{x="1"}} {one}\na_total{{x="2"}} {two}\n') for one, two in ((7, 10), (9, 4)))
    assert after.growth(before, "a_total") == 2 + 4
    assert after.growth(before, "a_total", x="2") == 4
    assert after.value("a_total") == 13
    assert after.value("b_total") is None
    assert figures(after, before, 1.0).hit_rate is None
    with pytest.raises(ProtocolError, match="cannot be read"):
        Scrape("a{ 1")


def test_a_speculator_is_not_idle_for_longer_than_the_rounds_took() -> None:
    """What of a prompt's rounds it was idle is known when it answers: they may be over when the figures begin."""
    text = "saguaro_speculator_idle_seconds_total {}\nsaguaro_verify_seconds_sum {}\nsaguaro_wait_seconds_sum {}\n"
    start, prompt, later = (Scrape(text.format(*times)) for times in ((0, 0, 0), (0, 80, 0), (79, 81, 1)))
    assert figures(later, prompt, 2.0).speculator_idle == 1
    assert figures(later, start, 90.0).speculator_idle == pytest.approx(79 / 82)


def test_the_monitor_of_what_is_served_here_is_found_by_its_name_or_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert cli.main(["top", "--once"]) == 1
    assert "no deployment is served here" in capsys.readouterr().err
    with monitor(Rig(), json.dumps(HEALTH)) as url:
        folder = StateFolder("tiny")
        folder.make()
        started = process_start(os.getpid()) or 0
        addresses = {"health": f"{url}/health"}
        folder.write(RunState("tiny", "", os.getpid(), started, "", 0.0, "", 1.0, addresses=addresses))
        for name in ([], ["tiny"], [str(find_deployment("tiny"))]):
            assert cli.main(["top", *name, "--json", "--interval", "0.05"]) == 0
            assert json.loads(capsys.readouterr().out)["url"] == url
