"""Samples, their medians and spread, and ratios next to their aims: as crates/bench/src/bench/report.rs has
and writes them.

Python's standard library only.
"""

import json
import os
import pathlib
import platform


def quartiles(samples):
    ordered = sorted(samples)
    found = []
    for quarter in (1, 2, 3):
        at, rest = divmod((len(ordered) - 1) * quarter, 4)
        following = ordered[min(at + 1, len(ordered) - 1)]
        found.append(ordered[at] + (following - ordered[at]) * rest / 4)
    return found


def load():
    return " ".join(pathlib.Path("/proc/loadavg").read_text().split()[:3])


def machine():
    cpuinfo = pathlib.Path("/proc/cpuinfo").read_text()
    model = next(
        (line.split(":")[1].strip() for line in cpuinfo.splitlines() if line.startswith("model name")), ""
    )
    virtual = " (virtual)" if " hypervisor" in cpuinfo else ""
    return f"{os.cpu_count()} CPUs, {model}{virtual}, Linux {platform.release().split('-')[0]}"


class Report:
    def __init__(self, name, quick):
        print(f"bench {name} on {machine()}, load average {load()}", flush=True)
        self.all = {
            "bench": name, "quick": quick, "machine": machine(), "load_before": load(), "series": [],
            "ratios": [], "notes": [],
        }

    def note(self, text):
        print(f"  {text}", flush=True)
        self.all["notes"].append(text)

    def series(self, name, unit, samples, **parameters):
        low, median, high = quartiles(samples)
        print(f"  {name:<66} {median:.4g} {unit} ({low:.4g} to {high:.4g})", flush=True)
        self.all["series"].append(
            {
                "name": name, "unit": unit, "parameters": parameters, "median": median, "low": low,
                "high": high, "samples": samples,
            }
        )

    def ratio(self, name, values, reach=None):
        low, median, high = quartiles(values)
        met = None
        if reach is not None:
            bound = float(reach.split()[1])
            met = median <= bound if reach.startswith("<=") else median >= bound
        verdict = {None: "", True: "ok", False: "MISSED"}[met]
        print(f"  {name:<66} {median:.4g} ({low:.4g} to {high:.4g}) {reach or ''} {verdict}", flush=True)
        self.all["ratios"].append(
            {"name": name, "value": median, "low": low, "high": high, "reach": reach, "met": met}
        )

    def finish(self, file):
        self.all["load_after"] = load()
        if file:
            file.write_text(json.dumps(self.all, indent=2, sort_keys=True) + "\n")


def ratios(a, b):
    return [x / y for x, y in zip(a, b, strict=True)]
