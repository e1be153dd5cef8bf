"""Conversion between dataclasses and protobuf messages, packing of integer arrays, and splitting of large requests.

A dataclass declares its message type as ``MESSAGE`` or through ``register``. A dataclass field has the same name as its
message field, apart from a dimension suffix such as ``_LRS``. If the names differ, a string annotation gives the path
of the message field. Other annotations check the value (``fields``). The same generic code encodes and decodes every
dataclass.
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
"""Version of the protocol between agent and service. Each side rejects a peer with a different version."""

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Maximum size of a gRPC message and of an array, in bytes."""

PART_BYTES = 128 << 10
"""Maximum amount of data in one part of a request, in bytes."""
MAX_PART = PART_BYTES + 64
"""Maximum size of a message that carries one part, in bytes."""

Integers: TypeAlias = npt.NDArray[np.integer[Any]]
"""An array of any integer type. The suffix of a variable's name gives its dimensions."""

_DTYPES: dict[int, np.dtype[np.generic]] = {
    tensor_pb2.DATA_TYPE_UINT8: np.dtype("u1"),
    tensor_pb2.DATA_TYPE_UINT16: np.dtype("<u2"),
    tensor_pb2.DATA_TYPE_INT32: np.dtype("<i4"),
    tensor_pb2.DATA_TYPE_INT64: np.dtype("<i8"),
}
"""Element types on the wire, narrowest first."""
_DIMENSIONS = re.compile(r"_[A-Z][A-Z0-9]*$")
_MESSAGES: dict[type, type[Any]] = {}
"""Message types of the dataclasses without ``MESSAGE``."""

_Value = TypeVar("_Value")


def register(kind: type, message: type[Any]) -> None:
    """Register the message type of a dataclass that does not define ``MESSAGE``.

    The planner's dataclasses need this because the planner does not import protobuf.
    """
    _MESSAGES[kind] = message


def _message_type(kind: Any) -> Any:
    """Return the message type of a dataclass, or ``None`` if it does not have one."""
    return getattr(kind, "MESSAGE", None) or _MESSAGES.get(kind)


def encode(value: Any, message: Any = None) -> Any:
    """Encode a dataclass instance as a message and return it.

    Parameters
    ----------
    value
        The instance.
    message
        Empty message of a different type to fill instead. Only the fields that both types have are written.

    Examples
    --------
    >>> from eplb_core.wire.agent import Reporting
    >>> encode(Reporting(source_sums=True, one_in=4))
    source_sums: true
    one_in: 4
    <BLANKLINE>
    """
    kind: Any = type(value)
    message = _message_type(kind)() if message is None else message
    message_kind: Any = type(message)
    for field in _fields(kind, message_kind):
        field_value = getattr(value, field.name)
        if field_value is not None and field.path:
            field.write(message, field_value)
    return message


def decode(kind: type[_Value], message: Any, sizes: Sizes | None = None, name: str | None = None) -> _Value:
    """Decode a message into a dataclass instance and return it.

    The annotations check each field. Then the dataclass's ``check`` method, if there is one, checks the fields against
    each other.

    Parameters
    ----------
    kind
        The dataclass.
    message
        The message.
    sizes
        Sizes of the deployment. They provide the values of fields that the message type does not have. If a decoded
        field has a ``sizes`` attribute, its sizes are added before the next field is decoded.
    name
        Name of the message in error messages; derived from its type by default.

    Raises
    ------
    WireError
        If a value is invalid; the error message names the field.

    Examples
    --------
    >>> from eplb_core.wire.agent import Reporting
    >>> decode(Reporting, agent_pb2.Reporting(one_in=4))
    Reporting(source_sums=False, one_in=4, report_steps=0)
    >>> decode(Reporting, agent_pb2.Reporting(one_in=9))
    Traceback (most recent call last):
    eplb_core.wire.fields.WireError: reporting.one_in is 9; expected 1 to 8
    """
    all_sizes = dict(sizes or {})
    values: dict[str, Any] = {}
    dataclass_kind: Any = kind
    message_kind: Any = type(message)
    where = name or re.sub(r"^Get|Response$", "", message_kind.DESCRIPTOR.name).lower()
    for field in _fields(dataclass_kind, message_kind):
        if field.is_read and (field.path or not field.has_default):
            value = field.read(message, where, all_sizes)
            values[field.name] = value
            all_sizes.update(getattr(value, "sizes", ()))
    decoded = kind(**values)
    if hasattr(decoded, "check"):
        decoded.check(where)
    return decoded


class _Field:
    """One field of a dataclass, with its path in the message and the way to read and write it.

    Parameters
    ----------
    name
        Name of the field, or of a property. Properties are written but never read.
    hint
        Type of the field with its annotations; ``None`` for a property.
    message
        Message type.
    has_default
        True if the field has a default, so the message type may omit it.
    """

    def __init__(self, name: str, hint: Any, message: type[Message], has_default: bool) -> None:
        self.name = name
        self.has_default = has_default
        self.is_read = hint is not None
        hint, self._notes, self._is_optional = _split_hint(hint)
        self._read = _reader(hint, self._notes)
        paths = [note for note in self._notes if isinstance(note, str)]
        path = paths[0] if paths else _DIMENSIONS.sub("", name)
        *self._parents, self._leaf = path.split(".")
        parent: Any = message
        for step in self._parents:
            parent = parent.DESCRIPTOR.fields_by_name[step].message_type._concrete_class
        self._descriptor = parent.DESCRIPTOR.fields_by_name.get(self._leaf)
        self.path = path if self._descriptor else ""

    def read(self, message: Any, where: str, sizes: Sizes) -> Any:
        """Return the field's checked value; ``None`` if it is optional and absent."""
        if self._descriptor is None:
            return self._read(sizes[self.name], f"{where}.{self.name}", sizes)
        for step in self._parents:
            message = getattr(message, step)
        if self._is_optional and self._descriptor.has_presence and not message.HasField(self._leaf):
            return None
        return self._read(getattr(message, self._leaf), f"{where}.{self._leaf}", sizes)

    def write(self, message: Any, value: Any) -> None:
        """Write a value into the message."""
        for step in self._parents:
            message = getattr(message, step)
        value = _to_wire(value, self._notes)
        if isinstance(value, Placement):
            value = value.phy2log_LRS
        if isinstance(value, np.ndarray):
            self._write_array(message, value)
        elif dataclasses.is_dataclass(value):
            getattr(message, self._leaf).SetInParent()
            encode(value, getattr(message, self._leaf))
        elif not is_repeated(self._descriptor):
            setattr(message, self._leaf, value)
        elif value and dataclasses.is_dataclass(value[0]):
            for item in value:
                encode(item, getattr(message, self._leaf).add())
        else:
            getattr(message, self._leaf).extend(value)

    def _write_array(self, message: Any, array: Integers) -> None:
        """Write an array as a packed array, a list or bytes, according to the field's type."""
        assert self._descriptor is not None
        if self._descriptor.message_type is not None:
            getattr(message, self._leaf).CopyFrom(pack(array))
        elif is_repeated(self._descriptor):
            getattr(message, self._leaf).extend(array.tolist())
        else:
            setattr(message, self._leaf, array.astype(np.uint8).tobytes())


@functools.cache
def _fields(kind: Any, message: Any) -> tuple[_Field, ...]:
    """Return the dataclass's fields in order, followed by its properties that match the remaining message fields."""
    hints = get_type_hints(kind, include_extras=True)
    fields = [
        _Field(field.name, hints[field.name], message, _has_default(field))
        for field in dataclasses.fields(kind)
    ]
    covered = {field.path.partition(".")[0] for field in fields}
    properties = [
        name for name in message.DESCRIPTOR.fields_by_name if name not in covered and hasattr(kind, name)
    ]
    return (*fields, *(_Field(name, None, message, True) for name in properties))


def _has_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING


def _split_hint(hint: Any) -> tuple[Any, tuple[Any, ...], bool]:
    """Split a type hint into its type, its annotations, and a flag that is True if the value may be ``None``."""
    notes: tuple[Any, ...] = ()
    if get_origin(hint) is Annotated:
        hint, *annotations = get_args(hint)
        notes = tuple(annotations)
    if get_origin(hint) in (Union, types.UnionType):
        (member,) = [member for member in get_args(hint) if member is not type(None)]
        hint, inner_notes, _ = _split_hint(member)
        return hint, notes + inner_notes, True
    return hint, notes, False


def _to_wire(value: Any, notes: Sequence[Any]) -> Any:
    """Convert a value for sending, using each annotation that has a ``to_wire`` method."""
    for note in notes:
        value = note.to_wire(value) if hasattr(note, "to_wire") else value
    return value


def _reader(hint: Any, notes: Sequence[Any]) -> Check:
    """Return a function that applies the annotations' checks to a value and converts it to the hinted type."""
    steps: list[Check] = [note for note in notes if callable(note)]
    if _message_type(hint) is not None:
        steps.append(lambda value, field, sizes: decode(hint, value, sizes, field))
    elif isinstance(hint, type) and issubclass(hint, enum.Enum):
        steps.append(functools.partial(_enum_member, hint))
    elif get_origin(hint) is tuple:
        item = get_args(hint)[0]
        steps.append(functools.partial(_items, None if item is int else _reader(item, ())))

    def read(value: Any, field: str, sizes: Sizes) -> Any:
        for step in steps:
            value = step(value, field, sizes)
        return value

    return read


def _enum_member(kind: type[enum.Enum], value: int, field: str, _sizes: Sizes) -> enum.Enum:
    try:
        return kind(value)
    except ValueError:
        valid = ", ".join(str(member.value) for member in kind)
        raise WireError(f"{field} is {value}; it must be one of {valid}") from None


def _items(item: Check | None, values: Sequence[Any], field: str, sizes: Sizes) -> tuple[Any, ...]:
    """Convert a list to a tuple. ``item`` reads each element; if ``item`` is ``None``, the elements are unchanged."""
    if item is None:
        return tuple(values)
    return tuple(item(value, f"{field}[{number}]", sizes) for number, value in enumerate(values))


def is_repeated(field: Any) -> bool:
    """Return True if the message field with this descriptor is a list."""
    # protobuf 5 has no ``is_repeated``.
    return bool(field.is_repeated if hasattr(field, "is_repeated") else field.label == field.LABEL_REPEATED)


def packed(*axes: str | int | None) -> Check:
    """Return a check that unpacks an array to int32.

    Parameters
    ----------
    *axes
        Each axis is a length, the name of a size, or ``None`` for any length. The axis ``entries`` is absent if its
        size is 1.
    """
    return lambda value, field, sizes: unpack(value, expected_shape(axes, sizes), field)


def expected_shape(axes: Sequence[str | int | None], sizes: Sizes) -> list[int | None]:
    """Return the shape that the axes of ``packed`` describe."""
    present = [axis for axis in axes if axis != "entries" or sizes["entries"] > 1]
    return [sizes[axis] if isinstance(axis, str) else axis for axis in present]


def unpack_placement(value: tensor_pb2.PackedArray, field: str, sizes: Sizes) -> Placement:
    """Unpack and validate a placement ``[L, R, S]``.

    ``sizes`` must contain ``experts``. Layers, ranks and slots are checked if ``sizes`` contains them.
    """
    phy2log_LRS = unpack(value, [sizes.get(axis) for axis in ("layers", "ranks", "slots")], field)
    try:
        return Placement(phy2log_LRS, sizes["experts"])
    except PlacementError as error:
        raise WireError(f"{field}: {error}") from error


def pack(array: npt.NDArray[np.integer]) -> tensor_pb2.PackedArray:
    """Pack an integer array in the narrowest type that fits its values, because most heat counts are small.

    Examples
    --------
    >>> message = pack(np.array([[0, 300]]))
    >>> message.dtype == tensor_pb2.DATA_TYPE_UINT16, len(message.data)
    (True, 4)
    >>> unpack(message, [1, None], "heat")
    array([[  0, 300]], dtype=int32)
    """
    code, narrow = to_narrowest(array)
    return tensor_pb2.PackedArray(dtype=code, shape=array.shape, data=narrow.tobytes())  # type: ignore[arg-type]


def to_narrowest(array: npt.NDArray[np.integer]) -> tuple[int, Integers]:
    """Convert an array to the narrowest wire type that fits it, and return the type's code and the C-ordered array."""
    low = int(array.min()) if array.size else 0
    high = int(array.max()) if array.size else 0
    for code, dtype in _DTYPES.items():
        bounds = np.iinfo(dtype.name)
        if bounds.min <= low and high <= bounds.max:
            return code, np.ascontiguousarray(array, dtype=dtype)
    raise WireError(f"values {low} to {high} exceed the range of int64")


def unpack(packed: tensor_pb2.PackedArray, shape: Sequence[int | None], field: str) -> Int32:
    """Unpack an array to int32. This uses at most ``MAX_MESSAGE_BYTES`` of memory, even if the sender declares more.

    Parameters
    ----------
    packed
        The message.
    shape
        Expected shape; ``None`` allows any length for that axis.
    field
        Name of the field in error messages.

    Raises
    ------
    WireError
        If the type, shape or size is wrong, or a value exceeds int32.
    """
    wide = unpack_as_sent(packed, shape, field)
    array = wide.astype(np.int32)
    if wide.dtype.itemsize == 8 and not np.array_equal(array, wide):
        raise WireError(f"{field}: a value is outside the int32 range")
    return array


def unpack_as_sent(packed: tensor_pb2.PackedArray, shape: Sequence[int | None], field: str) -> Integers:
    """Unpack an array without a copy. The result is read-only and keeps the integer type of the message.

    The parameters and errors are the same as for ``unpack``, except that values may exceed int32.
    """
    if packed.dtype not in _DTYPES:
        raise WireError(f"{field}: unknown data type {packed.dtype}")
    dtype = _DTYPES[packed.dtype]
    sent_shape = tuple(packed.shape)
    if len(sent_shape) != len(shape) or any(
        expected not in (None, length) for expected, length in zip(shape, sent_shape, strict=True)
    ):
        expected_axes = ", ".join("any" if axis is None else str(axis) for axis in shape)
        raise WireError(f"{field}: expected shape [{expected_axes}], got {list(sent_shape)}")
    size = math.prod(sent_shape) * dtype.itemsize
    # ``unpack`` widens to int32, so the limit also applies to the size in int32.
    if max(size, math.prod(sent_shape) * 4) > MAX_MESSAGE_BYTES:
        raise WireError(f"{field}: {size} bytes exceed the limit of {MAX_MESSAGE_BYTES}")
    if len(packed.data) != size:
        raise WireError(
            f"{field}: shape {list(sent_shape)} of {dtype.name} needs {size} bytes, got {len(packed.data)}"
        )
    array: Integers = np.frombuffer(packed.data, dtype=dtype).reshape(sent_shape)
    return array


def in_parts(request: agent_pb2.ConnectRequest) -> Iterator[agent_pb2.ConnectRequest]:
    """Yield the request itself if it fits in one message, or else its parts in order.

    gRPC allocates memory for a message before the receiver can check it, so large requests are split into small
    messages. Each part declares how many bytes follow it. The receiver can therefore reserve memory for the entire
    request, or reject it, when the first part arrives.
    """
    if request.ByteSize() <= PART_BYTES:
        yield request
        return
    for part in parts_of(request.SerializeToString()):
        yield agent_pb2.ConnectRequest(part=part)


def parts_of(serialized: bytes) -> Iterator[agent_pb2.Part]:
    """Yield the parts of a serialized request in order; see ``in_parts``."""
    for begin in range(0, len(serialized), PART_BYTES):
        data = serialized[begin : begin + PART_BYTES]
        yield agent_pb2.Part(data=data, bytes_left=len(serialized) - begin - len(data))


class Parts:
    """Incoming request that is assembled from its parts. ``size`` is its total size, in bytes.

    Parameters
    ----------
    first
        The first part.

    Raises
    ------
    WireError
        If the part is empty or too large.
    """

    def __init__(self, first: agent_pb2.Part) -> None:
        self._data = bytearray()
        self.size = len(first.data) + check_count(first.bytes_left, "part.bytes_left", MAX_BYTES)
        self.add(first)

    @property
    def complete(self) -> bool:
        """True once all parts have been added."""
        return len(self._data) == self.size

    def add(self, part: agent_pb2.Part) -> None:
        """Add the next part; raises ``WireError`` if it is empty, too large or out of order."""
        check_count(len(part.data), "the size of part.data", PART_BYTES + 1, least=1)
        bytes_left = self.size - len(self._data) - len(part.data)
        if part.bytes_left != bytes_left:
            raise WireError(f"part.bytes_left is {part.bytes_left}; it must be {bytes_left}")
        self._data += part.data

    def request(self) -> agent_pb2.ConnectRequest:
        """Assemble the request; raises ``WireError`` if the data is not a valid request or is itself a part."""
        request: agent_pb2.ConnectRequest = self.message(agent_pb2.ConnectRequest)
        if request.WhichOneof("message") == "part":
            raise WireError("the parts of the request form another part; parts cannot be nested")
        return request

    def message(self, kind: Any) -> Any:
        """Assemble a message of the given type; raises ``WireError`` if the data is not valid."""
        try:
            return kind.FromString(bytes(self._data))
        except DecodeError as error:
            raise WireError("the parts of the request do not form a valid request") from error
