"""A directory as the root of a stage: this machine's system read-only, and of its own what an image would write to."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_SHARED = ("usr", "opt", "bin", "sbin", "lib", "lib64")
"""Of this machine's root; where they are links, so they are in the new one."""
_OWN = ("etc", "src", "wheels", "tmp", "var/lib", "var/cache", "home", "proc", "dev", "root")
_PYTHON = "/python"
"""An environment of this interpreter, in the place of the base image's own."""
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")


class StepError(RuntimeError):
    """A step failed; the message is what it printed last."""


@dataclass
class Root:
    """One stage's root.

    Parameters
    ----------
    folder
        Where it is; empty at first. Mounts last as long as the mount namespace of this process.
    environment, user, folder_inside
        Of what runs in it next.
    """

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)
    user: str = "0"
    folder_inside: str = "/"

    def make(self) -> None:
        """Mount what it shares, copy ``/etc``, and make an environment of this Python."""
        for name in _OWN:
            (self.folder / name).mkdir(parents=True)
        for name in _SHARED:
            source = Path("/", name)
            if source.is_symlink():
                (self.folder / name).symlink_to(source.readlink())
            elif source.is_dir():
                self.bind(source, f"/{name}")
        self._bind_python()
        shutil.rmtree(self.folder / "etc")
        shutil.copytree("/etc", self.folder / "etc", symlinks=True, ignore_dangling_symlinks=True)
        settings = Path.home() / ".config/pip"
        if settings.is_dir():
            shutil.copytree(settings, self.folder / "root/.config/pip")
        (self.folder / "tmp").chmod(0o1777)
        _mount("--rbind", "/proc", self.folder / "proc")
        (self.folder / "dev/shm").mkdir(mode=0o1777)
        for name in _DEVICES:
            (self.folder / "dev" / name).touch()
            _mount("--bind", Path("/dev", name), self.folder / "dev" / name)
        self.environment["PATH"] = (
            f"{_PYTHON}/bin:/usr/local/bin:/usr/local/sbin:/usr/bin:/usr/sbin:/bin:/sbin"
        )
        self.run([str(Path(sys.base_prefix, "bin/python3")), "-m", "venv", _PYTHON])

    def _bind_python(self) -> None:
        """Let ``/usr/local`` be its own, and this interpreter be where it is outside."""
        local, base = self.folder.with_name(f"{self.folder.name}-local"), Path(sys.base_prefix)
        if base == Path("/usr/local"):
            shutil.copytree(base, local, symlinks=True)
        else:
            (local / "bin").mkdir(parents=True)
        self.bind(local, "/usr/local", writable=True)
        if base not in (Path("/usr"), Path("/usr/local")):
            self.bind(base, str(base))

    def bind(self, source: Path, target: str, *, writable: bool = False) -> None:
        """Let ``target`` inside be ``source`` outside."""
        inside = self.folder / target.lstrip("/")
        inside.mkdir(parents=True, exist_ok=True)
        _mount("--bind", source, inside)
        if not writable:
            _mount("--options", "remount,bind,ro", inside)

    def unbind(self, target: str) -> None:
        """End what ``bind`` began."""
        _run("umount", self.folder / target.lstrip("/"))

    def command(self, command: Sequence[str]) -> list[str]:
        """What runs ``command`` inside, as its user, with that user's group and home, and in its folder."""
        rows = [line.split(":") for line in (self.folder / "etc/passwd").read_text().splitlines()]
        group, home = next(((row[3], row[5]) for row in rows if row[2] == self.user), ("0", "/"))
        enter = ["chroot", f"--userspec={self.user}:{group}", "--groups=", str(self.folder), "/usr/bin/env"]
        return [*enter, f"--chdir={self.folder_inside}", f"HOME={home}", *command]

    def run(self, command: Sequence[str], extra: Mapping[str, str] | None = None) -> str:
        """Run ``command`` inside and return what they print; raises ``StepError`` where they fail."""
        done = subprocess.run(
            self.command(command),
            env={**self.environment, **(extra or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            last = "\n".join(done.stdout.splitlines()[-15:])
            raise StepError(f"exit status {done.returncode}\n{last}")
        return done.stdout


def _mount(*command: str | Path) -> None:
    _run("mount", *command)


def _run(*command: str | Path) -> None:
    subprocess.run(command, check=True)
