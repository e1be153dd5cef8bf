"""Write ``docs/research/models.md``, the MoE models that each engine release can balance.

Run it with ``python -m tools.model_families``. The list is read from the engines' sources, and the engines are not run.
Architectures come from the engine's model registry. A model can be balanced if its class or a base class has the
interface that the engine's own EPLB requires.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tools.engine_sources import VERSIONS, source_of

PAGE = Path(__file__).parent.parent / "docs" / "research" / "models.md"
_USES_MOE = re.compile(r"\b\w*FusedMoE\w*\b|\bget_moe_impl_class\b|\bimport\b[^\n]*Mo[Ee]\w*Block")
_CLASS = re.compile(r"^(class (\w+)(?:\(([^)]*)\))?:(?:\n|.)*?)(?=^\S|\Z)", re.MULTILINE)
_ENTRY_CLASS = re.compile(r"^EntryClass\s*=\s*([^=]*?)(?=^\w|\Z)", re.MULTILINE)
_SGLANG_ASKS_FOR = "routed_experts_weights_of_layer"
_HEAD = """# Models that can be balanced

The agent can balance the models that the engine's own EPLB supports. This list is generated from the engines' sources
(`python -m tools.model_families`). It names architectures as the checkpoint's `config.json` does, and does not imply
that a model was run. A model that processes images or sound can be balanced if its language model can. vLLM-Ascend
balances every model whose MoE layers are vLLM's `FusedMoE`. If a model is not in vLLM's list, vLLM keeps serving
without EPLB and logs a warning with the class; SGLang exits and states the reason. An empty field means that the engine
does not have the model, and `no` means that the engine's EPLB does not support it.

| architecture | vLLM | SGLang |
|---|---|---|
"""


def main() -> None:
    """Write the page."""
    PAGE.write_text(page())


def page() -> str:
    """Return the page's text: a row per architecture that an engine's EPLB knows, then the other MoE models."""
    vllm = {version: dict(vllm_models(source_of("vllm", version))) for version in VERSIONS["vllm"]}
    version = VERSIONS["sglang"][-1]
    sglang = dict(sglang_models(source_of("sglang", version)))
    vllm_names = {name for models in vllm.values() for name in models}
    all_names = vllm_names | {name for name, balanced in sglang.items() if balanced}
    # Some names differ only in case, so the name itself is the second key.
    names = sorted(all_names, key=lambda name: (name.lower(), name))
    cells = {name: (_releases(name, vllm), _release(name, version, sglang)) for name in names}
    unknown = [name for name in names if not any(cell.strip("no") for cell in cells[name])]
    rows = [f"| {name} | {' | '.join(cells[name])} |\n" for name in names if name not in unknown]
    return f"{_HEAD}{''.join(rows)}\nNot supported by any engine's EPLB: {', '.join(unknown)}.\n"


def vllm_models(folder: Path) -> Iterator[tuple[str, bool]]:
    """Yield each architecture with MoE layers in vLLM's registry, and True if vLLM's EPLB supports it."""
    models = folder / "vllm" / "model_executor" / "models"
    classes = _Classes([models, folder / "vllm" / "models"])
    for node in ast.walk(ast.parse((models / "registry.py").read_text())):
        if not isinstance(node, ast.AnnAssign | ast.Assign) or not isinstance(node.value, ast.Dict):
            continue
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        if ast.unparse(target) != "_TEXT_GENERATION_MODELS":
            continue
        for key, value in zip(node.value.keys, node.value.values, strict=True):
            architecture, (_, name) = ast.literal_eval(key), ast.literal_eval(value)
            balanced = "MixtureOfExperts" in classes.lineage(name)
            if balanced or classes.uses_moe(name):
                yield architecture, balanced


def sglang_models(folder: Path) -> Iterator[tuple[str, bool]]:
    """Yield each architecture with MoE layers among SGLang's models, and True if SGLang's EPLB supports it."""
    classes = _Classes([folder / "sglang" / "srt" / "models"])
    for text in classes.texts.values():
        for name in re.findall(r"\w+", " ".join(_ENTRY_CLASS.findall(text))):
            balanced = classes.has(name, _SGLANG_ASKS_FOR)
            is_auxiliary = name.startswith("Transformers") or name.endswith(
                ("NextN", "MTP", "Eagle", "Eagle3")
            )
            if not is_auxiliary and (balanced or classes.uses_moe(name)):
                yield name, balanced


class _Classes:
    """Index of the classes in an engine's model files, by name."""

    def __init__(self, folders: list[Path]) -> None:
        paths = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
        self.texts = {path: path.read_text(encoding="utf-8") for path in paths}
        self._bases: dict[str, set[str]] = {}
        self._bodies: dict[str, str] = {}
        self._moe: set[str] = set()
        for text in self.texts.values():
            uses_moe = bool(_USES_MOE.search(text))
            for body, name, bases in _CLASS.findall(text):
                # Files for different devices may define classes with the same name, so merge their bases and bodies.
                self._bases[name] = self._bases.get(name, set()) | set(re.findall(r"\w+", bases))
                self._bodies[name] = self._bodies.get(name, "") + body
                self._moe |= {name} if uses_moe else set()

    def lineage(self, name: str) -> set[str]:
        """Return the names of a class and of all its base classes."""
        pending = {name}
        visited: set[str] = set()
        while pending:
            current = pending.pop()
            visited.add(current)
            pending |= self._bases.get(current, set()) - visited
        return visited

    def has(self, name: str, attribute: str) -> bool:
        """Return True if a class or one of its base classes mentions ``attribute``."""
        return any(attribute in self._bodies.get(ancestor, "") for ancestor in self.lineage(name))

    def uses_moe(self, name: str) -> bool:
        """Return True if the file of a class or of one of its base classes uses MoE layers."""
        return bool(self.lineage(name) & self._moe)


def _releases(name: str, engine: dict[str, dict[str, bool]]) -> str:
    """Return the releases in which a model can be balanced, as a range."""
    versions = [version for version, models in engine.items() if name in models]
    balanced = [version.removesuffix(".0") for version in versions if engine[version][name]]
    if not balanced:
        return "no" if versions else ""
    return balanced[0] if len(balanced) == 1 else f"{balanced[0]}-{balanced[-1]}"


def _release(name: str, version: str, models: dict[str, bool]) -> str:
    if name not in models:
        return ""
    return version if models[name] else "no"


if __name__ == "__main__":
    main()
