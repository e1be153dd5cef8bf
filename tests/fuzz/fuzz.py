"""Coverage-guided fuzzing of every decoder: ``make fuzz`` or ``python -m tests.fuzz.fuzz [--seconds 60] [--seed N]``.

atheris is installed in a separate virtual environment, ``.venv-fuzz``, which the first run creates. Time and memory are
bounded, and the seed is printed. An input that breaks a decoder is stored in ``fuzz-findings/``, and the command that
reproduces the failure is printed.
"""

from __future__ import annotations

import argparse
import contextlib
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
MOST_MEGABYTES = 2048


def main() -> None:
    """Fuzz the decoders. Exit with code 1 if an input broke a decoder, and 2 if atheris is not available."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--seconds", type=int, default=20, help="time to fuzz each decoder, in seconds (default: 20)"
    )
    parser.add_argument("--seed", type=int, help="seed of the inputs (default: taken from the clock)")
    parser.add_argument(
        "--decoder", choices=DECODERS, action="append", help="fuzz only this decoder; may be repeated"
    )
    parser.add_argument("--input", type=Path, help="run only this input; requires exactly one --decoder")
    arguments = parser.parse_args()
    names = arguments.decoder or list(DECODERS)
    if arguments.input is not None and len(names) != 1:
        parser.error("--input requires exactly one --decoder")
    prepare()
    if arguments.input is not None:
        sys.exit(run(names[0], str(arguments.input)) != 0)
    seed = int(time.time()) % (1 << 31) if arguments.seed is None else arguments.seed
    print(f"seed {seed}, {len(names)} decoders, {arguments.seconds} s each", flush=True)
    broken = sum(fuzz(name, arguments.seconds, seed) for name in names)
    with contextlib.suppress(OSError):
        FINDINGS.rmdir()
    sys.exit(broken > 0)


def prepare() -> None:
    """Create an environment with atheris that can also import this environment's packages.

    Exit with code 2 if that fails.
    """
    if PYTHON.exists() and not subprocess.run([PYTHON, "-c", "import atheris"], check=False).returncode:
        return
    print(f"creating {HOME.name} with {ATHERIS}", flush=True)
    venv.create(HOME, with_pip=True, clear=True)
    install = [PYTHON, "-m", "pip", "install", "--quiet", "--only-binary", ":all:", ATHERIS]
    if subprocess.run(install, check=False).returncode:
        needs = "Linux and Python 3.11 or 3.12; run `make clean`, then `make fuzz PYTHON=python3.12`"
        print(f"make fuzz: cannot install {ATHERIS}; its wheels require {needs}", file=sys.stderr)
        sys.exit(2)
    (packages,) = HOME.glob("lib/python*/site-packages")
    (packages / "tested.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")


def run(name: str, *options: str) -> int:
    """Run one decoder under atheris and return its exit code."""
    command = [str(PYTHON), "-m", "tests.fuzz.guided", name, *options]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def fuzz(name: str, seconds: int, seed: int) -> bool:
    """Fuzz one decoder and return True if an input broke it. Print the command that reproduces the failure."""
    place = FINDINGS / name.replace(" ", "-")
    place.mkdir(parents=True, exist_ok=True)
    print(f"{name}:", flush=True)
    with tempfile.TemporaryDirectory(prefix="eplb-fuzz-corpus-") as corpus:
        for number, data in enumerate(DECODERS[name].seeds()):
            (Path(corpus) / f"seed-{number}").write_bytes(data)
        broken = run(
            name,
            f"-max_total_time={seconds}",
            f"-seed={seed}",
            f"-rss_limit_mb={MOST_MEGABYTES}",
            f"-max_len={LONGEST_INPUT}",
            f"-timeout={SECONDS_PER_INPUT}",
            f"-artifact_prefix={place}/",
            "-verbosity=0",
            "-print_final_stats=1",
            corpus,
        )
    if not broken:
        place.rmdir()
    for kept in sorted(place.glob("*")):
        print(f'to reproduce: make fuzz ARGS=\'--decoder "{name}" --input "{kept.relative_to(ROOT)}"\'')
    return bool(broken)


if __name__ == "__main__":
    main()
