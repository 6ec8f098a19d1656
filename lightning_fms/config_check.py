"""Checks a config against the signatures of what it names, before anything is built.

Hydra finds a misspelled key only where the YAML has the right one, and an argument of the wrong type only when some
constructor trips over it, minutes later and far away. Every `_target_` names a callable whose signature says which keys
and types it takes, so a config can be checked without running anything. A mistake is one line: the value, what is wrong
with it, the fix.

An annotation that says nothing about plain values (a type variable, a protocol) is not checked.
"""

import difflib
import inspect
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, Union

from hydra.utils import get_object

MISSING = "???"
HYDRA_KEYS = {"_target_", "_partial_", "_convert_", "_recursive_", "_args_"}


class ConfigError(ValueError):
    """A mistake in the config, said in one line."""


def check_targets(config: Any, supplied: Collection[str] = (), path: str = "") -> None:
    """Check every node with a `_target_` in a plain, resolved config.

    Args:
        config: nested dicts, lists and plain values.
        supplied: dotted paths of arguments that the app fills in by itself, which may be missing or `???`.
        path: dotted path of `config`.

    Raises:
        ConfigError: for the first mistake: a target that cannot be imported, an unknown, missing or ill-typed argument.
    """
    if isinstance(config, Mapping):
        if "_target_" in config:
            _check_node(config, supplied, path)
        for key, value in config.items():
            check_targets(value, supplied, _join(path, key))
    elif isinstance(config, list | tuple):
        for index, value in enumerate(config):
            check_targets(value, supplied, _join(path, index))


def _check_node(node: Mapping[str, Any], supplied: Collection[str], path: str) -> None:
    target = _import(node["_target_"], path)
    signature = _signature(target)
    if signature is None:
        return
    parameters = {
        name: parameter
        for name, parameter in signature.parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    name = str(node["_target_"]).rpartition(".")[2]
    given = {key: value for key, value in node.items() if key not in HYDRA_KEYS}
    for key, value in given.items():
        where = _join(path, key)
        if key not in parameters and not takes_any:
            raise ConfigError(f"{where}={shown(value)}: {name} has no argument {key!r}{_nearest(key, parameters)}")
        if value == MISSING and where not in supplied:
            raise ConfigError(f"{where} is missing: {name} needs it; give {where}=<value>")
    if not node.get("_partial_") and not node.get("_args_"):
        for key, parameter in parameters.items():
            required = parameter.default is parameter.empty and key not in given
            if required and _join(path, key) not in supplied:
                raise ConfigError(f"{path}: {name} needs {key!r}; give +{_join(path, key)}=<value>")
    hints = _hints(target)
    for key, value in given.items():
        wrong = key in hints and value != MISSING and not matches(value, hints[key])
        if wrong:
            whole = isinstance(value, float) and value.is_integer() and matches(int(value), hints[key])
            hint = f"; write {int(value)}" if whole else ""
            raise ConfigError(f"{_join(path, key)}={shown(value)}: {name} wants {described(hints[key])}{hint}")


def matches(value: Any, hint: Any) -> bool:
    """Whether a plain config value can be an argument annotated `hint`; true where that cannot be decided."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(value, Mapping) and "_target_" in value:
        return hint not in (bool, int, float, str)  # It becomes an object.
    if origin in (Union, types.UnionType):
        return any(matches(value, choice) for choice in arguments)
    if origin is Literal:
        return value in arguments
    if hint is None or hint is type(None):
        return value is None
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint in (bool, str):
        return isinstance(value, hint)
    kind = origin or hint
    if kind in (list, tuple, Sequence):
        elements = [a for a in arguments if a is not Ellipsis]
        same = elements * len(value) if len(elements) == 1 and isinstance(value, list) else elements
        return isinstance(value, list) and (not same or _match_all(value, same))
    if kind in (dict, Mapping):
        return isinstance(value, Mapping)
    if kind is Any or not isinstance(kind, type):
        return True
    try:
        return isinstance(value, kind)
    except TypeError:  # A protocol that cannot be asked.
        return True


def _match_all(values: list[Any], hints: list[Any]) -> bool:
    return len(values) == len(hints) and all(matches(v, h) for v, h in zip(values, hints, strict=True))


def described(hint: Any) -> str:
    """A type as a reader of the message would write it."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(described(choice) for choice in arguments)
    if origin is Literal:
        return " or ".join(repr(choice) for choice in arguments)
    if origin in (tuple, list, Sequence):
        of = dict.fromkeys(described(argument) for argument in arguments if argument is not Ellipsis)
        count = f" of {len(arguments)}" if origin is tuple and Ellipsis not in arguments else ""
        return f"a list{count}, written '[a, b]', each {' or '.join(of)}" if of else "a list, written '[a, b]'"
    if origin in (dict, Mapping):
        return "a mapping, written '{name: value}'"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", type(None): "null"}
    return names.get(hint) or str(hint if origin else getattr(hint, "__name__", hint))


def shown(value: Any) -> str:
    """A config value, short, as it is written on the command line."""
    plain = {True: "true", False: "false", None: "null"}
    text = plain[value] if value is None or isinstance(value, bool) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def targets_of(config: Any) -> Iterator[str]:
    """Every `_target_` in a plain config."""
    values = config.values() if isinstance(config, Mapping) else config if isinstance(config, list) else ()
    if isinstance(config, Mapping) and "_target_" in config:
        yield config["_target_"]
    for value in values:
        yield from targets_of(value)


def _import(name: Any, path: str) -> Callable[..., Any]:
    try:
        target = get_object(str(name))
    except Exception as error:  # Whatever an import can raise, the mistake to report is the name.
        raise ConfigError(f"{_join(path, '_target_')}={name}: cannot be imported ({_first_line(error)})") from error
    if not callable(target):
        raise ConfigError(f"{_join(path, '_target_')}={name}: is no class or function")
    return target


def _signature(target: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(target)
    except ValueError:  # Some builtins have none.
        return None


def _hints(target: Callable[..., Any]) -> dict[str, Any]:
    function: Any = getattr(target, "__init__", target) if isinstance(target, type) else target
    try:
        return typing.get_type_hints(inspect.unwrap(function))
    except Exception:  # Annotations may name what exists only for type checkers.
        return {}


def _nearest(key: str, names: Collection[str]) -> str:
    found = difflib.get_close_matches(str(key), names, n=1)
    return f"; did you mean {found[0]!r}?" if found else f"; it has {', '.join(names) or 'none'}"


def _first_line(error: BaseException) -> str:
    return next(iter(str(error.__cause__ or error).splitlines()), type(error).__name__)


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)
