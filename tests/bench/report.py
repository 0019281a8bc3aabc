#!/usr/bin/env python3
"""Turns the rows of spectrumkv_bench into lines or a page.

    report.py goals FOLDER      one line for each goal
    report.py markdown FOLDER   docs/benchmarks.md
"""

import pathlib
import platform
import subprocess
import sys
import textwrap

from goals import all_goals
from results import Results, commands_of, ratio

INTRO = (
    "Written by `scripts/bench` from one run on one machine: {machine}. Trust ratios inside one table, not absolutes: "
    "such machines swing by a factor of two. GB is 1e9 bytes of raw KV, whatever crossed the wire; figures are medians "
    "with [min..max].",
    "In each round every process is new and warmed up, and all take their turn: memcpy; a plain TCP socket (contiguous "
    "memory, 1 MiB writes, nothing scattered on either side); NIXL {nixl} (UCX over TCP, descriptors prepared "
    "beforehand); Mooncake {mooncake} (TCP, pooled connections); and two daemons with checksums on. The systems move the "
    "same number of bytes in pages of the same size from scattered places to scattered places, and what arrived is "
    "checked. CPU-s per GB: both sides together, user and system. How soon each tells an error when its peer dies or stops: "
    "[failures.md](failures.md).",
)


def machine():
    cpuinfo, meminfo = (pathlib.Path("/proc", name).read_text().splitlines() for name in ("cpuinfo", "meminfo"))
    cpu = next((line.split(":", 1)[1].strip() for line in cpuinfo if line.startswith("model name")), "?")
    cores = sum(line.startswith("processor") for line in cpuinfo)
    memory = next(int(line.split()[1]) for line in meminfo if line.startswith("MemTotal"))
    compiler = subprocess.run(["c++", "-dumpfullversion"], capture_output=True, text=True, check=True).stdout.strip()
    system = platform.freedesktop_os_release().get("PRETTY_NAME", "Linux")
    return "%d cores of %s, %.0f GiB, %s, kernel %s, gcc %s, release build" % (
        cores, cpu, memory / 2**20, system, platform.release(), compiler)


def versions():
    pins = {}
    for line in pathlib.Path(__file__).with_name("peers").joinpath("requirements.txt").read_text().splitlines():
        if "==" in line:
            name, version = line.strip().split("==")
            pins[name] = version
    return {"nixl": pins["nixl-cu12"], "mooncake": pins["mooncake-transfer-engine-non-cuda"]}


def table(head, rows):
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


def commands(rows):
    return "".join("`spectrumkv_bench %s`\n\n" % command for command in commands_of(rows))


def number(value, form="%.2f"):
    return "" if value is None else form % value


def spread(row, name, scale=1.0, form="%.2f"):
    return (form + " [" + form + ".." + form + "]") % tuple(row[name + end] * scale for end in ("_median", "_min", "_max"))


def bytes_text(size):
    return "%d MiB" % (size >> 20) if size >= 1 << 20 else "%d KiB" % (size >> 10)


def moves(results, part):
    """One table for each command: who moved the bytes how fast."""
    text = ""
    for command in commands_of(results.rows.get(part, ())):
        rows = results.select(part, command=command)
        rates = {row["name"]: row["gb_per_second"] for row in rows}
        first = rows[0]
        text += "### %s, pages of %s, %s\n\n`spectrumkv_bench %s`\n\n" % (
            first["link"], bytes_text(first["page_bytes"]), "mutual TLS" if first["security"] == "mtls" else "plain", command)
        text += "%.3f GB of raw KV, %d rounds.\n\n" % (first["kv_gb"], first["repeat"])
        compared = [name for name in ("memcpy", "socket", "nixl", "mooncake") if name in rates]
        text += table(
            ["", "GB/s", "ms", "wire / raw"] + ["/ " + name for name in compared] + ["CPU-s per GB", "relative error"],
            [[row["name"], number(row["gb_per_second"]), spread(row, "seconds", 1e3, "%.1f"), number(row["wire_share"], "%.3f")]
             + [number(ratio(row["gb_per_second"], rates[name])) for name in compared]
             + [spread(row, "cpu_s_per_gb"), number(row.get("relative_error"), "%.4f")] for row in rows]) + "\n"
    return text


def refine(results):
    exact, others = results.select("refine", kind="exact"), results.select("refine", kind="others")
    if not exact:
        return ""
    text = "## Refinement\n\n" + commands(results.rows["refine"])
    text += ("From Send to the base, and to the destination that equals the source, applied; beside RAW alone, which took its turn "
             "([refinement.md](refinement.md)). Bytes: base and refinement over RAW alone.\n\n")
    text += table(["link", "base", "base ms", "exact ms", "RAW alone ms", "base / RAW", "exact / RAW", "bytes / RAW"], [
        [row["link"], row["name"], spread(row, "base_s", 1e3, "%.0f"), spread(row, "exact_s", 1e3, "%.0f"), spread(row, "raw_s", 1e3, "%.0f"),
         "%.2f" % (row["base_s_median"] / row["raw_s_median"]), "%.2f" % (row["exact_s_median"] / row["raw_s_median"]),
         "%.2f" % row["bytes_to_raw"]] for row in exact]) + "\n"
    if others:
        text += "What a refinement that runs all the time costs other transfers:\n\n"
        text += table(["link", "", "tokens", "alone ms", "beside ms", "ratio"], [
            [row["link"], row["name"], str(row["tokens"]), spread(row, "alone_s", 1e3, "%.1f"), spread(row, "beside_s", 1e3, "%.1f"),
             "%.3f" % row["ratio"]] for row in others]) + "\n"
    return text


MORE_CORES = (
    "Which of these rows the link bounds and which the two cores that both daemons share: `link` is the time of the plain "
    "socket times the share of bytes that crossed, `CPU` the CPU seconds of both daemons. Simulated, not measured: with n "
    "cores a row takes the longer of `link` and CPU / n / busy, `busy` being how much of the two cores it kept busy here, or "
    "0.9 where the link made it wait.")


def more_cores(results):
    """What the rows of the 10G link would be with more cores."""
    rows = [row for row in results.rows.get("links", ()) if row["link"] == "10G" and row["security"] == "plain"]
    by_name = {row["name"]: row for row in rows}
    peers = [by_name[name]["seconds_median"] for name in ("nixl", "mooncake") if name in by_name]
    if "socket" not in by_name or not peers:
        return ""
    lines = []
    for row in rows:
        if row["name"] in ("memcpy", "socket", "nixl", "mooncake"):
            continue
        measured, cpu = row["seconds_median"], row["cpu_s_per_gb_median"] * row["kv_gb"]
        link = by_name["socket"]["seconds_median"] * row["wire_share"]
        busy = cpu / 2 / measured if measured > 1.1 * link else 0.9
        times = [measured] + [min(measured, max(link, cpu / cores / busy)) for cores in (3, 4)]
        lines.append([row["name"], "%.0f" % (link * 1e3), "%.0f" % (cpu * 1e3), "%.2f" % (cpu / 2 / measured)]
                     + ["%.2f" % (min(peers) / seconds) for seconds in times])
    return textwrap.fill(MORE_CORES, 120) + "\n\n" + table(
        ["10G", "link ms", "CPU ms", "busy", "/ better peer", "simulated, 3 cores", "simulated, 4 cores"], lines) + "\n"


def goals(results):
    return "## Goals\n\n" + table(["goal", "measured", "wanted", ""],
                                  [[g.name, g.measured_text, g.wanted_text, g.verdict] for g in all_goals(results)]) + "\n"


# Until a device has run the kernels.
NO_GPU = """### On a GPU

No GPU ran anything here, so there are no figures. What a GPU would have to do instead, counted while the PTX was
executed on the CPU, for each float16 value: P8 71 instructions to encode and 43 to decode, Q4 145 and 107, RAW 51 and
23; P8 reads and writes 12.1 + 1.1 bytes to encode, 5.6 + 2.0 to decode (all tiers, and how it was counted:
[gpu.md](gpu.md)). No speed follows from that. `spectrumkv_bench codec --backend cuda` measures where there is a GPU.

"""


def codec(results):
    rows = results.select("codec", kind="codec")
    text = "## Codec\n\n" + commands(rows) + "One core, GB/s of raw float16 KV. 1 MiB stays in cache, 256 MiB does not.\n\n"
    for limits in results.select("codec", kind="limits"):
        text += "%d MiB: memcpy %.1f, read %.1f, read 2 write 1 %.1f, read 1 write 2 %.1f, CRC32C %.1f GB/s.\n\n" % tuple(
            limits[key] for key in ("mib", "memcpy_gbs", "read_gbs", "read2_write1_gbs", "read1_write2_gbs", "crc32c_gbs"))
        text += table(["backend", "tier", "head_dim", "wire / raw", "encode", "of the limit", "decode", "of the limit", "scan"],
                      [[row["backend"], row["tier"], str(row["head_dim"]), "%.3f" % row["wire_ratio"], "%.1f" % row["encode_gbs"],
                        "%.2f" % row["encode_of_limit"], "%.1f" % row["decode_gbs"], "%.2f" % row["decode_of_limit"],
                        "%.1f" % row["scan_gbs"]] for row in rows
                       if row["mib"] == limits["mib"] and (row["backend"] != "scalar" or row["mib"] == 1)]) + "\n"
    return text + NO_GPU


def plan(results):
    rows, rate = results.select("plan", bench="plan"), results.rate("loopback", "b=0.3")
    text = "## Planner\n\n" + commands(rows)
    if not rows:
        return text
    text += "%d tokens x %d layers, %.1f GB of raw KV. Transfer: at the loopback rate of `b=0.3` above.\n\n" % (
        rows[0]["tokens"], rows[0]["layers"], rows[0]["kv_gb"])
    text += table(["importance", "plan ms", "/ memcpy", "/ transfer"], [
        [row["name"], "%.1f" % (row["plan_s"] * 1e3), "%.2f %%" % (100 * row["plan_s"] / row["memcpy_s"]),
         "" if rate is None else "%.2f %%" % (100 * row["plan_s"] * rate / row["kv_gb"])] for row in rows]) + "\n"
    beside = results.select("plan", bench="optimal")
    if not beside:
        return text
    text += "OPTIMAL beside the encoding it is for, one thread, %d tokens x %d layers; RECENT_QUERIES: %d queries of each KV head.\n\n" % (
        beside[0]["tokens"], beside[0]["layers"], beside[0]["attend_queries"])
    return text + table(["", "seconds", "/ encode"], [
        [what, "%.2f" % row[figure], "%.3f" % (row[figure] / row["encode_s"])] for row in beside
        for what, figure in (("sample", "sample_s"), ("plan", "plan_s"), ("RECENT_QUERIES", "attend_s"), ("encode", "encode_s"))]) + "\n"


def latency(results):
    text = "## Latency\n\n" + commands(results.select("latency", bench="latency"))
    text += "From Send to COMMITTED as the decode worker sees it, connections warm, ms. CPU: both daemons, a transfer.\n\n"
    small = results.select("latency", kind="small")
    percentiles = ("p50", "p99", "max")
    text += table(
        ["layers", "", "", "tokens"] + list(percentiles) + ["with Expect " + p for p in percentiles[:2]] + ["Send call p50", "CPU ms"],
        [[str(row["layers"]), row["name"], row["security"], str(row["tokens"])]
         + ["%.2f" % row["committed_%s_ms" % p] for p in percentiles] + ["%.2f" % row["with_expect_%s_ms" % p] for p in percentiles[:2]]
         + ["%.2f" % row["send_call_p50_ms"], "%.2f" % row["cpu_ms"]] for row in small]) + "\n"
    text += "How early the first layer of a large transfer is ready:\n\n"
    text += table(["layers", "tokens", "", "first layer ms", "whole ms", "share"], [
        [str(row["layers"]), str(row["tokens"]), row["name"], spread(row, "first_layer_s", 1e3, "%.1f"),
         spread(row, "seconds", 1e3, "%.1f"), "%.3f" % (row["first_layer_s_median"] / row["seconds_median"])]
        for row in results.select("latency", kind="first_layer")]) + "\n"
    for row in results.select("latency", kind="idle"):
        text += "Idle for %.0f s: the prefill daemon takes %.2f %%, the decode daemon %.2f %% of a core.\n\n" % (
            row["seconds"], row["prefill_cpu_percent"], row["decode_cpu_percent"])
    return text


def scale(results):
    text = "## Scale\n\nMemory is what each daemon has of its own, shared pools aside; staging slots are %s.\n\n" % (
        ", ".join(sorted({"%d MiB of it" % row["staging_mib"] for row in results.rows.get("scale", ())})))
    for command in commands_of(results.rows.get("scale", ())):
        rows = results.select("scale", command=command)
        text += "### %s\n\n`spectrumkv_bench %s`\n\n" % (rows[0]["sweep"].replace("_", " "), command)
        text += table([rows[0]["sweep"], "", "raw GB", "ms", "GB/s", "CPU-s per GB", "memory MiB", "slowest / median", "Expect ms",
                       "Send ms"],
                      [[str(row["value"]), row["name"], "%.3f" % row["kv_gb"], spread(row, "seconds", 1e3, "%.1f"),
                        "%.2f" % row["gb_per_second"], "%.2f" % row["cpu_s_per_gb_median"],
                        "%.0f, %.0f" % (row["prefill_mib"], row["decode_mib"]), "%.2f" % row["slowest_to_median_median"],
                        "%.2f" % (row["expect_s_median"] * 1e3), "%.2f" % (row["send_call_s_median"] * 1e3)] for row in rows]) + "\n"
    return text


def markdown(results):
    known = {"machine": machine(), **versions()}
    text = "# Measured\n\n" + "".join(textwrap.fill(part.format(**known), 120) + "\n\n" for part in INTRO) + goals(results)
    text += "## Loopback\n\n" + moves(results, "loopback")
    text += "## Shaped links\n\nTwo network namespaces and a veth pair, shaped with `tbf`; nothing adds delay.\n\n" + moves(results, "links") + more_cores(results)
    text += refine(results)
    return (text + codec(results) + plan(results) + latency(results) + scale(results)).rstrip("\n") + "\n"


def main(argv):
    if len(argv) != 3 or argv[1] not in ("goals", "markdown"):
        sys.exit(__doc__)
    results = Results.load(argv[2])
    if argv[1] == "markdown":
        print(markdown(results), end="")
        return
    for goal in all_goals(results):
        print(goal.line())


if __name__ == "__main__":
    main(sys.argv)
