"""The rows that spectrumkv_bench printed, and questions to them."""

import json
import pathlib

PARTS = ("codec", "plan", "loopback", "links", "refine", "latency", "scale")


class Results:
    """Rows by part; a row without a result answers None, never a guess."""

    def __init__(self, rows):
        self.rows = rows

    @classmethod
    def load(cls, folder):
        rows = {}
        for part in PARTS:
            path, command = pathlib.Path(folder) / (part + ".jsonl"), ""
            rows[part] = []
            for line in path.read_text().splitlines() if path.exists() else ():
                row = json.loads(line)
                command = row.get("command", command)
                if "command" not in row:
                    rows[part].append({**row, "command": command})
        return cls(rows)

    def select(self, part, **wanted):
        return [row for row in self.rows.get(part, ()) if all(row.get(key) == value for key, value in wanted.items())]

    def rate(self, part, name, link="loopback", page_bytes=32768, security="plain"):
        """GB/s of raw KV, median."""
        rows = self.select(part, name=name, link=link, page_bytes=page_bytes, security=security)
        return rows[0]["gb_per_second"] if rows else None

    def best_peer(self, part, **where):
        rates = [self.rate(part, name, **where) for name in ("nixl", "mooncake")]
        return max((rate for rate in rates if rate is not None), default=None)


def ratio(a, b):
    return None if a is None or b is None else a / b


def commands_of(rows):
    """Each once, in order."""
    return list(dict.fromkeys(row["command"] for row in rows))
