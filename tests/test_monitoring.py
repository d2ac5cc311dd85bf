"""Dashboard, rules and documentation name what is exported, and nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import promql_parser
import yaml
from prometheus_client.parser import text_string_to_metric_families

from saguaro.orchestrator.config import ServingConfig
from test_telemetry import Rig

DOCS = Path(__file__).parents[1] / "docs"
SUPERVISOR = {"saguaro_part_up": {"part"}, "saguaro_restarts_total": {"part"}, "up": {"job"}}


@cache
def exported() -> dict[str, set[str]]:
    """Name of each series and its labels."""
    families = text_string_to_metric_families(Rig().full().telemetry.text())
    samples = [sample for family in families for sample in family.samples]
    return SUPERVISOR | {sample.name: set(sample.labels) for sample in samples}


@cache
def rules() -> list[dict[str, dict]]:
    return [
        rule
        for group in yaml.safe_load((DOCS / "monitoring/rules.yml").read_text())["groups"]
        for rule in group["rules"]
    ]


def panels() -> list[dict]:
    return [
        panel for panel in json.loads((DOCS / "monitoring/dashboard.json").read_text())["panels"] if "targets" in panel
    ]


def queries() -> Iterator[str]:
    yield from (target["expr"].replace("$__rate_interval", "1m") for panel in panels() for target in panel["targets"])
    yield from (rule["expr"] for rule in rules())


def check(query: str) -> None:
    """It is PromQL, over exported series and their labels, or over what a recording rule makes of them."""
    promql_parser.parse(query)
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    selectors = re.findall(r"\b(saguaro[\w:]*|up)\b(?:\{([^}]*)\})?", query)
    assert selectors, query
    for name, matchers in selectors:
        assert name in recorded or name in exported(), f"{name} in {query}"
        labels = set(re.findall(r"(\w+)\s*[=!]", matchers))
        assert labels <= exported().get(name, set()) | {"instance", "job"}, f"{name}{labels} in {query}"


def test_every_query_asks_for_what_is_exported() -> None:
    for query in queries():
        check(query)


def test_grouping_is_by_labels_that_the_series_have() -> None:
    for query in queries():
        for labels, name in re.findall(r"sum by \(([^)]*)\) \((?:rate|increase)\((saguaro\w+)", query):
            assert set(labels.split(", ")) <= exported()[name] | {"instance"}, query


def test_every_metric_is_on_the_dashboard() -> None:
    shown = " ".join(queries())
    names = {re.sub("_(bucket|sum|count)$", "", name) for name in exported()} - {
        "up",
        "saguaro_build_info",
        "saguaro_draft_wanted",
    }
    assert {name for name in names if name not in shown} == set()


def test_a_hit_rate_is_never_without_e_hit_and_the_speed_up() -> None:
    found = [panel for panel in panels() if any("saguaro_lookups_total{" in t["expr"] for t in panel["targets"])]
    assert len(found) == 2
    for panel in found:
        legends = {target["legendFormat"] for target in panel["targets"]}
        assert {"E_hit", "speed-up over ar"} <= legends, panel["title"]


def test_panels_do_not_overlap_and_are_numbered() -> None:
    whole = json.loads((DOCS / "monitoring/dashboard.json").read_text())
    assert len({panel["id"] for panel in whole["panels"]}) == len(whole["panels"])
    places = [panel["gridPos"] for panel in whole["panels"]]
    cells = [(x, y) for p in places for x in range(p["x"], p["x"] + p["w"]) for y in range(p["y"], p["y"] + p["h"])]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) == 23
    assert {variable["name"] for variable in whole["templating"]["list"]} == {"datasource", "instance"}


def test_alerts_have_all_that_an_alert_needs() -> None:
    alerts = [rule for rule in rules() if "alert" in rule]
    assert {alert["alert"].removeprefix("Saguaro") for alert in alerts} >= {
        *("HitRateCollapsed", "AcceptanceCollapsed", "DraftAway", "QueueNearBound", "Restarts", "StaleAnswers"),
    }
    for alert in alerts:
        assert set(alert) <= {"alert", "expr", "for", "labels", "annotations"}
        assert alert["labels"]["severity"] in ("warning", "critical")
        assert set(alert["annotations"]) == {"summary", "description"}
        assert re.fullmatch(r"\d+[sm]", alert.get("for", "1m"))
        # What a text says about the series it fired for must be in the result of its expression.
        for label in re.findall(r"\$labels\.(\w+)", " ".join(alert["annotations"].values())):
            assert label in {"instance", "part"}
            assert label == "instance" or "saguaro_part_up" in alert["expr"] or "saguaro_restarts" in alert["expr"]


def test_the_example_scrapes_the_ports_of_a_deployment_and_reads_the_rules() -> None:
    example = yaml.safe_load((DOCS / "monitoring/prometheus.yml").read_text())
    targets = {job["job_name"]: job["static_configs"][0]["targets"] for job in example["scrape_configs"]}
    serving = ServingConfig()
    ports = {"saguaro": serving.monitor_port, "openai": serving.openai_port, "triton": serving.triton_metrics_port}
    assert targets == {job: [f"{serving.host}:{port}"] for job, port in ports.items()}
    assert [(DOCS / "monitoring" / name).is_file() for name in example["rule_files"]] == [True]


def test_the_documentation_lists_exactly_what_is_exported() -> None:
    families = text_string_to_metric_families(Rig().full().telemetry.text())
    kinds = {f"{family.name}_total" if family.type == "counter" else family.name: family.type for family in families}
    kinds |= {"saguaro_part_up": "gauge", "saguaro_restarts_total": "counter"}
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| \S", (DOCS / "metrics.md").read_text(), re.MULTILINE)
    assert len(rows) == len(dict(rows))
    # What only a target on TensorRT-LLM exports is compared where one runs, in test_trtllm.
    assert {name: kind for name, kind in rows if not name.startswith("saguaro_executor_")} == kinds
