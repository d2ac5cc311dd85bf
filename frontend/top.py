"""A live view of a served deployment in the terminal, from the health and the metrics that its monitor serves."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections import deque
from dataclasses import asdict
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from saguaro.errors import LinkError, ProtocolError
from saguaro.frontend.figures import Figures, Scrape, figures

_TIMEOUT = 5.0  # seconds for an answer of the monitor
_MAX_ANSWER = 16 * 2**20
_WINDOW = 10.0  # seconds that "now" looks back at most
_COLOURS = {"ok": "green", "degraded": "yellow"}


class Top:
    """What `saguaro top` shows of the monitor at `url` (http://host:port)."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._scrapes: deque[tuple[float, Scrape]] = deque()

    def frame(self) -> dict[str, Any]:
        """A new look. Raises LinkError when nothing answers, and ProtocolError when what answers is no monitor.

        `now` is between the oldest scrape of the last seconds and this one: the first frame has no figures in it.
        """
        health = self._health()
        scrape = Scrape(self._get("/metrics"))
        moment = time.monotonic()
        self._scrapes.append((moment, scrape))
        while len(self._scrapes) > 2 and moment - self._scrapes[0][0] > _WINDOW:
            self._scrapes.popleft()
        since, earlier = self._scrapes[0]

        def level(name: str, **labels: str) -> int | None:
            value = scrape.value(f"saguaro_{name}", **labels)
            return None if value is None else round(value)

        modes = [dict(labels)["mode"] for labels, value in scrape.series("saguaro_mode") if value]
        pools = [dict(labels)["pool"] for labels, _ in scrape.series("saguaro_kv_blocks")]
        return {
            "url": self._url,
            "deployment": health.get("deployment"),
            "status": health.get("status"),
            "parts": health.get("parts", {}),
            "mode": modes[0] if modes else None,
            "mode_reason": health.get("mode_reason"),
            "lookahead": level("lookahead"),
            "backup": next(
                (dict(labels)["backup"] for labels, value in scrape.series("saguaro_backup") if value), None
            ),
            "fan_out": [round(value) for _, value in scrape.series("saguaro_fan_out")],
            "streams": level("requests_running"),
            "waiting": level("requests_waiting"),
            "queue_limit": level("queue_limit"),
            "preemptions": level("preemptions_total"),
            "draft_connected": bool(level("draft_connected")),
            "acceptance_collapsed": bool(level("acceptance_collapsed")),
            "blocks": {
                pool: {
                    "free": level("kv_free_blocks", pool=pool),
                    "cached": level("kv_cached_blocks", pool=pool),
                    "all": level("kv_blocks", pool=pool),
                }
                for pool in pools
            },
            "seconds": moment - since,
            "now": asdict(figures(scrape, earlier, moment - since)),
            "since_start": asdict(figures(scrape, Scrape(), None)),
        }

    def _health(self) -> dict[str, Any]:
        answer = self._get("/health")
        try:
            health = json.loads(answer)
        except ValueError:
            health = None
        if not isinstance(health, dict) or "status" not in health:
            raise ProtocolError(f"{self._url}/health is not the health of a deployment: give its monitor's address")
        return health

    def _get(self, path: str) -> str:
        try:
            with urllib.request.urlopen(self._url + path, timeout=_TIMEOUT) as answer:
                return str(answer.read(_MAX_ANSWER).decode(errors="replace"))
        except urllib.error.HTTPError as error:
            if path == "/health":  # a deployment that is down says so with an error status and the same body
                return error.read(_MAX_ANSWER).decode(errors="replace")
            raise LinkError(f"{self._url}{path} answers {error.code} {error.reason}") from error
        except (OSError, ValueError) as error:
            raise LinkError(
                f"nothing answers at {self._url}{path} ({error}): is the deployment served? "
                "Give its monitor's address with --url"
            ) from error


def top(url: str, *, interval: float, once: bool, as_json: bool) -> None:
    """Show a frame every `interval` seconds until interrupted; with `once` or `as_json` only one, of that time."""
    view = Top(url)
    frame = view.frame()
    console = Console()
    if once or as_json:
        time.sleep(interval)
        frame = view.frame()
        if as_json:
            print(json.dumps(frame))
        else:
            console.print(render(frame))
        return
    with Live(render(frame), console=console, auto_refresh=False, screen=console.is_terminal) as live:
        while True:
            time.sleep(interval)
            try:
                shown = render(view.frame())
            except (LinkError, ProtocolError) as error:  # it may come back
                shown = Text(str(error), style="red")
            live.update(shown, refresh=True)


def render(frame: dict[str, Any]) -> RenderableType:
    """A frame for people. The hit rate is never without E_hit and the speed-up."""
    status = frame["status"]
    title = Text.assemble(
        (str(frame["deployment"] or frame["url"]), "bold"),
        "  ",
        (str(status), _COLOURS.get(status, "red")),
        f"  mode {_text(frame['mode'])}{f' ({why})' if (why := frame['mode_reason']) else ''}"
        f"  lookahead {_text(frame['lookahead'])}"
        f"  fan-out {' '.join(map(str, frame['fan_out'])) or '-'}  backup {_text(frame['backup'])}",
    )
    load = Text(
        f"streams {_text(frame['streams'])}  waiting {_text(frame['waiting'])} of {_text(frame['queue_limit'])}"
        f"  preemptions {_text(frame['preemptions'])}"
    )
    blocks = Text(
        "free blocks  "
        + "  ".join(f"{pool} {b['free']}/{b['all']} ({b['cached']} cached)" for pool, b in frame["blocks"].items())
    )
    speed = _table("tokens/s", "acc. length", "hit rate", "E_hit", "E_miss", "speed-up")
    rounds = _table("T_p", "T_b", "verify", "wait", "draft idle")
    requests = _table("tokens", "requests", "first token", "between tokens")
    for name, key in ((f"last {frame['seconds']:.0f} s", "now"), ("since start", "since_start")):
        f = Figures(**frame[key])
        speed.add_row(
            name,
            *(_text(value, 2) for value in (f.tokens_per_second, f.acceptance_length, f.hit_rate, f.e_hit, f.e_miss)),
            _text(f.speed_up, 2, " x ar"),
        )
        idle = None if f.speculator_idle is None else 100 * f.speculator_idle
        times = (_text(f.verify_ms, 1, " ms"), _text(f.wait_ms, 1, " ms"))
        rounds.add_row(name, _text(f.t_p, 2), _text(f.t_b, 2), *times, _text(idle, 0, " %"))
        ttft, gap = _text(f.ttft_ms, 0, " ms"), _text(f.inter_token_ms, 1, " ms")
        requests.add_row(name, str(f.tokens), str(f.requests), ttft, gap)
    return Group(title, load, blocks, Text(), speed, Text(), rounds, Text(), requests, Text(), *_troubles(frame))


def _table(*columns: str) -> Table:
    """For a row of figures under each name; narrow enough for a terminal of 80 columns."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _troubles(frame: dict[str, Any]) -> list[Text]:
    lines = []
    if frame["acceptance_collapsed"]:
        lines.append(Text("acceptance has collapsed: next to no draft token is accepted", style="red"))
    for name, part in frame["parts"].items():
        state, restarts = part.get("state"), part.get("restarts", 0)
        if state != "ready" or restarts:
            detail = f" ({part['detail']})" if part.get("detail") else ""
            lines.append(
                Text(f"{name}: {state}, {restarts} restarts{detail}", style="" if state == "ready" else "yellow")
            )
    return lines


def _text(value: float | str | None, digits: int = 0, unit: str = "") -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else f"{value:.{digits}f}{unit}"
