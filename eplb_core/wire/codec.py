"""Values to messages and back: one loop over the fields of a dataclass, packed integer arrays, requests in parts.

A dataclass that travels names its message as ``MESSAGE`` and what each field may hold as an annotation (``fields``). A
field is called as in the message, but for the dimensions at its end, or its annotation gives its path there.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import re
import types
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError, Message

from eplb_core.placement import Int32, Placement, PlacementError
from eplb_core.wire.fields import MAX_BYTES, Check, Sizes, WireError, check_count
from eplb_core.wire.generated import agent_pb2, tensor_pb2

PROTOCOL_VERSION = 4
"""Version of the stream; both sides refuse another."""

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Bound on one gRPC message, and on one array."""

PART_BYTES = 128 << 10
"""Data of one part of a request, at most."""
MAX_PART = PART_BYTES + 64
"""Bytes of a request that carries one part."""

Integers: TypeAlias = npt.NDArray[np.integer[Any]]
"""An array of any integer type; its dimensions are in the variable's name."""

_DTYPES: dict[int, np.dtype[np.generic]] = {
    tensor_pb2.DATA_TYPE_UINT8: np.dtype("u1"),
    tensor_pb2.DATA_TYPE_UINT16: np.dtype("<u2"),
    tensor_pb2.DATA_TYPE_INT32: np.dtype("<i4"),
    tensor_pb2.DATA_TYPE_INT64: np.dtype("<i8"),
}
_DIMENSIONS = re.compile(r"_[A-Z][A-Z0-9]*$")

_MESSAGES: dict[type, type[Any]] = {}
"""Message types of the dataclasses without ``MESSAGE``."""

_Value = TypeVar("_Value")


def register(kind: type, message: type[Any]) -> None:
    """Encode values of ``kind`` as ``message``.

    Dataclasses of this package name their message type as ``MESSAGE`` instead. The planner's cannot, because it does
    not import protobuf.
    """
    _MESSAGES[kind] = message


def _message_type(kind: Any) -> Any:
    """Return the message type of a dataclass; ``None`` if it has none."""
    return getattr(kind, "MESSAGE", None) or _MESSAGES.get(kind)


def encode(value: Any, message: Any = None) -> Any:
    """Return the message of a value; ``message`` is an empty one of another type that takes some of its fields."""
    kind: Any = type(value)
    message = _message_type(kind)() if message is None else message
    message_kind: Any = type(message)
    for field in _fields(kind, message_kind):
        sent = getattr(value, field.name)
        if sent is not None and field.path:
            field.write(message, sent)
    return message


def decode(kind: type[_Value], message: Any, sizes: Sizes | None = None, name: str | None = None) -> _Value:
    """Return the value of a message; raises ``WireError`` naming the field that cannot hold what it does.

    A method ``check`` of the dataclass checks the fields against one another. A field that the message lacks is taken
    from ``sizes``; a value within that has ``sizes`` adds its own for the fields that follow. ``name`` is the message's
    in errors.
    """
    known, values = dict(sizes or {}), {}
    carried: Any = kind
    message_kind: Any = type(message)
    where = name or re.sub(r"^Get|Response$", "", message_kind.DESCRIPTOR.name).lower()
    for field in _fields(carried, message_kind):
        if field.is_read and (field.path or not field.has_default):
            values[field.name] = value = field.read(message, where, known)
            known.update(getattr(value, "sizes", ()))
    decoded = kind(**values)
    if hasattr(decoded, "check"):
        decoded.check(where)
    return decoded


class _Field:
    """One field of a dataclass that travels: where the message has it (``path``), and how it is read and written."""

    def __init__(self, name: str, hint: Any, message: type[Message], has_default: bool) -> None:
        self.name = name
        self.has_default = has_default
        self.is_read = hint is not None
        hint, self._notes, self._may_lack = _without_notes(hint)
        self._read = _reader(hint, self._notes)
        named = [note for note in self._notes if isinstance(note, str)]
        path = named[0] if named else _DIMENSIONS.sub("", name)
        *self._within, self._leaf = path.split(".")
        within: Any = message
        for part in self._within:
            within = within.DESCRIPTOR.fields_by_name[part].message_type._concrete_class
        self._kind = within.DESCRIPTOR.fields_by_name.get(self._leaf)
        self.path = path if self._kind else ""

    def read(self, message: Any, where: str, sizes: Sizes) -> Any:
        """Return the field's value, checked; ``None`` where it is absent."""
        if self._kind is None:
            return self._read(sizes[self.name], f"{where}.{self.name}", sizes)
        for part in self._within:
            message = getattr(message, part)
        if self._may_lack and self._kind.has_presence and not message.HasField(self._leaf):
            return None
        return self._read(getattr(message, self._leaf), f"{where}.{self._leaf}", sizes)

    def write(self, message: Any, value: Any) -> None:
        """Put a value into the message."""
        for part in self._within:
            message = getattr(message, part)
        value = _sent(value, self._notes)
        if isinstance(value, Placement):
            value = value.phy2log_LRS
        if isinstance(value, np.ndarray):
            self._write_array(message, value)
        elif dataclasses.is_dataclass(value):
            getattr(message, self._leaf).SetInParent()
            encode(value, getattr(message, self._leaf))
        elif not repeats(self._kind):
            setattr(message, self._leaf, value)
        elif value and dataclasses.is_dataclass(value[0]):
            for item in value:
                encode(item, getattr(message, self._leaf).add())
        else:
            getattr(message, self._leaf).extend(value)

    def _write_array(self, message: Any, array: Integers) -> None:
        assert self._kind is not None
        if self._kind.message_type is not None:
            getattr(message, self._leaf).CopyFrom(pack(array))
        elif repeats(self._kind):
            getattr(message, self._leaf).extend(array.tolist())
        else:
            setattr(message, self._leaf, array.astype(np.uint8).tobytes())


@functools.cache
def _fields(kind: Any, message: Any) -> tuple[_Field, ...]:
    """Fields of a dataclass in their order, then the properties that the message has a field for."""
    hints = get_type_hints(kind, include_extras=True)
    fields = [
        _Field(field.name, hints[field.name], message, _has_default(field))
        for field in dataclasses.fields(kind)
    ]
    taken = {field.path.partition(".")[0] for field in fields}
    others = [name for name in message.DESCRIPTOR.fields_by_name if name not in taken and hasattr(kind, name)]
    return (*fields, *(_Field(name, None, message, True) for name in others))


def _has_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING


def _without_notes(hint: Any) -> tuple[Any, tuple[Any, ...], bool]:
    """Separate a type from its annotations, and from ``None``."""
    notes: tuple[Any, ...] = ()
    if get_origin(hint) is Annotated:
        hint, *found = get_args(hint)
        notes = tuple(found)
    if get_origin(hint) in (Union, types.UnionType):
        (one,) = [one for one in get_args(hint) if one is not type(None)]
        hint, more, _ = _without_notes(one)
        return hint, notes + more, True
    return hint, notes, False


def _sent(value: Any, notes: Sequence[Any]) -> Any:
    for note in notes:
        value = note.sent(value) if hasattr(note, "sent") else value
    return value


def _reader(hint: Any, notes: Sequence[Any]) -> Check:
    """Checks of the annotations, then what the type asks for."""
    steps: list[Check] = [note for note in notes if callable(note)]
    if _message_type(hint) is not None:
        steps.append(lambda value, field, sizes: decode(hint, value, sizes, field))
    elif isinstance(hint, type) and issubclass(hint, enum.Enum):
        steps.append(functools.partial(_member, hint))
    elif get_origin(hint) is tuple:
        item = get_args(hint)[0]
        steps.append(functools.partial(_items, None if item is int else _reader(item, ())))

    def read(value: Any, field: str, sizes: Sizes) -> Any:
        for step in steps:
            value = step(value, field, sizes)
        return value

    return read


def _member(kind: type[enum.Enum], value: int, field: str, _sizes: Sizes) -> enum.Enum:
    try:
        return kind(value)
    except ValueError:
        raise WireError(f"{field} is {value}, none that is known") from None


def _items(item: Check | None, values: Sequence[Any], field: str, sizes: Sizes) -> tuple[Any, ...]:
    if item is None:
        return tuple(values)
    return tuple(item(value, f"{field}[{number}]", sizes) for number, value in enumerate(values))


def repeats(field: Any) -> bool:
    """Return whether a message's field is a list."""
    # protobuf 5 has labels in place of the property.
    return bool(field.is_repeated if hasattr(field, "is_repeated") else field.label == field.LABEL_REPEATED)


def packed(*axes: str | int | None) -> Check:
    """Packed arrays of int32.

    An axis is a size, the name of one, or ``None`` for any; that of ``entries`` is not there where it is 1.
    """
    return lambda value, field, sizes: unpack(value, axes_of(axes, sizes), field)


def axes_of(axes: Sequence[str | int | None], sizes: Sizes) -> list[int | None]:
    """Return the shape that ``packed`` asks for."""
    there = [axis for axis in axes if axis != "entries" or sizes["entries"] > 1]
    return [sizes[axis] if isinstance(axis, str) else axis for axis in there]


def placed(value: tensor_pb2.PackedArray, field: str, sizes: Sizes) -> Placement:
    """Packed arrays ``[L, R, S]`` that are a placement of ``experts``; other sizes are checked where they are known."""
    phy2log_LRS = unpack(value, [sizes.get(axis) for axis in ("layers", "ranks", "slots")], field)
    try:
        return Placement(phy2log_LRS, sizes["experts"])
    except PlacementError as error:
        raise WireError(f"{field}: {error}") from error


def pack(array: npt.NDArray[np.integer]) -> tensor_pb2.PackedArray:
    """Pack an integer array in the narrowest type that holds it (heat is mostly small numbers)."""
    code, narrow = narrowed(array)
    return tensor_pb2.PackedArray(dtype=code, shape=array.shape, data=narrow.tobytes())  # type: ignore[arg-type]


def narrowed(array: npt.NDArray[np.integer]) -> tuple[int, Integers]:
    """Return the code of the narrowest type that holds an array, and the array in that type, in one piece."""
    low, high = (int(array.min()), int(array.max())) if array.size else (0, 0)
    for code, dtype in _DTYPES.items():
        bounds = np.iinfo(dtype.name)
        if bounds.min <= low and high <= bounds.max:
            return code, np.ascontiguousarray(array, dtype=dtype)
    raise WireError(f"values {low}..{high} fit no wire type")


def unpack(packed: tensor_pb2.PackedArray, shape: Sequence[int | None], field: str) -> Int32:
    """Unpack to int32 of exactly ``shape`` (``None`` admits any size of that axis).

    Raises ``WireError`` naming ``field`` where type, shape or size is off or a value is past int32. Never takes
    more than ``MAX_MESSAGE_BYTES``, whatever the sender claims.
    """
    wide = unpack_as_sent(packed, shape, field)
    array = wide.astype(np.int32)
    if wide.dtype.itemsize == 8 and not np.array_equal(array, wide):
        raise WireError(f"{field}: a value is past the range of int32")
    return array


def unpack_as_sent(packed: tensor_pb2.PackedArray, shape: Sequence[int | None], field: str) -> Integers:
    """``unpack`` without the copy: read-only, in the type that it travelled in."""
    if packed.dtype not in _DTYPES:
        raise WireError(f"{field}: unknown data type {packed.dtype}")
    dtype = _DTYPES[packed.dtype]
    found = tuple(packed.shape)
    if len(found) != len(shape) or any(
        want not in (None, size) for want, size in zip(shape, found, strict=True)
    ):
        wanted = ", ".join("any" if want is None else str(want) for want in shape)
        raise WireError(f"{field}: expected the shape [{wanted}], got {list(found)}")
    size = math.prod(found) * dtype.itemsize
    # int32 is what comes out, so a narrow array may not claim four times the bound either.
    if max(size, math.prod(found) * 4) > MAX_MESSAGE_BYTES:
        raise WireError(f"{field}: {size} bytes are past the limit of {MAX_MESSAGE_BYTES}")
    if len(packed.data) != size:
        raise WireError(
            f"{field}: shape {list(found)} of {dtype.name} needs {size} bytes, got {len(packed.data)}"
        )
    array: Integers = np.frombuffer(packed.data, dtype=dtype).reshape(found)
    return array


def in_parts(request: agent_pb2.ConnectRequest) -> Iterator[agent_pb2.ConnectRequest]:
    """Yield ``request`` itself, or where it is too large for one message, its parts in order.

    A gRPC message takes memory of its receiver before anybody there knows of it, so messages are small. Each part says
    how much is still to come: the receiver makes room for all of it, or refuses, at the first.
    """
    if request.ByteSize() <= PART_BYTES:
        yield request
        return
    whole = request.SerializeToString()
    for begin in range(0, len(whole), PART_BYTES):
        data = whole[begin : begin + PART_BYTES]
        left = len(whole) - begin - len(data)
        yield agent_pb2.ConnectRequest(part=agent_pb2.Part(data=data, bytes_left=left))


class Parts:
    """A request of which the first part has come; ``size`` is what all parts hold, in bytes.

    Raises ``WireError`` where a part is empty, too large, or not the next.
    """

    def __init__(self, first: agent_pb2.Part) -> None:
        self._data = bytearray()
        self.size = len(first.data) + check_count(first.bytes_left, "part.bytes_left", MAX_BYTES)
        self.add(first)

    @property
    def complete(self) -> bool:
        """True once all parts are here."""
        return len(self._data) == self.size

    def add(self, part: agent_pb2.Part) -> None:
        """Add the next part; raises ``WireError`` where it cannot be."""
        check_count(len(part.data), "the size of part.data", PART_BYTES + 1, least=1)
        left = self.size - len(self._data) - len(part.data)
        if part.bytes_left != left:
            raise WireError(f"part.bytes_left is {part.bytes_left}; it must be {left}")
        self._data += part.data

    def request(self) -> agent_pb2.ConnectRequest:
        """Put the parts together; raises ``WireError`` where that is no request, or a part again."""
        try:
            request = agent_pb2.ConnectRequest.FromString(bytes(self._data))
        except DecodeError as error:
            raise WireError("the parts of a request do not make one") from error
        if request.WhichOneof("message") == "part":
            raise WireError("the parts of a request make another part")
        return request
