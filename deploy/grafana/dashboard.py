#!/usr/bin/env python3
"""The dashboard as a short text; spectrumkv.json, which Grafana reads, is made of it.

dashboard.py          writes spectrumkv.json beside this file
dashboard.py --check  exit 1 where spectrumkv.json is not what this file makes
"""

import json
import pathlib
import sys

FILE = pathlib.Path(__file__).with_name("spectrumkv.json")
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
HERE = 'job=~"$job", instance=~"$instance"'
# The engine's own metrics come from another scrape job, at another port.
ENGINE = 'job=~"$engine_job"'
GREEN, YELLOW, RED = "green", "yellow", "red"


def rate(metric, labels="", by="", of="sum"):
    """sum by (...) (rate(spectrumkv_METRIC{...}[$__rate_interval]))"""
    where = ", ".join(filter(None, (HERE, labels)))
    return f"{of}{f' by ({by}) ' if by else ''}(rate(spectrumkv_{metric}{{{where}}}[$__rate_interval]))"


def gauge(metric, labels="", by="", of="sum"):
    where = ", ".join(filter(None, (HERE, labels)))
    return f"{of}{f' by ({by}) ' if by else ''}(spectrumkv_{metric}{{{where}}})"


def quantile(share, metric, labels="", by=""):
    return f"histogram_quantile({share}, {rate(metric + '_bucket', labels, by=', '.join(filter(None, ('le', by))))})"


def quantiles(metric, labels=""):
    return [(quantile(share, metric, labels), f"p{int(share * 100)}") for share in (0.5, 0.95, 0.99)]


def engine_quantiles(metric):
    series = f"sum by (le) (rate({metric}_bucket{{{ENGINE}}}[$__rate_interval]))"
    return [(f"histogram_quantile({share}, {series})", f"p{int(share * 100)}") for share in (0.5, 0.95, 0.99)]


def panel(kind, title, width, height, unit, description, targets, **defaults):
    """targets: [(expression, legend)]. steps: thresholds [(from, colour)]."""
    steps = defaults.pop("steps", [(None, GREEN)])
    overrides = defaults.pop("overrides", [])
    options = defaults.pop("options", {})
    transformations = defaults.pop("transformations", None)
    now = kind == "table"
    made = {
        "type": kind, "title": title, "description": description, "datasource": SOURCE,
        "gridPos": {"w": width, "h": height},
        "targets": [
            {"datasource": SOURCE, "editorMode": "code", "expr": expression, "legendFormat": legend, "refId": chr(65 + i),
             "instant": now, "range": not now, **({"format": "table"} if kind == "table" else {})}
            for i, (expression, legend) in enumerate(targets)
        ],
        "fieldConfig": {
            "defaults": {"unit": unit, "thresholds": {"mode": "absolute", "steps": [
                {"color": colour, "value": value} for value, colour in steps]}, **defaults},
            "overrides": overrides,
        },
        "options": options,
    }  # fmt: skip
    if transformations:
        made["transformations"] = transformations
    return made


def stat(title, unit, description, expression, **defaults):
    options = {"colorMode": "value", "graphMode": "area", "justifyMode": "center", "textMode": "value",
               "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}}  # fmt: skip
    return panel("stat", title, 4, 4, unit, description, [(expression, "")], options=options, **defaults)


def graph(title, width, unit, description, targets, stack="none", least=0, **defaults):
    """stack: none, normal, or percent for shares of one whole."""
    custom = {"drawStyle": "line", "lineWidth": 1, "fillOpacity": 8 if stack == "none" else 60, "showPoints": "never",
              "spanNulls": True, "stacking": {"mode": stack, "group": "A"}, **defaults.pop("custom", {})}  # fmt: skip
    options = {"legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
               "tooltip": {"mode": "multi", "sort": "desc"}}  # fmt: skip
    if least is not None:
        defaults["min"] = least
    return panel("timeseries", title, width, defaults.pop("height", 8), unit, description, targets, options=options, custom=custom, **defaults)


def table(title, width, description, targets, columns, unit="none"):
    """columns: {label or value: heading}, in their order; other labels are not shown."""
    order = {name: i for i, name in enumerate(columns)}
    return panel("table", title, width, 6, unit, description, targets, options={"showHeader": True}, transformations=[
        {"id": "filterFieldsByName", "options": {"include": {"names": list(columns)}}},
        {"id": "organize", "options": {"indexByName": order, "renameByName": columns}},
    ])  # fmt: skip


def glance():
    kv, wire = (rate(name, 'role="sender"') for name in ("kv_bytes_total", "wire_bytes_total"))
    return [
        stat("Compression", "none", "Raw KV bytes for each byte on the wire, as senders counted them. 1 is none: then "
             "see \"Tier mix\" and the runbook's SpectrumKVNoCompression.", f"{kv} / {wire}",
             decimals=2, steps=[(None, YELLOW), (1.05, GREEN)]),
        stat("KV arriving", "Bps", "Raw KV bytes that receivers took in each second.",
             rate("kv_bytes_total", 'role="receiver"')),
        stat("Saved on the network", "Bps", "Bytes of committed transfers that did not cross the network, each second.",
             rate("saved_bytes_total", 'role="receiver"')),
        stat("Time to first token, p95", "s", "As decode workers reported it (ReportFirstToken).",
             quantile(0.95, "time_to_first_token_seconds")),
        stat("Committed", "percentunit", "Share of the transfers that ended committed. Cancelled ones count as not.",
             rate("transfers_total", 'outcome="committed"') + " / " + rate("transfers_total"),
             decimals=1, steps=[(None, RED), (0.75, YELLOW), (0.99, GREEN)]),
        stat("Daemons", "short", "Daemons that answer the scrape.", gauge("build_info", of="count")),
    ]  # fmt: skip


def first_token():
    return [
        graph("Time to first token, as decode workers report it", 8, "s", "From ReportFirstToken: what users wait for. Same "
              "bucket edges as the engine's own, so the two panels can be compared.",
              quantiles("time_to_first_token_seconds")),
        graph("Time to first token, as vLLM measures it", 8, "s", "vllm:time_to_first_token_seconds of the chosen engine "
              "job. With disaggregation it has prefill, transfer and the first decode step in it.",
              engine_quantiles("vllm:time_to_first_token_seconds")),
        graph("The transfer in it", 8, "s", "From the receiver's request to the commit, and to the first layer that a "
              "layer-wise decoder may begin with. Waiting for the prefill counts.",
              [(quantile(0.5, "transfer_duration_seconds", 'role="receiver",outcome="committed"'), "transfer p50"),
               (quantile(0.95, "transfer_duration_seconds", 'role="receiver",outcome="committed"'), "transfer p95"),
               (quantile(0.5, "first_layer_ready_seconds"), "first layer p50"),
               (quantile(0.95, "first_layer_ready_seconds"), "first layer p95")]),
    ]  # fmt: skip


def stages():
    return [
        graph("Latency of a step, p95", 8, "s", "One step of each stage: a chunk, or a whole plan or commit. Logarithmic.",
              [(quantile(0.95, "stage_duration_seconds", by="stage"), "{{stage}}")], least=None,
              custom={"scaleDistribution": {"type": "log", "log": 10}}),
        graph("Where time goes", 8, "s", "Seconds spent in each stage for each second of the clock, all daemons together.",
              [(rate("stage_duration_seconds_sum", by="stage"), "{{stage}}")], stack="normal"),
        graph("What held transfers up", 8, "cps", "Committed transfers a second, by what took most of their time (limited_by). "
              "link: a smaller budget helps; staging, credits: more slots; plan, scan, encode, decode: more CPU; source, peer: "
              "the other side.", [(rate("transfers_limited_total", 'role="sender"', by="limited_by"), "{{limited_by}}")],
              stack="normal"),
    ]  # fmt: skip


def bytes_and_tiers():
    error = "reconstruction_error_ratio"
    by_tier, tokens = rate("tokens_total", 'role="sender"', by="tier"), rate("tokens_total", 'role="sender"')
    return [
        graph("Raw against wire", 8, "Bps", "KV bytes as they are in the cache, and as they were sent. The distance is saved.",
              [(rate("kv_bytes_total", 'role="sender"'), "raw KV"), (rate("wire_bytes_total", 'role="sender"'), "wire")]),
        graph("Tier mix", 8, "percentunit", "Shares of the tokens (K or V of one token in one layer) that were sent at each "
              "precision.", [(f"{by_tier} / ignoring (tier) group_left () {tokens}", "{{tier}}")], stack="normal", max=1),
        graph("What a tier loses", 8, "percentunit", "Mean error of sampled chunks against their originals, by tier (root mean "
              "squares). Above what the tier loses on other models: look at the model's keys.",
              [(f"{rate(error + '_sum', by='tier')} / {rate(error + '_count', by='tier')}", "{{tier}}")]),
        graph("Size of a transfer", 8, "bytes", "Wire bytes of one transfer.",
              [(quantile(0.5, "transfer_bytes", 'role="sender"'), "p50"),
               (quantile(0.95, "transfer_bytes", 'role="sender"'), "p95")]),
        graph("Rate of the links", 8, "Bps", "The network to a peer as transfers saw it, one observation each. spectrumkvctl "
              "peers has the rate of each peer.",
              [(quantile(share, "link_rate_bytes_per_second"), f"p{int(share * 100)}") for share in (0.1, 0.5, 0.9)]),
        graph("Frames and resends", 8, "Bps", "Bytes between daemons that are no chunks, and wire bytes above raw ones.",
              [(rate("overhead_bytes_total"), "frames"), (rate("expanded_bytes_total"), "expanded")]),
        graph("What the quality gate decided", 8, "cps", "Transfers asked for while the gate is on, by what it made of their "
              "tiers. warned, overridden: tiers that no probe has opened were used all the same.",
              [(rate("gate_decisions_total", by="decision"), "{{decision}}")], stack="normal"),
        graph("Verdicts of probes", 8, "short", "Tiers that probes have opened or closed to their models, as they are kept now.",
              [(gauge("gate_verdicts", by="tier, verdict"), "{{tier}} {{verdict}}")], stack="normal"),
        graph("Trials of probes", 8, "cps", "Trials that were reported a second, each tier counting one, by kind and outcome.",
              [(rate("probe_trials_total", by="kind, result"), "{{kind}} {{result}}")]),
        graph("Refinement", 8, "Bps", "Chunks that refinements sent (they are wire bytes as well), and what ApplyRefinement has "
              "copied into destinations.",
              [(rate("refined_bytes_total"), "sent"), (rate("refinement_applied_bytes_total"), "applied")]),
        graph("Refinements that ended", 8, "cps", "By outcome, both sides. A failed one leaves its transfer as it was.",
              [(rate("refinements_total", by="outcome"), "{{outcome}}")], stack="normal"),
        graph("Transfers kept for refinement", 8, "cps", "Committed transfers that were to be kept. refused: there were as many as "
              "refine.max_retained allows, or the daemon drains. cached: their words moved to the daemon; uncached: there was no room; "
              "evicted: they went for others.",
              [(rate("retentions_total", by="result"), "{{result}}")], stack="normal"),
    ]  # fmt: skip


def saturation():
    def used(side):
        full, all_of_it = f'state="{side}_used"', f'state=~"{side}_.+"'
        return gauge("staging_bytes", full, by="instance") + " / " + gauge("staging_bytes", all_of_it, by="instance")

    return [
        graph("Transfers under way", 8, "short", "Transfers that have not ended, both roles (limit: transfer.max_active).",
              [(gauge("inflight_transfers", by="instance"), "{{instance}}")]),
        graph("Staging in use", 8, "percentunit", "Share of the staging slots that hold chunks. At 100 % transfers wait for each "
              "other: memory.send_slots, memory.receive_slots.",
              [(used("send"), "send {{instance}}"), (used("receive"), "receive {{instance}}")], max=1),
        graph("Blocks of pools", 8, "short", "KV blocks of all registered pools, by use.",
              [(gauge("pool_blocks", by="state"), "{{state}}")], stack="normal"),
        graph("Memory of refinements", 8, "bytes", "Cells that wait for ApplyRefinement (limit: refine.staging_bytes), and words of "
              "retained sources (limit: refine.cache_bytes).", [(gauge("refine_bytes", by="use"), "{{use}}")], stack="normal"),
        graph("Memory on GPUs", 8, "bytes", "What the daemons have on their GPUs beside the memory of workers: the process's "
              "contexts, pools of kind DAEMON_OWNED, lanes that code chunks.",
              [(gauge("device_bytes", by="use"), "{{use}}")], stack="normal"),
        graph("Waiting for room at the receiver", 8, "s", "Seconds for each second in which a sender had chunks ready and no "
              "credit. Steadily above 0: the receiver is the brake.",
              [(rate("credit_stall_seconds_total", by="instance"), "{{instance}}")]),
        graph("Budgets the daemon chose", 8, "cps", "Automatic budgets a second, by reason. out_of_reach: not even the smallest "
              "budget meets the target on this link.", [(rate("budget_choices_total", by="reason"), "{{reason}}")],
              stack="normal"),
        graph("Connections of workers", 8, "short", "To the workers' socket (limit: worker.max_connections).",
              [(gauge("worker_connections", by="instance"), "{{instance}}")]),
    ]  # fmt: skip


def errors():
    return [
        graph("Transfers that did not commit", 8, "cps", "By how they ended. expired: the deadline passed, often because the "
              "other half never came. cancelled: the caller's wish.",
              [(rate("transfers_total", 'outcome!="committed"', by="outcome"), "{{outcome}}")]),
        graph("Errors by stage and code", 8, "cps", "The most frequent ten, by stage and gRPC code. Not every error ends a "
              "transfer; the runbook says what the codes point to.",
              [(f"topk(10, {rate('errors_total', by='stage, code')})", "{{stage}} {{code}}")]),
        graph("Refusals", 8, "cps", "Connections and requests that were turned away: TLS handshakes, connections to the workers' "
              "socket, quotas.",
              [(rate("handshake_failures_total"), "TLS handshake"),
               (rate("worker_connections_refused_total", by="cause"), "worker connection: {{cause}}"),
               (rate("quota_refusals_total", by="quota"), "quota: {{quota}}")]),
        graph("Leases that expired", 8, "cps", "Workers that died, hung, or forgot to release.",
              [(rate("leases_expired_total", by="kind"), "{{kind}}")]),
        graph("Chunks sent again or received twice", 8, "cps", "After a stream was lost. Now and then is no harm.",
              [(rate("chunks_resent_total"), "resent"), (rate("chunks_duplicate_total"), "received twice")]),
        graph("Values that are not finite", 8, "cps", "NaN and infinite values in sources; their tokens travel raw. They come from "
              "the model or from blocks that were never written.",
              [(rate("nonfinite_values_total", by="instance"), "{{instance}}")]),
    ]  # fmt: skip


def build():
    start = f"process_start_time_seconds{{{HERE}}}"
    expiry = f"spectrumkv_certificate_expiry_timestamp_seconds{{{HERE}}}"
    return [
        table("Builds", 8, "What runs where. More than one version for long: an upgrade stopped half way.",
              [(f"spectrumkv_build_info{{{HERE}}}", "")],
              {"instance": "Daemon", "version": "Version", "revision": "Revision"}),
        table("Codec backends", 4, "The backend each daemon codes with. scalar is several times slower than the others.",
              [(f"spectrumkv_codec_info{{{HERE}}} == 1", "")], {"instance": "Daemon", "backend": "Backend"}),
        table("Certificates end in", 6, "Time until the first certificate of each daemon's chain expires; plain daemons have "
              "none. Below a week: the rotation does not work.",
              [(f"({expiry} > 0) - time()", "")], {"instance": "Daemon", "Value": "Ends in"}, unit="s"),
        table("Running for", 6, "Since the process started. A restart loses pools and transfers under way.",
              [(f"time() - {start}", "")], {"instance": "Daemon", "Value": "Uptime"}, unit="s"),
        graph("Certificates read again", 12, "cps", "Changes of the certificate files. failed: the new files do not fit each "
              "other; the old ones stay in use.", [(rate("certificate_reloads_total", by="result"), "{{result}}")], height=6),
        graph("Draining", 12, "short", "Daemons that take no new work.",
              [(gauge("draining", by="instance", of="max"), "{{instance}}")], max=1, height=6),
    ]  # fmt: skip


ROWS = [("At a glance", glance), ("Time to first token", first_token), ("Stages", stages),
        ("Bytes and tiers", bytes_and_tiers), ("Saturation", saturation), ("Errors", errors),
        ("Build, backend, certificates", build)]  # fmt: skip


def placed():
    """All panels in the order of ROWS, each row from left to right, 24 columns wide."""
    panels, y, number = [], 0, 0
    for title, make in ROWS:
        number += 1
        panels.append({"type": "row", "title": title, "collapsed": False, "id": number, "panels": [],
                       "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}})  # fmt: skip
        y, x, height = y + 1, 0, 0
        for one in make():
            place = one["gridPos"]
            if x + place["w"] > 24:
                x, y, height = 0, y + height, 0
            number += 1
            one.update(id=number, gridPos={"x": x, "y": y, **place})
            x, height = x + place["w"], max(height, place["h"])
            panels.append(one)
        y += height
    return panels


def variable(name, label, query):
    return {"name": name, "label": label, "type": "query", "datasource": SOURCE, "query": query, "definition": query,
            "refresh": 2, "multi": True, "includeAll": True, "allValue": ".+", "sort": 1,
            "current": {"selected": True, "text": ["All"], "value": ["$__all"]}}  # fmt: skip


def dashboard():
    return {
        "uid": "spectrumkv", "title": "SpectrumKV", "description": "KV cache transfers between prefill and decode workers.",
        "tags": ["spectrumkv"], "schemaVersion": 39, "version": 1, "editable": False, "graphTooltip": 1, "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"}, "timezone": "", "annotations": {"list": []}, "links": [],
        "templating": {"list": [
            {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "refresh": 1,
             "current": {}},
            variable("job", "Job", "label_values(spectrumkv_build_info, job)"),
            variable("instance", "Instance", 'label_values(spectrumkv_build_info{job=~"$job"}, instance)'),
            variable("engine_job", "Engine job", "label_values(vllm:time_to_first_token_seconds_count, job)"),
        ]},
        "panels": placed(),
    }  # fmt: skip


def text():
    return json.dumps(dashboard(), indent=1, ensure_ascii=False) + "\n"


def main():
    if sys.argv[1:] == ["--check"]:
        if FILE.read_text(encoding="utf-8") != text():
            sys.exit(f"{FILE} is not what dashboard.py makes: run deploy/grafana/dashboard.py")
    elif sys.argv[1:]:
        sys.exit(__doc__)
    else:
        FILE.write_text(text(), encoding="utf-8")


if __name__ == "__main__":
    main()
