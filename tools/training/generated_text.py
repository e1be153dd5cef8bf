"""Generators of text that this project makes itself: SQL, JSON, assembly, logs and tables."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator


def _words(text: str) -> list[str]:
    return text.split()


_NAMES = _words(
    "amber basil cedar delta ember fjord grove heron indigo juniper krill larch maple nettle opal pine"
)
_TABLES = _words("orders customers invoices shipments products sessions payments employees events accounts")
_COLUMNS = _words("id name status total created_at region quantity price owner_id priority score email")
_STATES = _words("open closed pending shipped failed active archived")
_SERVICES = _words("gateway scheduler storage billing auth search mailer indexer")
_REGISTERS = _words("rax rbx rcx rdx rsi rdi r8 r9 r10 r11 r12 r13")


def sql(rng: random.Random) -> Iterator[str]:
    """Queries and definitions, one a piece, for ever."""
    while True:
        table, other = rng.sample(_TABLES, 2)
        first, second, third = rng.sample(_COLUMNS, 3)
        value = rng.choice([str(rng.randint(1, 5000)), f"'{rng.choice(_STATES)}'"])
        yield rng.choice(
            [
                f"SELECT {first}, {second}, COUNT(*) AS n\nFROM {table}\nWHERE {third} = {value}\n"
                f"GROUP BY {first}, {second}\nORDER BY n DESC\nLIMIT {rng.choice([5, 10, 50, 100])};\n",
                f"SELECT a.{first}, b.{second}\nFROM {table} AS a\nINNER JOIN {other} AS b ON a.id = b.{third}\n"
                f"WHERE a.{third} > {rng.randint(1, 900)} AND b.{first} IS NOT NULL;\n",
                f"UPDATE {table} SET {first} = {value}, {second} = NULL WHERE id = {rng.randint(1, 99999)};\n",  # noqa: S608 # no database reads it
                f"INSERT INTO {table} ({first}, {second}, {third})\nVALUES ({rng.randint(1, 999)}, {value}, "
                f"'{rng.choice(_NAMES)}');\n",
                f"CREATE INDEX idx_{table}_{first} ON {table} ({first}, {second});\n",
                f"DELETE FROM {table} WHERE {first} < {rng.randint(1, 900)} AND {second} = {value};\n",  # noqa: S608
            ]
        )


def json_records(rng: random.Random) -> Iterator[str]:
    """Nested records, some on one line and some indented, for ever."""
    while True:
        record = {
            "id": rng.randint(1, 10**6),
            "name": f"{rng.choice(_NAMES)}-{rng.choice(_NAMES)}",
            "status": rng.choice(_STATES),
            "tags": rng.sample(_NAMES, rng.randint(0, 4)),
            "position": {"lat": round(rng.uniform(-90, 90), 4), "lon": round(rng.uniform(-180, 180), 4)},
            "enabled": rng.random() < 0.5,
            "owner": None
            if rng.random() < 0.3
            else {"team": rng.choice(_SERVICES), "seats": rng.randint(1, 40)},
        }
        yield json.dumps(record, indent=rng.choice([None, None, 2]))


def assembly(rng: random.Random) -> Iterator[str]:
    """Functions of an x86 flavour, for ever."""
    while True:
        name = f"{rng.choice(_NAMES)}_{rng.choice(_SERVICES)}"
        lines = [
            f"{name}:",
            "    push    rbp",
            "    mov     rbp, rsp",
            f"    sub     rsp, {16 * rng.randint(1, 8)}",
        ]
        for label in range(rng.randint(1, 4)):
            lines.append(f".L{label}:")
            for _ in range(rng.randint(2, 7)):
                a, b = rng.sample(_REGISTERS, 2)
                lines.append(
                    rng.choice(
                        [
                            f"    mov     {a}, {b}",
                            f"    mov     {a}, qword ptr [rbp - {8 * rng.randint(1, 12)}]",
                            f"    lea     {a}, [{b} + 8*{rng.choice(_REGISTERS)}]",
                            f"    add     {a}, {rng.randint(1, 255)}",
                            f"    imul    {a}, {b}",
                            f"    xor     {a}, {a}",
                        ]
                    )
                )
            a, b = rng.sample(_REGISTERS, 2)
            lines += [f"    cmp     {a}, {b}", f"    {rng.choice(['jne', 'jl ', 'jge'])}     .L{label}"]
        yield "\n".join([*lines, "    leave", "    ret", ""])


def logs(rng: random.Random) -> Iterator[str]:
    """Lines of service logs in order of time, for ever."""
    second = 0
    while True:
        second += rng.randint(0, 5)
        clock = (
            f"{second // 3600 % 24:02d}:{second // 60 % 60:02d}:{second % 60:02d}.{rng.randint(0, 999):03d}"
        )
        level = rng.choices(["INFO", "DEBUG", "WARN", "ERROR"], [6, 3, 2, 1])[0]
        address = ".".join(str(rng.randint(1, 254)) for _ in range(4))
        message = rng.choice(
            [
                f"GET /api/v{rng.randint(1, 3)}/{rng.choice(_TABLES)}/{rng.randint(1, 9999)} "
                f"{rng.choice([200, 200, 304, 404, 500])} {rng.randint(1, 900)}ms from {address}",
                f"connection from {address}:{rng.randint(1024, 65535)} {rng.choice(['opened', 'closed', 'timed out'])}",
                f"retrying request id={rng.getrandbits(32):08x} attempt={rng.randint(1, 5)}",
                f"worker {rng.choice(_NAMES)} finished job {rng.randint(1, 9999)} in {rng.uniform(0, 9):.2f}s",
                f"cache miss ratio {rng.random():.3f}, {rng.randint(1, 4096)} MB in use",
            ]
        )
        yield f"2024-{1 + second // 86400 % 12:02d}-17T{clock}Z {level:<5} [{rng.choice(_SERVICES)}] {message}"


def tables(rng: random.Random) -> Iterator[str]:
    """Tables of comma-separated values with a header, for ever."""
    while True:
        columns = rng.sample(_COLUMNS, rng.randint(3, 6))
        rows = [[_cell(column, row, rng) for column in columns] for row in range(rng.randint(6, 20))]
        yield "\n".join([*map(",".join, [columns, *rows]), ""])


def _cell(column: str, row: int, rng: random.Random) -> str:
    named = {
        "id": str(1000 + row),
        "name": rng.choice(_NAMES),
        "status": rng.choice(_STATES),
        "created_at": f"2023-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}",
        "region": rng.choice(["north", "south", "east", "west"]),
        "email": f"{rng.choice(_NAMES)}@example.org",
        "price": f"{rng.uniform(1, 500):.2f}",
        "total": f"{rng.uniform(1, 9000):.2f}",
        "score": f"{rng.random():.3f}",
    }
    return named.get(column, str(rng.randint(1, 500)))


GENERATORS: dict[str, Callable[[random.Random], Iterator[str]]] = {
    "sql": sql,
    "json": json_records,
    "assembly": assembly,
    "logs": logs,
    "tables": tables,
}
"""Domain -> its generator of pieces."""
