"""goals.py and report.py on rows made here."""

import unittest

import goals
import report
from results import Results


def move(name, gbs, link="loopback", page_bytes=32768, security="plain", cpu=0.1):
    kind = "e2e --link %s --pages %d --%s" % (link, page_bytes, security)
    row = {"bench": "e2e", "name": name, "link": link, "page_bytes": page_bytes, "security": security, "kv_gb": 0.5, "repeat": 5,
           "gb_per_second": gbs, "wire_share": 0.5, "command": kind}
    for figure, value in (("seconds", 0.5 / gbs), ("cpu_s_per_gb", cpu)):
        row.update({figure + end: value for end in ("_median", "_min", "_max")})
    return row


def codec_row(backend, tier, mib, figure):
    return {"kind": "codec", "mib": mib, "backend": backend, "dtype": "float16", "head_dim": 64, "tier": tier, "wire_ratio": 0.5,
            "encode_gbs": figure, "encode_of_limit": figure / 10, "decode_gbs": figure, "decode_of_limit": figure / 10,
            "scan_gbs": 1.0, "command": "codec"}


def complete():
    """Rows that meet every goal exactly or better."""
    loopback = [move(*row) for row in (("memcpy", 12.0), ("socket", 4.0), ("nixl", 3.0), ("mooncake", 1.0), ("RAW", 3.4),
                                       ("P8", 4.5), ("b=0.3", 3.9))]
    loopback += [move("nixl", 4.0, page_bytes=1 << 20), move("P8", 4.41, page_bytes=1 << 20)]
    loopback += [move("P8", 0.1, security="mtls", cpu=9.0)]
    links = [move(name, gbs, link="10G") for name, gbs in (("nixl", 1.0), ("P8", 1.9), ("b=0.3", 2.8), ("b=0.2", 3.2), ("greedy=0.3", 2.8))]
    links += [move(name, gbs, link="1G") for name, gbs in (("nixl", 1.0), ("b=0.5", 1.95), ("b=0.3", 3.2), ("b=0.2", 4.7), ("greedy=0.3", 3.3))]
    codec = [codec_row(backend, tier, mib, 8.0) for backend in ("avx512", "avx2")
             for tier in goals.PLAIN + goals.ROTATED for mib in (1, 256)]
    codec += [{"kind": "limits", "mib": mib, "memcpy_gbs": 1.0, "read_gbs": 1.0, "read2_write1_gbs": 1.0, "read1_write2_gbs": 1.0,
               "crc32c_gbs": 1.0, "command": "codec"} for mib in (1, 256)]
    plan = [{"bench": "plan", "name": "SCORES", "tokens": 1, "layers": 1, "kv_gb": 39.0, "memcpy_s": 4.0, "plan_s": 0.2,
             "command": "plan"},
            {"bench": "optimal", "name": "OPTIMAL beside the encoder", "tokens": 1, "layers": 1, "sample_s": 0.08, "plan_s": 0.02,
             "encode_s": 1.0, "share_of_encode": 0.1, "attend_queries": 64, "attend_s": 2.0, "command": "plan"}]
    first = {"kind": "first_layer", "layers": 32, "tokens": 9, "name": "P8", "command": "latency", "bench": "latency"}
    first.update({"first_layer_s" + end: 0.012 for end in ("_median", "_min", "_max")})
    first.update({"seconds" + end: 0.16 for end in ("_median", "_min", "_max")})
    small = {"bench": "latency", "kind": "small", "layers": 30, "security": "plain", "name": "RAW", "tokens": 128, "cpu_ms": 2.0,
             "command": "latency", "send_call_p50_ms": 0.3}
    for what in ("committed", "with_expect"):
        small.update({"%s_p50_ms" % what: 1.0, "%s_p99_ms" % what: 5.0, "%s_max_ms" % what: 6.0})
    idle = {"bench": "latency", "kind": "idle", "seconds": 5, "prefill_cpu_percent": 0.1, "decode_cpu_percent": 0.1,
            "command": "latency"}
    scale = {"bench": "scale", "sweep": "tokens", "value": 1024, "name": "RAW", "kv_gb": 0.1, "gb_per_second": 1.0,
             "cpu_s_per_gb_median": 1.0, "prefill_mib": 1, "decode_mib": 1, "staging_mib": 192, "slowest_to_median_median": 1.0,
             "expect_s_median": 0.1, "send_call_s_median": 0.1, "command": "scale"}
    scale.update({"seconds" + end: 0.1 for end in ("_median", "_min", "_max")})
    exact = {"bench": "refine", "kind": "exact", "link": "1G", "name": "b=0.2", "bytes_to_raw": 1.19, "command": "refine --link 1G"}
    exact.update({what + "_s" + end: value for what, value in (("base", 0.2), ("exact", 1.2), ("raw", 1.0))
                  for end in ("_median", "_min", "_max")})
    others = {"bench": "refine", "kind": "others", "link": "1G", "name": "b=0.2", "tokens": 512, "ratio": 1.02,
              "command": "refine --link 1G"}
    others.update({what + "_s" + end: 0.01 for what in ("alone", "beside") for end in ("_median", "_min", "_max")})
    return Results({"loopback": loopback, "links": links, "refine": [exact, others, {**others, "link": "10G"}], "codec": codec, "plan": plan, "latency": [first, small, idle],
                    "scale": [scale]})


class GoalsTest(unittest.TestCase):
    def test_figures_at_the_edge_are_enough(self):
        short = [goal.line() for goal in goals.all_goals(complete()) if goal.verdict != "ok"]
        self.assertEqual(short, [])

    def test_a_worse_figure_makes_its_own_goals_short(self):
        cases = [
            ("loopback", {"name": "P8", "page_bytes": 32768, "security": "plain"}, "gb_per_second", 4.4, {"loopback-32KiB-P8/better-peer"}),
            ("loopback", {"name": "mooncake"}, "gb_per_second", 3.1,
             {"loopback-32KiB-P8/better-peer", "loopback-32KiB-b=0.3/better-peer"}),
            ("loopback", {"name": "nixl", "page_bytes": 1 << 20}, "gb_per_second", 4.1,
             {"loopback-1MiB-P8/NIXL", "loopback-32KiB-RAW/best-NIXL-of-all-pages"}),
            ("loopback", {"name": "socket"}, "gb_per_second", 4.3, {"loopback-32KiB-RAW/socket"}),
            ("links", {"name": "b=0.2", "link": "1G"}, "gb_per_second", 4.6, {"1G-b=0.2/better-peer"}),
            ("links", {"name": "greedy=0.3", "link": "1G"}, "gb_per_second", 3.5, {"1G-OPTIMAL/GREEDY"}),
            ("codec", {"tier": "P4", "backend": "avx2", "mib": 256}, "encode_of_limit", 0.7, {"codec-avx2-P8,P4-encode/memory-limit"}),
            ("codec", {"tier": "P4", "backend": "avx2", "mib": 1}, "encode_of_limit", 0.1, set()),
            ("codec", {"tier": "Q3", "backend": "avx512", "mib": 1}, "decode_gbs", 7.9, {"codec-avx512-rotated-decode-GB/s"}),
            ("latency", {"kind": "small"}, "committed_p99_ms", 5.1, {"128-tokens-p99-ms"}),
            ("latency", {"kind": "first_layer"}, "first_layer_s_median", 0.013, {"first-layer/(2/layers-of-whole+2ms)"}),
            ("loopback", {"name": "b=0.3"}, "cpu_s_per_gb_median", 0.7, {"CPU-s-per-GB-b=0.3"}),
            ("refine", {"kind": "others", "link": "1G"}, "ratio", 1.04, {"1G-others-beside-a-refinement"}),
            ("plan", {"bench": "plan"}, "plan_s", 0.3, {"plan-131072x80/transfer"}),
            ("plan", {"bench": "optimal"}, "share_of_encode", 0.11, {"OPTIMAL-sample+plan/encode"}),
        ]
        for part, where, figure, value, wanted in cases:
            results = complete()
            rows = results.select(part, **where)
            self.assertEqual(len(rows), 1, where)
            rows[0][figure] = value
            self.assertEqual({g.name for g in goals.all_goals(results) if g.verdict == "short"}, wanted, (part, where, figure))

    def test_what_was_not_measured_is_short_and_says_so(self):
        for goal in goals.all_goals(Results({})):
            self.assertRegex(goal.line(), r"^goal \S+ measured nothing wanted [<>]=\S+ short$")

    def test_a_line_has_the_figure_and_what_is_wanted(self):
        self.assertEqual(goals.Goal("a/b", 1.234, 1.5).line(), "goal a/b measured 1.23 wanted >=1.5 short")
        self.assertEqual(goals.Goal("ms", 1.0, 1.0, at_most=True).line(), "goal ms measured 1 wanted <=1 ok")


class ReportTest(unittest.TestCase):
    def test_every_row_and_command_is_on_the_page(self):
        results = complete()
        page = report.markdown(results)
        for part, rows in results.rows.items():
            for row in rows:
                self.assertIn("`spectrumkv_bench %s`" % row["command"], page, part)
        self.assertIn("| P8 | 4.50 | 111.1 [111.1..111.1] | 0.500 | 0.38 | 1.12 | 1.50 | 4.50 | 0.10 [0.10..0.10] |  |", page)
        self.assertIn("| SCORES | 200.0 | 5.00 % | 2.00 % |", page)
        self.assertIn("| sample | 0.08 | 0.080 |", page)
        self.assertIn("| 0.20 | 1.20 | 1.19 |", page)
        self.assertIn("| 10.0 [10.0..10.0] | 10.0 [10.0..10.0] | 1.020 |", page)
        self.assertNotIn("None", page)

    def test_more_cores_help_what_the_cores_bound_and_nothing_more(self):
        links = [move(name, gbs, link="10G", cpu=cpu) for name, gbs, cpu in
                 (("socket", 1.0, 0.1), ("nixl", 0.8, 0.1), ("P8", 2.0, 0.2), ("b=0.3", 1.25, 1.2))]
        lines = report.more_cores(Results({"links": links})).splitlines()
        # 0.5 GB, half of it on the wire: the link takes 0.25 s. P8 takes that; b=0.3 takes 0.4 s, by 0.6 s of CPU.
        self.assertIn("| P8 | 250 | 100 | 0.20 | 2.50 | 2.50 | 2.50 |", lines)
        self.assertIn("| b=0.3 | 250 | 600 | 0.75 | 1.56 | 2.34 | 2.50 |", lines)
        self.assertEqual(report.more_cores(Results({})), "")

    def test_a_page_without_results_has_its_goals(self):
        self.assertIn("| 128-tokens-p50-ms | nothing | <=1 | short |", report.markdown(Results({})))


if __name__ == "__main__":
    unittest.main()
