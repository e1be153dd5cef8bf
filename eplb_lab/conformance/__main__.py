"""Command line: ``python -m eplb_lab.conformance vllm --model PATH``."""

from __future__ import annotations

import argparse
import importlib
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from eplb_lab.conformance.comparison import Tolerance
from eplb_lab.conformance.engine import EngineError, Start
from eplb_lab.conformance.process import ENTRY_POINTS, Options, starter, write_tiny_model
from eplb_lab.conformance.report import HEADER, as_json, conclusion, row
from eplb_lab.conformance.run import run
from eplb_lab.conformance.scenarios import SCENARIOS, Load, Scenario

_DESCRIPTION = """
Make an engine's EPLB move experts, and check that the engine's answers do not change. Deliberate faults, such as a
weight that is left behind, must be detected. Exits with 1 if answers differ, if a fault is not detected or if no
experts moved, and with 2 if an option is invalid.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the kit and print its report. Return the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        scenarios = _scenarios(options.scenarios)
        with ExitStack() as stack:
            # The engines' logs and orders are kept if the user passes --folder.
            kept = options.folder or stack.enter_context(
                tempfile.TemporaryDirectory(prefix="eplb-conformance-")
            )
            folder = Path(kept).resolve()
            folder.mkdir(parents=True, exist_ok=True)
            if any(folder.iterdir()):
                raise ValueError(f"--folder {folder} is not empty; choose another folder")
            start, vocabulary = _engine(options, folder)
            load = Load(vocabulary, options.requests, options.tokens, options.moves, options.seed)
            print(HEADER, flush=True)
            report = run(
                options.engine,
                start,
                load,
                Tolerance(options.rounding, options.ties, max(options.largest_tie, options.rounding)),
                scenarios,
                lambda outcome: print(row(outcome), flush=True),
            )
    except (EngineError, ValueError, OSError) as error:
        print(f"conformance: {error}", file=sys.stderr)
        return 2
    print(conclusion(report))
    if options.json:
        options.json.write_text(json.dumps(as_json(report), indent=2) + "\n")
    return 0 if report.passed else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m eplb_lab.conformance", description=_DESCRIPTION)
    add = parser.add_argument
    add(
        "engine",
        metavar="ENGINE",
        help="vllm, sglang, or MODULE:FUNCTION, which starts an engine (see engine.py)",
    )
    add("--python", default=sys.executable, help="interpreter of the engine's environment")
    add("--model", help="path of an MoE model; default: a small random Qwen3-MoE, written with transformers")
    add("--ranks", type=_positive, default=2, help="tensor- and expert-parallel ranks (2)")
    add("--redundant", type=int, help="redundant slots; default: at least two per rank")
    add("--scenarios", default="all", help=f"{','.join(scenario.name for scenario in SCENARIOS)}, or all")
    add("--quantisation", default="fp8", help="the engine's name for the expert quantisation (fp8)")
    add(
        "--engine-options",
        type=_object,
        default={},
        metavar="JSON",
        help="additional arguments for LLM or Engine",
    )
    add("--plugin-path", type=Path, action="append", default=[], metavar="DIR", help="add DIR to PYTHONPATH")
    add("--requests", type=_positive, default=8, help="concurrent requests (8)")
    add("--tokens", type=_positive, default=32, help="tokens per answer (32)")
    add("--moves", type=_positive, default=16, help="maximum placements per scenario (16)")
    add("--interval", type=_positive, default=8, help="engine steps between rearrangements (8)")
    add(
        "--rounding",
        type=float,
        default=1e-4,
        help="maximum difference in log-probability of an equal token (1e-4, for float32)",
    )
    add("--ties", type=float, default=1e-3, help="maximum share of tokens that differ by more (0.001)")
    add("--largest-tie", type=float, default=0.02, help="maximum difference for these tokens (0.02)")
    add("--seed", type=int, default=0, help="seed for prompts and random placements (0)")
    add("--json", type=Path, metavar="FILE", help="write the report as JSON")
    add("--folder", type=Path, help="keep the engines' logs and orders in this new folder")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


def _object(text: str) -> dict[str, object]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text} is not a JSON object")
    return value


def _scenarios(names: str) -> list[Scenario]:
    by_name = {scenario.name: scenario for scenario in SCENARIOS}
    selected = (
        list(by_name) if names == "all" else [name.strip() for name in names.split(",") if name.strip()]
    )
    if unknown := [name for name in selected if name not in by_name]:
        raise ValueError(
            f"--scenarios contains unknown names ({', '.join(unknown)}); choose from {', '.join(by_name)}"
        )
    return [by_name[name] for name in selected]


def _engine(options: argparse.Namespace, folder: Path) -> tuple[Start, int]:
    """Return a function that starts the engine, and the size of its vocabulary."""
    if ":" in options.engine:
        module, _, function = options.engine.partition(":")
        try:
            start: Start = getattr(importlib.import_module(module), function)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"ENGINE {options.engine}: {error}") from error
        return start, _sizes(options.model)[0] if options.model else 256
    if options.engine not in ENTRY_POINTS:
        raise ValueError(f"ENGINE {options.engine} is unknown; use vllm, sglang or MODULE:FUNCTION")
    python = shutil.which(options.python)
    if python is None:
        raise ValueError(f"--python {options.python} is not an executable; pass the engine's interpreter")
    process = Options(
        options.engine,
        # Do not resolve links: a virtual environment's interpreter is a link, and its location selects the environment.
        Path(python).absolute(),
        "",
        options.ranks,
        0,
        options.requests,
        options.quantisation,
        options.interval,
        options.engine_options,
        [path.resolve() for path in options.plugin_path],
    )
    model = str(Path(options.model).absolute() if options.model else write_tiny_model(process, folder))
    vocabulary, experts = _sizes(model)
    redundant = options.redundant
    if redundant is None:
        redundant = 2 * options.ranks + -experts % options.ranks
    if redundant < 0 or (experts + redundant) % options.ranks:
        raise ValueError(
            f"--redundant {redundant}: {experts} experts plus the redundant slots must be a multiple of "
            f"--ranks {options.ranks}"
        )
    settings = vars(process) | {"model": model, "redundant": redundant}
    return starter(Options(**settings), folder), vocabulary


def _sizes(model: str) -> tuple[int, int]:
    """Return the vocabulary size and the number of experts from a model's configuration."""
    path = Path(model) / "config.json"
    if not path.is_file():
        raise ValueError(f"--model {model} has no config.json; pass the folder of a downloaded model")
    config = json.loads(path.read_text())
    config |= config.get("text_config") or {}
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    experts = next((int(config[name]) for name in names if config.get(name)), None)
    if experts is None or "vocab_size" not in config:
        raise ValueError(
            f"{path} does not specify both a number of experts and vocab_size; pass an MoE model"
        )
    return int(config["vocab_size"]), experts


if __name__ == "__main__":
    sys.exit(main())
