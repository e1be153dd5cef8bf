"""All commands: where each is, and what the list of commands says of it; nothing of a command is imported for that."""

from __future__ import annotations

from typing import NamedTuple


class CommandEntry(NamedTuple):
    """Where a command is; its function, or its group of commands, has the command's name.

    Parameters
    ----------
    module
        In ``eplb_service.cli``.
    panel
        Heading that the list of commands has it under.
    summary
        One sentence for that list.
    examples
        Lines of the shell that its help ends with, and of a group's those of a command that of the command.
    """

    module: str
    panel: str
    summary: str
    examples: tuple[str, ...] = ()


_OFFLINE = "On recorded heat"
_SERVICE = "The service"
_OPERATE = "Ask a running service"

COMMANDS = {
    "demo": CommandEntry(
        "demo.command",
        _SERVICE,
        "Run service and live ranks here and watch them balance.",
        (
            "eplb demo",
            "eplb demo --ranks 8 --redundant 16 --json summary.json",
            "eplb demo --trace heat.zarr",
            "eplb demo --address 127.0.0.1:50551 --steps 20000",
        ),
    ),
    "serve": CommandEntry(
        "serve",
        _SERVICE,
        "Run the control plane that agents connect to.",
        ("eplb serve", "eplb serve --listen 0.0.0.0:50551 --config eplb.yaml"),
    ),
    "solve": CommandEntry(
        "offline.solve",
        _OFFLINE,
        "Compute a placement from recorded heat.",
        (
            "eplb solve --heat heat.zarr --ranks 8 --redundant 16",
            "eplb solve --heat heat.zarr --ranks 8 --redundant 16 --out placement.npz",
            "eplb solve --heat heat.npz --ranks 8 --slots 9 --out map.json --format sglang",
        ),
    ),
    "replay": CommandEntry(
        "offline.replay",
        _OFFLINE,
        "Run the planner along a trace and score each policy.",
        (
            "eplb replay --heat heat.zarr --ranks 8 --redundant 0,8,16 --step-ms 30",
            "eplb replay --heat heat.zarr --ranks 8 --policy all --report report.html",
        ),
    ),
    "sweep": CommandEntry(
        "offline.sweep",
        _OFFLINE,
        "Replay many traces under many settings, in one table.",
        (
            "eplb sweep mon.zarr tue.zarr --ranks 8 --redundant 8,16 --interval 128,256",
            "eplb sweep *.zarr --ranks 8 --set par_threshold=1.02,1.1 --ray local",
        ),
    ),
    "advise": CommandEntry(
        "offline.advise",
        _OFFLINE,
        "Advise what to set, and whether balancing pays.",
        ("eplb advise --heat heat.zarr --ranks 8 --step-ms 30 --bytes-per-expert 4000000",),
    ),
    "bench": CommandEntry(
        "offline.bench",
        _OFFLINE,
        "Compare with vLLM's, vLLM-Ascend's and SGLang's balancers.",
        (
            "eplb bench --heat heat.zarr --ranks 8",
            "eplb bench --heat heat.zarr --ranks 8 --redundant 16 --peers vllm --json",
        ),
    ),
    "calibrate": CommandEntry(
        "offline.calibrate",
        _OFFLINE,
        "Fit how long a rank's experts take for their tokens.",
        (
            "eplb calibrate --hidden 2048 --inter 1024 --out curve.json",
            "eplb calibrate --table h200_moe_perf.parquet --phase decode --out h200.json",
        ),
    ),
    "trace": CommandEntry(
        "trace.commands",
        _OFFLINE,
        "Look at heat traces, record, convert, or cut them.",
        (
            "eplb trace info heat.zarr",
            "eplb trace stats heat.zarr --ranks 8",
            "eplb trace record my-deployment --out heat.zarr --steps 2000",
            "eplb trace convert dump.pt --out heat.zarr",
            "eplb trace slice heat.zarr --steps 1000:3000 --layers 0:8 --out part.zarr",
            "eplb trace synth --kind bursty --layers 4 --experts 32 --out made-up.zarr",
        ),
    ),
    "schema": CommandEntry(
        "schema",
        _OFFLINE,
        "Print the JSON schema of what a command prints with --json.",
        ("eplb schema", "eplb schema status"),
    ),
    "warmup": CommandEntry(
        "offline.warmup",
        _OFFLINE,
        "Compile the solver once, so that later starts need not.",
        ("eplb warmup",),
    ),
    "deployments": CommandEntry(
        "operator.commands", _OPERATE, "List the deployments.", ("eplb deployments --address balancer:50551",)
    ),
    "status": CommandEntry(
        "operator.commands",
        _OPERATE,
        "Show one deployment: balance, agents, last decision.",
        ("eplb status my-deployment", "eplb status my-deployment --json"),
    ),
    "top": CommandEntry(
        "operator.top",
        _OPERATE,
        "Watch a service live: balance, ranks, layers, switches.",
        ("eplb top", "eplb top my-deployment --once"),
    ),
    "history": CommandEntry(
        "operator.history",
        _OPERATE,
        "Show past plans: what they promised and what became of them.",
        ("eplb history my-deployment", "eplb history my-deployment --plan 7"),
    ),
    "placement": CommandEntry(
        "operator.commands",
        _OPERATE,
        "Show or save the placement in force.",
        ("eplb placement my-deployment --out map.json --format sglang --first-layer 3",),
    ),
    "pause": CommandEntry(
        "operator.commands", _OPERATE, "Stop planning for a deployment.", ("eplb pause my-deployment",)
    ),
    "resume": CommandEntry(
        "operator.commands", _OPERATE, "Plan for a paused deployment again.", ("eplb resume my-deployment",)
    ),
    "rebalance": CommandEntry(
        "operator.commands",
        _OPERATE,
        "Decide now instead of at the next interval.",
        ("eplb rebalance my-deployment",),
    ),
    "lead": CommandEntry(
        "operator.commands",
        _OPERATE,
        "Have a deployment's ranks follow this service again.",
        ("eplb lead my-deployment",),
    ),
    "forget": CommandEntry(
        "operator.commands",
        _OPERATE,
        "Remove a deployment whose ranks are gone.",
        ("eplb forget my-deployment",),
    ),
}
