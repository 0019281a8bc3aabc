"""Panels of a dashboard as HTML and SVG, near enough to Grafana's to judge a dashboard by. Takes panels of its JSON and
what Prometheus answered; knows no network."""

import datetime
import html
import math
from dataclasses import dataclass

PALETTE = ["#73bf69", "#f2cc0c", "#5794f2", "#ff9830", "#f2495c", "#b877d9", "#8ab8ff", "#96d98d", "#ffb357", "#c4162a",
           "#37872d", "#1f60c4", "#e0b400", "#8f3bb8"]  # fmt: skip
COLOURS = {"green": "#73bf69", "yellow": "#fade2a", "red": "#f2495c"}
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 8, 20  # of a chart, in pixels


@dataclass
class Series:
    """A line: points are (seconds, value), ascending, all finite."""

    name: str
    points: list

    @property
    def last(self):
        return self.points[-1][1] if self.points else None


def scaled(value, base, units):
    """(digits, unit) with the largest unit that leaves at least 1."""
    index = 0
    while abs(value) >= base and index + 1 < len(units):
        value, index = value / base, index + 1
    return (f"{value:.3g}" if abs(value) < 999.5 else f"{value:.0f}"), units[index]


def seconds(value):
    for length, unit, least in ((86400, "d", 2), (3600, "h", 2), (60, "min", 2), (1, "s", 1), (1e-3, "ms", 1)):
        if abs(value) >= length * least:
            return f"{value / length:.3g} {unit}"
    return f"{value / 1e-6:.3g} µs"


def shown(value, unit, decimals=None):
    """A value with its unit, as Grafana's of that name."""
    if value is None or math.isnan(value):
        return "–"
    if value == 0:
        return {"percentunit": "0 %", "s": "0 s", "Bps": "0 B/s", "bytes": "0 B", "cps": "0 /s"}.get(unit, "0")
    if unit == "s":
        return seconds(value)
    if unit == "percentunit":
        digits = decimals if decimals is not None else 0 if abs(round(value, 2) - value) < 1e-9 else 1
        return f"{value * 100:.{digits}f} %"
    if unit == "Bps":
        return " ".join(scaled(value, 1000, ["B/s", "kB/s", "MB/s", "GB/s", "TB/s"]))
    if unit == "bytes":
        return " ".join(scaled(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB"]))
    if decimals is not None:
        return f"{value:.{decimals}f}"
    number, prefix = scaled(value, 1000, ["", " k", " M", " G"])
    return f"{number}{prefix}{' /s' if unit == 'cps' else ''}"


def ticks(low, high, count, base=10):
    """At most `count` + 1 numbers from low to high that are round to people who count by `base`, 10 or 1024."""
    power = base ** math.floor(math.log((high - low) / count, base))
    factors = (1, 2, 5, 10) if base == 10 else [2**i for i in range(11)]
    step = power * next(f for f in factors if (high - low) / (power * f) <= count)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


class Scale:
    """Values to pixels, linear or logarithmic."""

    def __init__(self, values, height, logarithmic, low, high, base):
        values = [v for v in values if v > 0] if logarithmic else values
        self.logarithmic, self.height = logarithmic, height
        least, most = min(values, default=0), max(values, default=1)
        if logarithmic:
            self.low, self.high = math.floor(math.log10(least or 1)), math.ceil(math.log10(most or 10))
            self.high = max(self.high, self.low + 1)
            self.marks = [10.0**power for power in range(self.low, self.high + 1)]
            return
        self.low = least if low is None else min(low, least)
        self.high = most * 1.08 if high is None else high
        if self.high <= self.low:
            self.high = self.low + 1
        self.marks = ticks(self.low, self.high, 4, base)

    def y(self, value):
        if self.logarithmic:
            value = math.log10(value) if value > 0 else self.low
        return TOP + (self.high - value) / (self.high - self.low) * self.height


def grid(scale, unit, start, end, width):
    out = []
    for mark in scale.marks:
        y = scale.y(mark)
        out.append(f'<line class="grid" x1="{LEFT}" x2="{width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        label = html.escape(shown(mark, unit))
        out.append(f'<text class="axis" x="{LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{label}</text>')
    span, places = end - start, 4 if width < 500 else 6
    steps = (5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21600, 43200)
    step = next((s for s in steps if span / s <= places), 86400)
    at = math.ceil(start / step) * step
    while at <= end:
        x = LEFT + (at - start) / span * (width - LEFT - RIGHT)
        time = datetime.datetime.fromtimestamp(at, datetime.timezone.utc).strftime("%H:%M:%S" if step < 60 else "%H:%M")
        out.append(f'<text class="axis" x="{x:.1f}" y="{TOP + scale.height + 15:.1f}" text-anchor="middle">{time}</text>')
        at += step
    return out


def stacked(series):
    """[(lower points, upper points)] of each, on top of those before, at the times any of them has."""
    times = sorted({t for one in series for t, _ in one.points})
    below, layers = dict.fromkeys(times, 0.0), []
    for one in series:
        values = dict(one.points)
        lower = [(t, below[t]) for t in times]
        for t in times:
            below[t] += values.get(t, 0.0)
        layers.append((lower, [(t, below[t]) for t in times]))
    return layers


def time_chart(panel, series, start, end, width, height):
    """SVG of a timeseries panel; `height` is that of the whole picture."""
    field = panel["fieldConfig"]["defaults"]
    custom = field.get("custom", {})
    stack = custom.get("stacking", {}).get("mode", "none") != "none"
    layers = stacked(series) if stack else [(None, one.points) for one in series]
    logarithmic = custom.get("scaleDistribution", {}).get("type") == "log"
    scale = Scale([v for _, points in layers for _, v in points], height - TOP - BOTTOM, logarithmic, field.get("min"),
                  field.get("max"), 1024 if field["unit"] == "bytes" else 10)  # fmt: skip

    def place(point):
        return f"{LEFT + (point[0] - start) / (end - start) * (width - LEFT - RIGHT):.1f},{scale.y(point[1]):.1f}"

    out = [f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">']
    out += grid(scale, field["unit"], start, end, width)
    for index, (lower, points) in enumerate(layers):
        if not points:
            continue
        colour, upper = PALETTE[index % len(PALETTE)], [place(point) for point in points]
        if not logarithmic:
            ground = lower or [(points[0][0], max(scale.low, 0)), (points[-1][0], max(scale.low, 0))]
            area = " ".join(upper + [place(point) for point in reversed(ground)])
            out.append(f'<polygon points="{area}" fill="{colour}" fill-opacity="{custom.get("fillOpacity", 0) / 100}"/>')
        out.append(f'<polyline points="{" ".join(upper)}" fill="none" stroke="{colour}" stroke-width="1.4"/>')
    return "".join(out) + "</svg>"


LEGEND_LINES, LETTER = 3, 6.4  # of the legend's small letters, in pixels


def legend(series, unit, width):
    """(the HTML, its lines). What does not fit is counted."""
    items, room, line = [], width - 24, 0
    for index, one in enumerate(series):
        name, value = one.name, shown(one.last, unit)
        needed = 32 + LETTER * (len(name) + 1 + len(value))
        if room < needed:
            room, line = width - 24, line + 1
        # The last line keeps room for the count.
        if line >= LEGEND_LINES or (line == LEGEND_LINES - 1 and room < needed + 90 and index + 1 < len(series)):
            items.append(f"<span>and {len(series) - index} more</span>")
            break
        room -= needed
        colour = PALETTE[index % len(PALETTE)]
        items.append(f'<span><i style="background:{colour}"></i>{html.escape(name)} <b>{html.escape(value)}</b></span>')
    return f'<div class="legend">{"".join(items)}</div>', min(line + 1, LEGEND_LINES)


def graph(panel, series, start, end, width, height):
    # Lines that stand at nothing come last.
    series = sorted(series, key=lambda one: not any(v for _, v in one.points))
    if not any(one.points for one in series):
        return '<div class="none">No data</div>'
    names, lines = legend(series, panel["fieldConfig"]["defaults"]["unit"], width)
    return time_chart(panel, series, start, end, width, height - 6 - 17 * lines) + names


def stat(panel, series, start, end, width, height):
    if not series or series[0].last is None:
        return '<div class="none">No data</div>'
    field, value = panel["fieldConfig"]["defaults"], series[0].last
    steps = field["thresholds"]["steps"]
    colour = COLOURS[[step["color"] for step in steps if step["value"] is None or value >= step["value"]][-1]]
    most = max(v for _, v in series[0].points) or 1
    across = [f"{(t - start) / (end - start) * width:.1f},{height - 2 - v / most * height * 0.3:.1f}" for t, v in series[0].points]
    first, last = across[0].split(",")[0], across[-1].split(",")[0]
    spark = (f'<svg class="spark" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
             f'<polygon points="{" ".join(across)} {last},{height} {first},{height}" fill="{colour}" fill-opacity=".14"/>'
             f'<polyline points="{" ".join(across)}" fill="none" stroke="{colour}" stroke-width="1.2"/></svg>')  # fmt: skip
    text = html.escape(shown(value, field["unit"], field.get("decimals")))
    return f'{spark}<div class="stat" style="color:{colour}">{text}</div>'


def table(panel, rows):
    """rows: [(labels, value)] of an instant query."""
    columns = panel["transformations"][1]["options"]["renameByName"]
    if not rows:
        return '<div class="none">No data</div>'
    unit = panel["fieldConfig"]["defaults"]["unit"]

    def cells(labels, value):
        texts = (shown(value, unit) if name == "Value" else labels.get(name, "") for name in columns)
        return "".join(f"<td>{html.escape(text)}</td>" for text in texts)

    head = "".join(f"<th>{html.escape(title)}</th>" for title in columns.values())
    body = "".join(f"<tr>{cells(*row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


STYLE = """
body{background:#111217;color:#ccccdc;font:13px/1.4 Inter,"DejaVu Sans",Roboto,sans-serif;margin:0;padding:12px}
header{display:flex;align-items:baseline;gap:16px;margin:0 4px 8px}
header h1{font-size:20px;font-weight:500;margin:0}header span{color:#8e8e99}
main{position:relative}
section{position:absolute;background:#181b1f;border:1px solid #25282e;border-radius:3px;overflow:hidden;box-sizing:border-box}
section h3{font-size:13px;font-weight:500;margin:0;padding:7px 12px 2px;white-space:nowrap;overflow:hidden;text-overflow:ellipsis}
h2{position:absolute;font-size:15px;font-weight:500;margin:0;padding:5px 4px 0}
svg{display:block}.grid{stroke:#2b2e35;stroke-width:1}.axis{fill:#8e8e99;font-size:10.5px}
.legend{padding:0 12px;display:flex;flex-wrap:wrap;gap:0 14px;font-size:11px;line-height:17px;color:#a9a9b8}
.legend i{display:inline-block;width:12px;height:3px;border-radius:2px;margin-right:5px;vertical-align:middle}
.legend b{color:#e4e4ee;font-weight:500}
.stat{position:absolute;left:0;right:0;top:36px;text-align:center;font-size:30px;font-weight:500}
.spark{position:absolute;left:0;bottom:0}
.none{position:absolute;inset:0;display:flex;align-items:center;justify-content:center;color:#8e8e99;font-size:15px}
.scroll{overflow:auto;padding:2px 12px}table{border-collapse:collapse;width:100%;font-size:12px}
th{text-align:left;color:#6e9fff;font-weight:500;padding:4px 6px 4px 0;border-bottom:1px solid #2b2e35}
td{padding:4px 6px 4px 0;border-bottom:1px solid #22252b;white-space:nowrap}
"""

WIDTH, CELL, GAP, HEAD = 1560, 38, 8, 27


def size(place):
    """(left, top, width, height) of a gridPos, in pixels."""
    column = (WIDTH + GAP) / 24
    return (round(place["x"] * column), place["y"] * CELL, round(place["w"] * column) - GAP, place["h"] * CELL - GAP)


def page(dashboard, answers, start, end, about):
    """answers: {panel id: [Series] or, of a table, [(labels, value)]}. The whole HTML page."""
    out, bottom = [], 0
    for panel in dashboard["panels"]:
        left, top, width, height = size(panel["gridPos"])
        bottom = max(bottom, top + height)
        title = html.escape(panel["title"])
        if panel["type"] == "row":
            out.append(f'<h2 style="left:{left}px;top:{top}px">{title}</h2>')
            continue
        answer = answers[panel["id"]]
        if panel["type"] == "table":
            body = table(panel, answer)
        else:
            draw = stat if panel["type"] == "stat" else graph
            body = draw(panel, answer, start, end, width - 2, height - 2 - (0 if draw is stat else HEAD))
        out.append(f'<section style="left:{left}px;top:{top}px;width:{width}px;height:{height}px" '
                   f'title="{html.escape(panel["description"])}"><h3>{title}</h3>{body}</section>')  # fmt: skip
    title = html.escape(dashboard["title"])
    return (f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
            f"<body><header><h1>{title}</h1><span>{html.escape(about)}</span></header>"
            f'<main style="width:{WIDTH}px;height:{bottom}px">{"".join(out)}</main></body></html>\n')  # fmt: skip


def page_size(dashboard):
    """(width, height) in pixels of the page, for a picture of it."""
    bottom = max(top + height for _, top, _, height in (size(panel["gridPos"]) for panel in dashboard["panels"]))
    return WIDTH + 24, bottom + 64
