"""A plan put into words: as plain data for --json and /admin/plugins, and as tables for a terminal.

Owns the presentation only: every value and reason is the plan's own.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from octavo.catalog import CONTRACT
from octavo.decision import OperatorDecision
from octavo.engine.sizing import size_text
from octavo.model.rope import rope_parameters

if TYPE_CHECKING:
    from rich.console import RenderableType

    from octavo.engine.plan import Plan
    from octavo.interfaces import KVGroup


def explain(plan: Plan) -> dict[str, Any]:
    """The plan as JSON types. `values` and `decisions` each carry the choice and its `why`."""
    config = plan.config
    values: dict[str, Any] = {
        "device": plan.device.name or plan.device.type,
        "threads": plan.threads.count if plan.threads else None,
        "dtype": plan.dtype,
        "kv_cache_dtype": plan.kv_dtype,
        "kv_cache_spread": "on" if plan.spread_keys else None,
        "rope": dict(rope_parameters(plan.source.config)) if "rope" in plan.why else None,
        "max_model_len": plan.limits.max_model_len,
        "max_num_seqs": plan.limits.max_num_seqs,
        "max_num_batched_tokens": plan.limits.max_num_batched_tokens,
        "block_size": plan.block_size,
        "num_blocks": plan.num_blocks,
        "dynamic_memory": "on" if plan.elastic else None,
        "swap_space": f"{plan.host_slots * plan.sizing.block_bytes / 2**30:.2f} GiB" if plan.host_slots else None,
    }
    return {
        "model": {
            "asked": config.model,
            "name": plan.source.name,
            "kind": plan.source.kind,
            "path": str(plan.source.path),
            "architecture": plan.facts.architecture,
            "weight_bytes": plan.sizing.weight_bytes,
        },
        "device": {
            "type": plan.device.type,
            "name": plan.device.name,
            "capability": list(plan.device.capability),
            "memory": plan.device.memory,
            "free_memory": plan.device.free_memory,
            "driver": plan.device.driver,
            "features": sorted(plan.device.features),
        },
        "values": {name: {"value": value, "why": plan.why[name]} for name, value in values.items() if value is not None},
        "kv_cache": {
            "num_blocks": plan.num_blocks,
            "block_bytes": plan.sizing.block_bytes,
            "bytes": plan.sizing.bytes,
            "tokens": plan.kv_cache_tokens,
            "max_concurrency": round(plan.sizing.contexts, 2),
            "hard_limit": plan.sizing.hard,
            "bytes_per_token": sum(_token_bytes(group) for group in plan.groups),
            "groups": [
                {
                    "kind": group.spec.kind,
                    "layers": list(group.layers),
                    "block_size": group.block_size,
                    "window": group.spec.window,
                    "page_bytes": group.page_bytes,
                    "bytes_per_token": _token_bytes(group),
                    "page_shape": list(layout.page_shape),
                    "order": layout.order,
                    "dtype": layout.dtype,
                }
                for group, layout in zip(plan.groups, plan.layouts, strict=True)
            ],
        },
        "decisions": {kind: decision.explain() for kind, decision in plan.decisions().items()},
        "catalog": {
            "contract_version": CONTRACT,
            "fingerprint": plan.catalog.fingerprint(),
            "enabled": sorted(plan.catalog.enabled),
            "problems": [
                {"kind": e.kind, "name": e.name, "distribution": e.origin.distribution, "state": e.state, "reason": e.reason}
                for e in plan.catalog.problems()
            ],
        },
    }


def _token_bytes(group: KVGroup) -> int:
    """What one token takes in all layers of a group (of a window, while it is inside)."""
    return group.page_bytes * len(group.layers) // group.block_size


def _group_text(group: dict[str, Any]) -> str:
    window = f" {group['window']}" if group["window"] else ""
    return (
        f"{len(group['layers'])} layers, {group['kind']}{window}: pages of {group['block_size']} tokens, "
        f"{size_text(group['bytes_per_token'])} a token, {size_text(group['page_bytes'])}, "
        f"{group['dtype']} {group['order']} = {group['page_shape']}"
    )


def render(plan: Plan) -> RenderableType:
    """The plan for a terminal (a rich renderable): one line per decision, and one per provider that lost."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    told = explain(plan)
    model, cache = told["model"], told["kv_cache"]
    lines: list[RenderableType] = [
        Text(model["name"], style="bold"),
        Text(f"{model['architecture']}, {size_text(model['weight_bytes'])} of weights as {plan.dtype}"),
        Text(model["path"], style="dim", overflow="fold"),
    ]

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for column in ("what", "is"):
        table.add_column(column, no_wrap=True)
    table.add_column("why", overflow="fold")
    for kind, decision in plan.decisions().items():
        chosen = decision.chosen if isinstance(decision, OperatorDecision) else (decision,)
        for place, one in enumerate(chosen):
            table.add_row(Text("" if place else kind), Text(one.name, style="bold"), Text(f"{one.origin}: {one.reason}"))
        for other in decision.others:
            table.add_row("", Text(f"not {other.name}", style="dim"), Text(f"{other.distribution}: {other.reason}", style="dim"))
    table.add_row()
    for name, item in told["values"].items():
        table.add_row(Text(name), Text(str(item["value"]), style="bold"), Text(item["why"]))
    lines += [Text(), table, Text()]

    lines.append(
        Text(
            f"KV cache: {cache['tokens']:,} tokens in {cache['num_blocks']:,} blocks, {size_text(cache['bytes'])}, "
            f"{size_text(cache['bytes_per_token'])} a token; "
            f"{cache['max_concurrency']:.2f} requests of {plan.limits.max_model_len:,} tokens at once"
        )
    )
    for text, count in Counter(_group_text(group) for group in cache["groups"]).items():
        lines.append(Text(f"  {count} groups of {text}" if count > 1 else f"  {text}"))
    for problem in told["catalog"]["problems"]:
        text = f"{problem['distribution']}: {problem['kind']} {problem['name']} {problem['state']}: {problem['reason']}"
        lines.append(Text(text, style="red"))
    return Group(*lines)
