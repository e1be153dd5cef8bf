"""Fuzzes every decoder, guided by coverage: ``make fuzz`` or ``python -m tests.fuzz.fuzz [--seconds 60] [--seed N]``.

atheris is in a virtual environment of its own, ``.venv-fuzz``, made here at the first call. Time and memory are
bounded; the seed is printed. What breaks a decoder is kept in ``fuzz-findings/`` with the command that shows it again.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from pathlib import Path

from tests.fuzz.decoders import DECODERS

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / ".venv-fuzz"
PYTHON = HOME / "bin" / "python"
FINDINGS = ROOT / "fuzz-findings"
ATHERIS = "atheris==3.0.0"
LONGEST_INPUT = 8192
SECONDS_PER_INPUT = 10


def main() -> None:
    """Exit code 1 where a decoder was broken, 2 where there is no atheris."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=int, default=20, help="for each decoder (20)")
    parser.add_argument("--seed", type=int, default=None, help="of the inputs (by default from the clock)")
    parser.add_argument(
        "--decoder", choices=DECODERS, action="append", help="this one alone; may be repeated"
    )
    parser.add_argument("--memory-mb", type=int, default=2048, help="most memory of a process (2048)")
    parser.add_argument(
        "--input", type=Path, default=None, help="read this one input again, for one --decoder"
    )
    arguments = parser.parse_args()
    names = arguments.decoder or list(DECODERS)
    if arguments.input is not None and len(names) != 1:
        parser.error("--input needs one --decoder")
    prepare()
    if arguments.input is not None:
        sys.exit(
            subprocess.run(guided(names[0], str(arguments.input)), cwd=ROOT, check=False).returncode != 0
        )
    seed = int(time.time()) % (1 << 31) if arguments.seed is None else arguments.seed
    print(f"seed {seed}, {len(names)} decoders, {arguments.seconds} s each", flush=True)
    broken = sum(fuzz(name, arguments.seconds, seed, arguments.memory_mb) for name in names)
    with contextlib.suppress(OSError):
        FINDINGS.rmdir()
    sys.exit(broken > 0)


def prepare() -> None:
    """An environment with atheris that finds everything else in this one; exit code 2 where there is none."""
    there = PYTHON.exists() and subprocess.run(
        [PYTHON, "-c", "import atheris"], check=False, capture_output=True
    )
    if there and there.returncode == 0:
        return
    print(f"making {HOME.name} with {ATHERIS}", flush=True)
    venv.create(HOME, with_pip=True, clear=True)
    install = [PYTHON, "-m", "pip", "install", "--quiet", "--only-binary", ":all:", ATHERIS]
    installed = subprocess.run(install, check=False, capture_output=True, text=True)
    if installed.returncode != 0:
        here = f"Python {sys.version_info.major}.{sys.version_info.minor} on {sysconfig.get_platform()}"
        print(
            f"make fuzz: {ATHERIS} could not be installed for {here}: {installed.stderr.strip().splitlines()[-1]}\n"
            "Its wheels are for Linux and some versions of Python (3.11 and 3.12 among them): make .venv with one of "
            "those (make clean, then make fuzz PYTHON=python3.12). All other tests do without it.",
            file=sys.stderr,
        )
        sys.exit(2)
    inside = subprocess.run(
        [PYTHON, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    )
    here = sysconfig.get_path("purelib")
    (Path(inside.stdout.strip()) / "tested.pth").write_text(f"import site; site.addsitedir({here!r})\n")


def guided(name: str, *options: str) -> list[str]:
    """The command that fuzzes one decoder."""
    return [str(PYTHON), "-m", "tests.fuzz.guided", name, *options]


def fuzz(name: str, seconds: int, seed: int, memory_mb: int) -> bool:
    """Fuzz one decoder and say what was seen; whether it was broken."""
    place = FINDINGS / name.replace(" ", "-")
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="eplb-fuzz-corpus-") as corpus:
        for number, data in enumerate(DECODERS[name].seeds()):
            (Path(corpus) / f"seed-{number}").write_bytes(data)
        options = (
            f"-max_total_time={seconds}",
            f"-seed={seed}",
            f"-rss_limit_mb={memory_mb}",
            f"-max_len={LONGEST_INPUT}",
            f"-timeout={SECONDS_PER_INPUT}",
            f"-artifact_prefix={place}/",
            "-print_final_stats=1",
        )
        done = subprocess.run(
            guided(name, *options, corpus),
            cwd=ROOT,
            check=False,
            capture_output=True,
            text=True,
            errors="replace",
        )
    reported = done.stderr + done.stdout
    found = {what: int(value) for what, value in re.findall(r"stat::(\w+):\s+(\d+)", reported)}
    reached = [int(points) for points in re.findall(r"cov: (\d+)", reported)]
    print(
        f"{name:<18} {found.get('number_of_executed_units', 0):>9,} inputs, "
        f"{max(reached, default=0):>5,} places reached, {found.get('peak_rss_mb', 0):>5,} MB at most"
        f"{'' if done.returncode == 0 else ', BROKEN'}",
        flush=True,
    )
    if done.returncode == 0:
        place.rmdir()
        return False
    print("\n".join(reported.splitlines()[-40:]))
    for kept in sorted(place.iterdir()):
        print(f'again: make fuzz ARGS=\'--decoder "{name}" --input "{kept.relative_to(ROOT)}"\'')
    return True


if __name__ == "__main__":
    main()
