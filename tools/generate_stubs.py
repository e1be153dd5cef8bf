"""Generate Python stubs from ``proto/eplb/v1`` (used by the build; run by hand after editing a .proto).

The compiler is pinned old on purpose (see ``pyproject.toml``): stubs made by protoc 28 run on every
protobuf runtime from 5.29 up, stubs made by a newer one refuse older runtimes.
"""

from __future__ import annotations

import pathlib
import re
import tempfile

TARGET = pathlib.Path("eplb_core/wire/generated")
# protoc writes absolute imports of its own package tree; ours live under TARGET.
_IMPORT = re.compile(r"^from eplb\.v1 import ", flags=re.MULTILINE)


def generate(root: pathlib.Path) -> list[pathlib.Path]:
    """Write ``*_pb2.py``, ``*_pb2.pyi`` and ``*_pb2_grpc.py`` below ``root``; returns the files written.

    Raises ``RuntimeError`` where the compiler rejects a file.
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
            raise RuntimeError("protoc rejected the wire contract; its message is above")
        for made in sorted(pathlib.Path(scratch).rglob("*.py*")):
            text = _IMPORT.sub("from eplb_core.wire.generated import ", made.read_text())
            path = root / TARGET / made.name
            if not path.exists() or path.read_text() != text:
                path.write_text(text)
            written.append(path)
    return written


if __name__ == "__main__":
    for path in generate(pathlib.Path(__file__).parent.parent.resolve()):
        print(path)
