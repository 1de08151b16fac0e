"""From what a source or a transform gives to what a shard stores: fields with a dtype and a shape."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cachestream.errors import SampleError
from cachestream.model import Container, Field, FieldKind, Schema
from cachestream.storage.shard import storage_of

__all__ = ["Record", "to_record"]

_TORCH_NAMES: Final = {
    np.dtype(name): name
    for name in [
        "bool",
        "uint8",
        "int8",
        "int16",
        "uint16",
        "float16",
        "int32",
        "uint32",
        "float32",
        "int64",
        "uint64",
        "float64",
        "complex64",
        "complex128",
    ]
}


@dataclass(frozen=True, slots=True)
class Record:
    """One sample, ready to be stored: `values[i]` is the bytes of field i of `schema`, uint8 `[nbytes]`.

    `shapes[i]` is the shape of a tensor field's value, and () for str and bytes.
    """

    schema: Schema
    values: tuple[npt.NDArray[np.uint8], ...]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def nbytes(self) -> int:
        return sum(len(value) for value in self.values)


# A kind, a torch dtype, a shape and the bytes.
_Value = tuple[FieldKind, str, tuple[int, ...], npt.NDArray[np.uint8]]


def to_record(sample: Any) -> Record:
    """`sample` as fields: a mapping, a tuple (fields "0", "1", …) or a bare value (field "0").

    Raises SampleError that names the field for a value that is no array, tensor, number, bool, str or
    bytes.
    """
    container, items = _items(sample)
    names = sorted(items) if container == "dict" else list(items)
    fields: list[Field] = []
    values: list[npt.NDArray[np.uint8]] = []
    shapes: list[tuple[int, ...]] = []
    for name in names:
        kind, dtype, shape, data = _value(name, items[name])
        is_tensor = kind == "tensor"
        fields.append(Field(name, kind, dtype, len(shape), shape if is_tensor else None))
        values.append(data)
        shapes.append(shape if is_tensor else ())
    return Record(Schema(tuple(fields), container), tuple(values), tuple(shapes))


def _items(sample: Any) -> tuple[Container, dict[str, Any]]:
    if isinstance(sample, Mapping):
        if not sample:
            raise SampleError("the sample has no fields")
        for name in sample:
            if not isinstance(name, str) or not name or "#" in name or name.startswith("__"):
                raise SampleError(
                    f"field {name!r}: names are non-empty str, without '#' and not beginning with '__'"
                )
        return "dict", dict(sample)
    if isinstance(sample, tuple | list):
        if not sample:
            raise SampleError("the sample is an empty tuple")
        return "tuple", {str(i): value for i, value in enumerate(sample)}
    return "bare", {"0": sample}


def _value(name: str, value: Any) -> _Value:
    if isinstance(value, str):
        data = np.frombuffer(value.encode("utf-8", "surrogatepass"), np.uint8)
        return "str", "uint8", (len(data),), data
    if isinstance(value, bytes | bytearray | memoryview):
        data = np.frombuffer(bytes(value), np.uint8)
        return "bytes", "uint8", (len(data),), data
    if type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "detach"):
        return _tensor(name, value)
    if value is None or isinstance(value, Mapping | set | frozenset) or callable(value):
        raise SampleError(
            f"field '{name}' is {_describe(value)}: store arrays, tensors, numbers, bools, str or bytes"
        )
    return _array(name, value)


def _tensor(name: str, tensor: Any) -> _Value:
    if str(tensor.layout) != "torch.strided":
        raise SampleError(f"field '{name}' is a sparse tensor: call .to_dense() on it in the transform")
    dtype = str(tensor.dtype).removeprefix("torch.")
    try:
        dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        if dtype == "bfloat16":  # numpy has no such type: its bits travel as uint16
            bits = dense.view(sys.modules["torch"].uint16).numpy()
            return "tensor", dtype, tuple(dense.shape), _bytes_of(bits)
        return _array(name, dense.numpy())
    except (RuntimeError, TypeError) as error:
        raise SampleError(f"field '{name}' is a tensor that cannot be stored ({error})") from error


def _array(name: str, value: Any) -> _Value:
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise SampleError(f"field '{name}' is {_describe(value)} that makes no array ({error})") from error
    dtype = _TORCH_NAMES.get(array.dtype.newbyteorder("="))
    if dtype is None:
        raise SampleError(
            f"field '{name}' is {_describe(value)} of dtype {array.dtype}: store numbers, bools, str or bytes"
        )
    shape = array.shape
    stored = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return "tensor", dtype, shape, _bytes_of(stored)


def _bytes_of(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    return array.reshape(-1).view(np.uint8)


def _describe(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def stored_shape(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape in a shard of a value of torch dtype `dtype`: complex128 gets a trailing axis of 2."""
    return (*shape, 2) if dtype == "complex128" else shape


def item_bytes(dtype: str) -> int:
    """Bytes of one stored element of torch dtype `dtype`."""
    return storage_of(dtype)[1].itemsize
