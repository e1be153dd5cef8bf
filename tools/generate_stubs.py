"""Generate Python stubs from ``proto/eplb/v1``. The build runs this script; run it by hand after editing a ``.proto``.

``pyproject.toml`` pins an old compiler on purpose. Stubs from protoc 28 run on every protobuf runtime since 5.29, while
stubs from a newer compiler reject older runtimes.
"""

from __future__ import annotations

import pathlib
import re
import tempfile

TARGET = pathlib.Path("eplb_core/wire/generated")
# protoc writes absolute imports from the proto package; our stubs are in TARGET.
_IMPORT = re.compile(r"^from eplb\.v1 import ", flags=re.MULTILINE)


def generate(root: pathlib.Path) -> list[pathlib.Path]:
    """Write ``*_pb2.py``, ``*_pb2.pyi`` and ``*_pb2_grpc.py`` below ``root`` and return their paths.

    Raises ``RuntimeError`` if the compiler rejects a file.
    """
    import grpc_tools
    from grpc_tools import protoc

    sources = sorted((root / "proto").rglob("*.proto"))
    if not sources:
        raise RuntimeError(f"no .proto files below {root / 'proto'}")
    well_known = pathlib.Path(grpc_tools.__file__).parent / "_proto"
    written = []
    with tempfile.TemporaryDirectory() as scratch:
        arguments = ["protoc", f"-I{root / 'proto'}", f"-I{well_known}"]
        arguments += [f"--{kind}_out={scratch}" for kind in ("python", "pyi", "grpc_python")]
        if protoc.main([*arguments, *map(str, sources)]) != 0:
            raise RuntimeError("protoc rejected a .proto file; see its message above")
        for generated in sorted(pathlib.Path(scratch).rglob("*.py*")):
            text = _IMPORT.sub("from eplb_core.wire.generated import ", generated.read_text())
            path = root / TARGET / generated.name
            if not path.exists() or path.read_text() != text:
                path.write_text(text)
            written.append(path)
    return written


if __name__ == "__main__":
    for path in generate(pathlib.Path(__file__).parent.parent.resolve()):
        print(path)
