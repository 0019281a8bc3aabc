"""What is wanted of the figures. A goal that is short is told, and is no failure."""

from dataclasses import dataclass

from results import ratio

PLAIN, ROTATED = ("RAW", "P8", "P4"), ("Q8", "Q4", "Q3", "Q2")


@dataclass(frozen=True)
class Goal:
    """`measured` None: the part was not run, or had nothing to compare with."""

    name: str
    measured: float | None
    wanted: float
    at_most: bool = False

    @property
    def verdict(self):
        if self.measured is None:
            return "short"
        return "ok" if (self.measured <= self.wanted if self.at_most else self.measured >= self.wanted) else "short"

    @property
    def measured_text(self):
        return "nothing" if self.measured is None else "%.3g" % self.measured

    @property
    def wanted_text(self):
        return ("<=" if self.at_most else ">=") + "%.3g" % self.wanted

    def line(self):
        return "goal %s measured %s wanted %s %s" % (self.name, self.measured_text, self.wanted_text, self.verdict)


def loopback(results):
    def rate(name, page_bytes=32768):
        return results.rate("loopback", name, page_bytes=page_bytes)

    peer, nixl = results.best_peer("loopback"), [row["gb_per_second"] for row in results.select("loopback", name="nixl")]
    yield Goal("loopback-32KiB-P8/better-peer", ratio(rate("P8"), peer), 1.5)
    yield Goal("loopback-32KiB-b=0.3/better-peer", ratio(rate("b=0.3"), peer), 1.3)
    yield Goal("loopback-1MiB-P8/NIXL", ratio(rate("P8", 1 << 20), rate("nixl", 1 << 20)), 1.1)
    yield Goal("loopback-32KiB-RAW/best-NIXL-of-all-pages", ratio(rate("RAW"), max(nixl, default=None)), 0.85)
    yield Goal("loopback-32KiB-RAW/socket", ratio(rate("RAW"), rate("socket")), 0.8)


def links(results):
    for link, wanted in (("10G", {"P8": 1.9, "b=0.3": 2.8, "b=0.2": 3.2}), ("1G", {"b=0.5": 1.95, "b=0.3": 3.2, "b=0.2": 4.7})):
        for name, times in wanted.items():
            measured = ratio(results.rate("links", name, link=link), results.best_peer("links", link=link))
            yield Goal("%s-%s/better-peer" % (link, name), measured, times)
        # What the better allocator, and its look at the source, costs.
        measured = ratio(results.rate("links", "b=0.3", link=link), results.rate("links", "greedy=0.3", link=link))
        yield Goal("%s-OPTIMAL/GREEDY" % link, measured, 0.95)


def codec(results):
    """The worst of all head dimensions; what plain tiers reach of memory's limit out of cache, rotated ones everywhere."""

    def worst(tiers, figure, **where):
        rows = results.select("codec", kind="codec", dtype="float16", **where)
        return min((row[figure] for row in rows if row["tier"] in tiers), default=None)

    for backend in ("avx512", "avx2"):
        large = {"backend": backend, "mib": 256}
        yield Goal("codec-%s-P8,P4-encode/memory-limit" % backend, worst(("P8", "P4"), "encode_of_limit", **large), 0.8)
        yield Goal("codec-%s-plain-decode/memory-limit" % backend, worst(PLAIN, "decode_of_limit", **large), 0.8)
        yield Goal("codec-%s-rotated-encode-GB/s" % backend, worst(ROTATED, "encode_gbs", backend=backend), 5)
        yield Goal("codec-%s-rotated-decode-GB/s" % backend, worst(ROTATED, "decode_gbs", backend=backend), 8)


def latency(results):
    """The worst of all variants; the first layer as a share of what is allowed to it."""
    first = [row["first_layer_s_median"] / (2 / row["layers"] * row["seconds_median"] + 0.002)
             for row in results.select("latency", kind="first_layer")]
    yield Goal("first-layer/(2/layers-of-whole+2ms)", max(first, default=None), 1, at_most=True)
    small = results.select("latency", kind="small", layers=30, security="plain")
    for percentile, wanted in (("p50", 1), ("p99", 5)):
        measured = max((row["committed_%s_ms" % percentile] for row in small), default=None)
        yield Goal("128-tokens-%s-ms" % percentile, measured, wanted, at_most=True)


def cost(results):
    for name, wanted in (("P8", 0.3), ("b=0.3", 0.6)):
        rows = results.select("loopback", name=name, page_bytes=32768, security="plain")
        yield Goal("CPU-s-per-GB-%s" % name, rows[0]["cpu_s_per_gb_median"] if rows else None, wanted, at_most=True)
    rate = results.rate("loopback", "b=0.3")
    shares = [row["plan_s"] / (row["kv_gb"] / rate) for row in results.select("plan", bench="plan") if rate is not None]
    yield Goal("plan-131072x80/transfer", max(shares, default=None), 0.02, at_most=True)
    rows = results.select("plan", bench="optimal")
    yield Goal("OPTIMAL-sample+plan/encode", rows[0]["share_of_encode"] if rows else None, 0.1, at_most=True)


def refine(results):
    for link in ("10G", "1G"):
        ratios = [row["ratio"] for row in results.select("refine", kind="others", link=link)]
        yield Goal("%s-others-beside-a-refinement" % link, max(ratios, default=None), 1.03, at_most=True)


def all_goals(results):
    return [goal for group in (loopback, links, codec, latency, cost, refine) for goal in group(results)]
