"""The part of the protobuf wire format in Core ML and ONNX model files. Every length is checked before it is used."""

from __future__ import annotations

from collections.abc import Iterator

Field = int | memoryview
Message = dict[int, list[Field]]

MAX_VARINT_BYTES = 10
_FIXED = {1: 8, 5: 4}


class WireError(ValueError):
    """Bytes that are not a protobuf message."""


def varint(data: memoryview, at: int) -> tuple[int, int]:
    """The unsigned integer at ``at`` and the position after it."""
    value = 0
    for count in range(MAX_VARINT_BYTES):
        if at >= len(data):
            raise WireError("it ends inside a number")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << (7 * count)
        if byte < 0x80:
            return value, at
    raise WireError("a number has more than 10 bytes")


def message(data: memoryview) -> Message:
    """The fields of one message: number -> values in order. Varints become int, everything else stays bytes."""
    fields: Message = {}
    at, end = 0, len(data)
    while at < end:
        key = data[at]
        if key < 0x80:
            at += 1
        else:
            key, at = varint(data, at)
        number, kind = key >> 3, key & 7
        value: Field
        if kind == 0:
            value, at = varint(data, at)
        elif kind == 2 or kind in _FIXED:
            size = _FIXED.get(kind, 0)
            if kind == 2:
                size, at = varint(data, at)
            if size > end - at:
                raise WireError(f"field {number} claims {size} bytes where {end - at} are left")
            value = data[at : at + size]
            at += size
        else:
            raise WireError(f"field {number} has wire type {kind}")
        if number == 0:
            raise WireError("a field has number 0")
        fields.setdefault(number, []).append(value)
    return fields


def messages(fields: Message, number: int) -> Iterator[Message]:
    """Every sub-message in a repeated field."""
    for value in fields.get(number, ()):
        yield message(_bytes(value, number))


def submessage(fields: Message, number: int) -> Message | None:
    """The sub-message in a field, None if absent. If the field repeats, the last one counts, as in protobuf."""
    values = fields.get(number)
    return message(_bytes(values[-1], number)) if values else None


def text(fields: Message, number: int) -> str:
    """A string field, empty if absent."""
    values = fields.get(number)
    return _decode(_bytes(values[-1], number)) if values else ""


def texts(fields: Message, number: int) -> tuple[str, ...]:
    """A repeated string field."""
    return tuple(_decode(_bytes(value, number)) for value in fields.get(number, ()))


def integer(fields: Message, number: int) -> int:
    """An unsigned or enum field, 0 if absent."""
    values = fields.get(number)
    if not values:
        return 0
    if not isinstance(values[-1], int):
        raise WireError(f"field {number} is not a number")
    return values[-1]


def raw(fields: Message, number: int) -> bytes:
    """A bytes field, or the concatenated values of a repeated fixed-size field, packed or not."""
    return b"".join(bytes(_bytes(value, number)) for value in fields.get(number, ()))


def signed_integers(fields: Message, number: int) -> list[int]:
    """A repeated int32, int64 or bool field, packed or not; negative numbers are 64-bit two's complement."""
    values: list[int] = []
    for value in fields.get(number, ()):
        if isinstance(value, int):
            values.append(value)
            continue
        at = 0
        while at < len(value):
            item, at = varint(value, at)
            values.append(item)
    return [value - (1 << 64) if value >> 63 else value for value in values]


def _decode(data: memoryview) -> str:
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError as error:
        raise WireError(f"a name is not UTF-8: {error}") from None


def _bytes(value: Field, number: int) -> memoryview:
    if isinstance(value, int):
        raise WireError(f"field {number} is a number where bytes are expected")
    return value
