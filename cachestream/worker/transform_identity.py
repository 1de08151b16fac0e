"""The identity of a transform: a digest of its code, of the values bound to it, and of the user's code it
calls.

Two transforms of one identity make the same samples, as far as can be seen: files that they read and
environments do not count. The identity of an unchanged transform is the same in every process and run of one
Python version: it has no memory addresses, no order of sets, no line numbers, no comments and no names of
modules. Libraries (the standard one, and what is installed) count by the names that are used of them, and
random generators by their type, because most are seeded by the system. State that a transform changes, such
as a count of its calls, counts as it is when the worker is started.
"""

from __future__ import annotations

import copyreg
import dis
import enum
import functools
import inspect
import marshal
import os
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import machinery
from typing import Any, Final

import numpy as np
import xxhash

_PLAIN: Final = frozenset({bool, int, float, complex, str, bytes, types.NoneType, types.EllipsisType})
_MARSHAL: Final = 2  # the last version without references, which depend on who else holds the values
_LARGE_BYTES: Final = 1 << 28
_MANY: Final = (
    10_000  # of more values, only some are looked at: a table in a mapped file may exceed the memory
)
_GENERATORS: Final = (random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator)
# Wrappers, and what they hold.
_MEMBERS: Final[dict[type, tuple[str, ...]]] = {
    types.MethodType: ("__self__", "__func__"),
    functools.partial: ("func", "args", "keywords"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget", "fset"),
    enum.Enum: ("name", "value"),
}
_LIBRARY_FOLDERS: Final = frozenset({"site-packages", "dist-packages"})
_LOADS: Final = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF"})
_ATTRIBUTES: Final = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
# Of code: the kinds of its parameters, and its own kind (generator, coroutine).
_FLAGS: Final = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS | inspect.CO_GENERATOR | inspect.CO_COROUTINE
_NO_CONTENT: Final = frozenset({"__module__", "__qualname__", "__doc__", "__dict__", "__weakref__"})


def transform_identity(transform: Any) -> str:
    """The identity of a transform; "" if its values cannot be compared.

    It begins with the version of Python: another one compiles the same code otherwise.
    """
    try:
        digest = "" if transform is None else _Digester().of(transform)
    except Exception:  # noqa: BLE001  code of the user's: any object may be bound, and answer with any error
        return ""
    return f"python {sys.version_info.major}.{sys.version_info.minor}:{digest}"


def identity_of_samples(transform: str, made_with: str, recorded: str) -> str:
    """The identity of what makes samples: a transform, by its own, and the options of a source `made_with`.

    `recorded`: the identity in a cache that was filled from this very source. One that names the transform
    alone was recorded before the options counted; it holds for these.
    """
    if not made_with or not transform or recorded == transform:
        return transform
    version, _, digest = transform.partition(":")
    return f"{version}:{xxhash.xxh3_64_hexdigest(f'{digest}{made_with}'.encode('utf-8', 'surrogatepass'))}"


def is_same_transform(one: str, other: str) -> bool:
    """False if two identities differ that can be compared: of one version of Python."""
    is_comparable = one and other and one.partition(":")[0] == other.partition(":")[0]
    return one == other or not is_comparable


class _Digester:
    """Digests of values, 16 hexadecimal digits each. A value inside itself counts as such."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[str, Any]] = {}  # with the value, so that its id is not used again
        self._walks: dict[type, Callable[[Any], Iterator[str]]] = {
            types.CodeType: self._code,
            types.FunctionType: self._function,
            types.ModuleType: self._module,
            type: self._class,
            np.ndarray: self._array,
            list: self._sequence,
            tuple: self._sequence,
            set: self._set,
            frozenset: self._set,
            dict: self._dict,
        }

    def of(self, value: Any) -> str:
        kind = type(value)
        if kind in _PLAIN:
            return _joined([kind.__name__, repr(value)])
        if (found := self._known.get(id(value))) is None:
            self._known[id(value)] = "inside itself", value
            found = self._known[id(value)] = _joined(self._parts(value)), value
        return found[0]

    def _parts(self, value: Any) -> Iterator[str]:
        if isinstance(value, _GENERATORS) or _name(type(value)) == "torch._C.Generator":
            return iter([_name(type(value))])
        for kind, walk in self._walks.items():
            if isinstance(value, kind):
                return walk(value)
        for kind, names in _MEMBERS.items():
            if isinstance(value, kind):
                return iter([kind.__name__, *(self.of(getattr(value, name)) for name in names)])
        return self._object(value)

    def _sequence(self, value: list[Any] | tuple[Any, ...]) -> Iterator[str]:
        yield from (self.of(type(value)), str(len(value)))
        if _are_plain(value):  # a million numbers take a tenth of a second
            yield xxhash.xxh3_64_hexdigest(marshal.dumps(list(value), _MARSHAL))
        else:
            yield from map(self.of, _spread(value))

    def _set(self, value: set[Any] | frozenset[Any]) -> Iterator[str]:
        yield from (self.of(type(value)), str(len(value)))
        if _are_plain(value):
            yield _digest_of_unordered(value)
        elif len(value) <= _MANY:
            yield from sorted(map(self.of, value))

    def _dict(self, value: dict[Any, Any]) -> Iterator[str]:
        yield from (self.of(type(value)), str(len(value)))
        if _are_plain(value) and _are_plain(value.values()):
            yield _digest_of_unordered(value.items())
        else:
            keys = sorted(value, key=repr) if len(value) > _MANY and _are_plain(value) else list(value)
            yield from sorted(_joined([self.of(key), self.of(value[key])]) for key in _spread(keys))

    def _array(self, value: Any) -> Iterator[str]:
        if value.dtype.hasobject:
            yield self.of(value.tolist())
            return
        yield from ("array", value.dtype.str, repr(value.shape))
        if value.nbytes > _LARGE_BYTES:
            value = _spread(value)
        yield xxhash.xxh3_64_hexdigest(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)

    def _module(self, module: types.ModuleType) -> Iterator[str]:
        yield from ("module", "" if _is_users(module.__name__, _file_of(module)) else module.__name__)

    def _object(self, value: Any) -> Iterator[str]:
        """Yield the class of an object, and the state with which it is pickled."""
        yield self.of(type(value))
        if hasattr(value, "__wrapped__"):  # a cached function, which is pickled by its name
            yield self.of(value.__wrapped__)
        if (array := _as_array(value)) is not None:
            yield self.of(array)
            return
        try:
            reduce = copyreg.dispatch_table.get(type(value))
            reduced = value.__reduce_ex__(4) if reduce is None else reduce(value)
        except Exception:  # noqa: BLE001  what does not pickle counts by its class
            return
        if not isinstance(reduced, tuple):
            yield f"{getattr(value, '__module__', '')}.{reduced}"
            return
        make, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
        yield self.of(make)
        # Without the class, which `__newobj__` is given first.
        yield from (self.of(one) for one in arguments if one is not type(value))
        yield from (self.of(state), self.of(list(items or ())), self.of(dict(pairs or ())))

    def _class(self, kind: type) -> Iterator[str]:
        module = sys.modules.get(kind.__module__)
        if not _is_users(kind.__module__, "" if module is None else _file_of(module)):
            yield _name(kind)
            return
        yield "class"
        yield from map(self.of, kind.__bases__)
        for name, member in sorted(vars(kind).items()):
            # What else has two underscores is made by Python, or by a decorator of a library.
            is_own = not name.startswith("__") or isinstance(member, types.FunctionType)
            if is_own and name not in _NO_CONTENT and name != "_abc_impl":
                yield from (name, self.of(member))

    def _function(self, fn: types.FunctionType) -> Iterator[str]:
        yield from (self.of(fn.__defaults__), self.of(fn.__kwdefaults__))
        cells = dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True))
        if not _is_users(str(fn.__globals__.get("__name__", "")), str(fn.__globals__.get("__file__", ""))):
            # A decorator of a library has the user's function in a cell.
            yield from (_name(fn), *(self.of(_content(cell)) for cell in cells.values()))
            return
        yield self.of(fn.__code__)
        bound = {name: _content(cell) for name, cell in cells.items()}
        for path in sorted(set(_paths(fn.__code__))):
            for scope in (bound, fn.__globals__):
                if path[0] in scope:
                    yield from (".".join(path), self._used(scope[path[0]], path[1:]))
                    break
        for name in sorted(set(_imported(fn.__code__, str(fn.__globals__.get("__package__") or "")))):
            if (code := _code_of_module(name)) is not None:
                yield from (name, self.of(code))

    def _used(self, value: Any, path: tuple[str, ...]) -> str:
        """The digest of what a path of attributes leads to, or of the object whose method or property it
        has.
        """
        is_module = isinstance(value, types.ModuleType)
        if path and is_module and not _is_users(value.__name__, _file_of(value)):
            return _joined([value.__name__, *path])
        if path and not isinstance(value, type) and path[0] in getattr(value, "__dict__", {}):
            return self._used(vars(value)[path[0]], path[1:])
        return self.of(value)

    def _code(self, code: types.CodeType) -> Iterator[str]:
        arguments = code.co_argcount + code.co_kwonlyargcount
        yield repr((code.co_varnames[:arguments], code.co_posonlyargcount, code.co_flags & _FLAGS))
        for step in dis.get_instructions(code):
            # Not the bytes of the code: their numbers of constants change with the docstring.
            yield step.opname
            yield self.of(step.argval) if step.opcode in dis.hasconst else repr(step.argval)
        yield getattr(code, "co_exceptiontable", b"").hex()


def _joined(parts: Iterable[str]) -> str:
    state = xxhash.xxh3_64()
    for part in parts:
        encoded = part.encode("utf-8", "surrogatepass")
        state.update(f"{len(encoded)}:".encode() + encoded)
    return state.hexdigest()


def _name(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def _file_of(module: types.ModuleType) -> str:
    return str(getattr(module, "__file__", None) or "")


def _is_users(module: str, file: str) -> bool:
    """True for code of the user's: neither of the standard library, nor installed, nor of this package."""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names or top == "cachestream":
        return False
    folder = os.path.dirname(str(getattr(sys.modules.get(top), "__file__", None) or file))
    if os.path.basename(folder) == top:
        folder = os.path.dirname(folder)
    return _LIBRARY_FOLDERS.isdisjoint(file.split(os.sep)) and not _is_installed_to(folder)


@functools.lru_cache
def _is_installed_to(folder: str) -> bool:
    """True for a folder that 'pip install --target' has filled."""
    try:
        return any(name.endswith(".dist-info") for name in os.listdir(folder or os.curdir))
    except OSError:
        return False


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet bound
        return None


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)


def _paths(code: types.CodeType) -> Iterator[tuple[str, ...]]:
    """Yield the globals and closed-over variables that code uses, each with the attributes taken of it."""
    for one in _nested(code):
        path: tuple[str, ...] = ()
        for step in dis.get_instructions(one):
            if path and step.opname in _ATTRIBUTES:
                path += (step.argval,)
            elif step.opname != "EXTENDED_ARG":
                if path:
                    yield path
                path = (step.argval,) if step.opname in _LOADS else ()


def _imported(code: types.CodeType, package: str) -> Iterator[str]:
    """Yield the absolute names of the modules that code imports itself."""
    for one in _nested(code):
        level = 0
        for step in dis.get_instructions(one):
            if step.opname == "IMPORT_NAME":
                parents = package.split(".")[: max(0, package.count(".") + 2 - level)] if level else []
                yield ".".join(filter(None, [*parents, step.argval]))
            elif isinstance(step.argval, int):
                level = step.argval  # the level is the last number before the name


def _code_of_module(name: str) -> types.CodeType | None:
    """The code of a module of the user's, which is not imported for that; None for others."""
    places: Any = None
    code = None
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        path = ".".join(parts[:count])
        try:
            spec = machinery.PathFinder.find_spec(path, places)
            if spec is None or not _is_users(path, spec.origin or ""):
                return None
            code = spec.loader.get_code(path) if isinstance(spec.loader, machinery.SourceFileLoader) else None
        except (ImportError, SyntaxError, ValueError, OSError):
            return None  # the transform fails there, too
        places = spec.submodule_search_locations or ()
    return code


def _are_plain(values: Iterable[Any]) -> bool:
    return set(map(type, values)) <= _PLAIN


def _digest_of_unordered(values: Iterable[Any]) -> str:
    return xxhash.xxh3_64_hexdigest(b"".join(sorted(marshal.dumps(value, _MARSHAL) for value in values)))


def _spread(values: Any) -> Any:
    """The values; of very many, some that are spread over them."""
    return values[:: max(1, len(values) // _MANY)]


def _as_array(value: Any) -> Any:
    """The values of a tensor as an array; None for other objects, and for tensors that numpy cannot hold."""
    torch: Mapping[str, Any] = vars(sys.modules["torch"]) if "torch" in sys.modules else {}
    if not torch or not isinstance(value, torch["Tensor"]):
        return None
    try:
        dense = value.detach().cpu().contiguous()
        return dense.view(torch["uint16"]).numpy() if dense.dtype == torch["bfloat16"] else dense.numpy()
    except (RuntimeError, TypeError):
        return None
