"""Dataclasses of plain values as JSON, and back by the types of their fields."""

from __future__ import annotations

import collections.abc
import dataclasses
import types
import typing
from typing import Any

import numpy as np


def to_json(value: Any) -> Any:
    """What `json.dumps` takes: a dataclass becomes an object without the fields at their default.

    Floats, and those of arrays, come back as exactly what they were. TypeError for what is none
    of: a dataclass, an array, a number, text, None, and lists and mappings of these.
    """
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    if dataclasses.is_dataclass(value):
        pairs = ((field, getattr(value, field.name)) for field in dataclasses.fields(value))
        return {f.name: to_json(given) for f, given in pairs if not _is_default(f, given)}
    if isinstance(value, collections.abc.Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_json(item) for item in value]
    raise TypeError(f"{value!r:.100} cannot be written as JSON")


def from_json(kind: Any, value: Any) -> Any:
    """The value of type `kind` that `to_json` made this of. ValueError: it did not."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return from_json(_member(args, value), value)
    if dataclasses.is_dataclass(kind):
        return _object(kind, value)
    if isinstance(kind, type) and issubclass(kind, tuple) and kind is not tuple:  # a NamedTuple
        given = zip(typing.get_type_hints(kind).values(), _expect(list, value), strict=True)
        return kind(*(from_json(a, item) for a, item in given))
    if origin is np.ndarray:
        return np.array(_expect(list, value), typing.get_args(args[1])[0])
    if origin in (tuple, list, collections.abc.Sequence):
        items = _expect(list, value)
        if origin is tuple and args[1:] != (...,):
            return tuple(from_json(a, item) for a, item in zip(args, items, strict=True))
        return tuple(from_json(args[0], item) for item in items)
    if origin in (dict, collections.abc.Mapping):
        pairs = _expect(dict, value).items()
        return {args[0](key): from_json(args[1], item) for key, item in pairs}
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return value  # written as such
    return _expect(kind, value)


def _is_default(field: dataclasses.Field[Any], value: Any) -> bool:
    return type(value) is type(field.default) and bool(value == field.default)


def _object(kind: Any, value: Any) -> Any:
    types_, given = typing.get_type_hints(kind), _expect(dict, value)
    names = {field.name for field in dataclasses.fields(kind)}
    if not given.keys() <= names:
        raise ValueError(f"{kind.__name__} has no {sorted(given.keys() - names)[0]!r:.100}")
    try:
        return kind(**{name: from_json(types_[name], item) for name, item in given.items()})
    except TypeError as error:  # a field is missing
        raise ValueError(f"{kind.__name__}: {error}") from error


def _member(kinds: tuple[Any, ...], value: Any) -> Any:
    """The one of the types in a union that the value can be of."""
    for kind in kinds:
        base = typing.get_origin(kind) or kind
        written: Any = base
        if dataclasses.is_dataclass(base) or base in (dict, collections.abc.Mapping):
            written = dict
        elif base in (np.ndarray, tuple, list, collections.abc.Sequence):
            written = list
        elif base is float:
            written = (int, float)
        if isinstance(value, written):
            return kind
    raise ValueError(f"{value!r:.100} is none of {kinds}")


def _expect(kind: Any, value: Any) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{value!r:.100} is no {kind.__name__}")
    return value
