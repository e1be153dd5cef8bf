"""Check the tests' extract of torch_npu against the real wheel, or write it again with ``--refresh``.

The wheel is downloaded but never imported, because torch_npu needs Ascend's libraries. The extract contains:

- the schemas of the operators that ``eplb_lab.layer`` uses, from the wheel's YAML files;
- dtype and shape of each result for the calls in ``tests/moe/torch_npu/calls.py``, from the wheel's own shape functions
  on the ``meta`` device;
- the torch operators that the agent launches (``tests/moe/torch_npu/native.py``) and the wheel declares.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import types
import zipfile
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.moe.torch_npu.calls import OPERATORS, results  # noqa: E402
from tests.moe.torch_npu.native import NATIVE  # noqa: E402

VERSION = "2.14.0"
EXTRACT = ROOT / "tests" / "moe" / "torch_npu"
YAML_FILES = [
    f"torch_npu/csrc/aten/{name}.yaml" for name in ("npu_native_functions", "npu_native_functions_by_codegen")
]
META_FILE = "torch_npu/op_plugin/meta/_meta_registrations.py"


def main() -> None:
    """Check or refresh the extract. Exit with 1 if a check finds a difference."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--refresh", action="store_true", help="write the extract instead of checking it")
    parser.add_argument("--wheel", type=Path, help="use this wheel instead of downloading one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        wheel = options.wheel or download(Path(folder))
        with zipfile.ZipFile(wheel) as archive:
            for name in (*YAML_FILES, META_FILE):
                archive.extract(name, folder)
        schemas = all_schemas(Path(folder))
        files = {
            f"{VERSION}.schemas": schema_file(schemas),
            f"{VERSION}.results.json": results_file(schemas, Path(folder) / META_FILE),
            f"{VERSION}.native": native_file(Path(folder)),
        }
    differing = [
        name
        for name, text in files.items()
        if not ((EXTRACT / name).exists() and (EXTRACT / name).read_text() == text)
    ]
    if options.refresh:
        for name, text in files.items():
            (EXTRACT / name).write_text(text)
    print(
        f"{len(OPERATORS)} operators of {wheel.name}; {'wrote' if options.refresh else 'differing'}: {differing}"
    )
    sys.exit(1 if differing and not options.refresh else 0)


def download(folder: Path) -> Path:
    """Download the wheel for this Python and return its path."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", f"torch_npu=={VERSION}"]
    subprocess.run([*command, "--dest", str(folder)], check=True)
    return next(folder.glob("*.whl"))


def all_schemas(folder: Path) -> dict[str, str]:
    """Return the schema of every operator that the wheel declares, by name including the overload."""
    text = "\n".join((folder / name).read_text() for name in YAML_FILES)
    declared = re.findall(r"^\s*-?\s*func: ((\w+)(?:\.\w+)?\(.*)$", text, flags=re.MULTILINE)
    return {schema.partition("(")[0]: schema.strip() for schema, _ in declared}


def schema_file(schemas: dict[str, str]) -> str:
    """Return the text of the file with the schemas of the operators in use, one per line."""
    header = [
        f"# Operator schemas as the wheel of torch_npu {VERSION} declares them in npu_native_functions*.yaml:",
        "# of the operators that eplb_lab.layer uses, word for word. Made by tools/torch_npu_contract.py --refresh.",
    ]
    return "\n".join([*header, *(schemas[name] for name in OPERATORS)]) + "\n"


def native_file(folder: Path) -> str:
    """Return the torch operators in use that the wheel declares for NPUs, one per line."""
    text = "\n".join((folder / name).read_text() for name in YAML_FILES)
    declared = set(re.findall(r"^\s*-\s*(?:func:\s*)?([\w.]+)\s*(?:\(.*)?$", text, flags=re.MULTILINE))
    header = [
        f"# Of torch's operators in tests/moe/torch_npu/native.py, those that torch_npu {VERSION} declares for NPUs.",
        "# Made by tools/torch_npu_contract.py --refresh.",
    ]
    return "\n".join([*header, *(name for name in NATIVE if name in declared)]) + "\n"


def results_file(schemas: dict[str, str], meta: Path) -> str:
    """Return the text of the file with the results of the wheel's shape functions for each call."""
    library = torch.library.Library("npu", "DEF")
    for schema in schemas.values():
        # A few lines are only names. If one of our operators were among them, the calls below would fail.
        with contextlib.suppress(RuntimeError):
            library.define(schema)
    load_shape_functions(meta)
    returned = results("meta", lambda name: getattr(torch.ops.npu, name))
    lines = [f"  {json.dumps(title)}: {json.dumps(tensors)}" for title, tensors in sorted(returned.items())]
    about = (
        f"What the shape functions in the wheel of torch_npu {VERSION} return for tests/moe/torch_npu/calls.py: "
        "dtype and shape of each tensor. Made by tools/torch_npu_contract.py --refresh."
    )
    return "{\n" + ",\n".join([f'  "about": {json.dumps(about)}', *lines]) + "\n}\n"


def load_shape_functions(meta: Path) -> None:
    """Run the wheel's registrations against stubs of the torch_npu modules that they import."""
    stub: Any = types.ModuleType("torch_npu")
    codes: Any = types.ModuleType("torch_npu.utils._error_code")
    codes.ErrCode = types.SimpleNamespace(VALUE=0, TYPE=0, PARAM=0, NOT_SUPPORT=0)
    codes.ops_error = lambda _: ""
    versions: Any = types.ModuleType("torch_npu.npu.utils")
    versions.get_cann_version = lambda *_: "8.5.0"
    chips: Any = types.ModuleType("torch_npu.npu._backends")
    chips.get_soc_version = lambda: 220
    names = {
        "int4": 285,
        "hifloat8": 290,
        "float8_e8m0fnu": 293,
        "float4_e2m1fn_x2": 296,
        "float4_e1m2fn_x2": 297,
    }
    vars(stub).update(names)
    parents = [types.ModuleType(name) for name in ("torch_npu.utils", "torch_npu.npu")]
    modules = [stub, codes, versions, chips, *parents]
    sys.modules.update({module.__name__: module for module in modules})
    spec = importlib.util.spec_from_file_location("torch_npu_meta_registrations", meta)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


if __name__ == "__main__":
    main()
