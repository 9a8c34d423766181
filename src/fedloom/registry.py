"""What people choose by name: values of this package, and those of plug-ins, which other packages bring.

A plug-in is an entry point of a group such as ``fedloom.methods``, or is named by its import path,
``package.module:VALUE``. Nothing of it is imported until it is asked for, nor where only some packages are allowed and
its own is not among them.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from types import ModuleType
from typing import Any, Generic, TypeVar, cast

from fedloom.errors import ConfigError, FedloomWarning, unknown

T = TypeVar("T")
HOUSE = "fedloom"  # the package that a value comes from, where no plug-in brings it
IMPORT_PATH = re.compile(r"\w+(\.\w+)*:\w+", re.ASCII)


class NotAllowedError(ConfigError):
    """A plug-in is asked for whose package, in this version, is not among those that are allowed."""

    def __init__(self, title: str, origin: str, allowed: Iterable[str]) -> None:
        listed = ", ".join(allowed) or "none"
        super().__init__(f"{title} comes from {origin}, which is not allowed here (allowed: {listed})")
        self.title = title


_allowed: tuple[str, ...] | None = None
_used: dict[str, str] = {}


def allow_only(packages: Iterable[str] | None) -> None:
    """From now on, in all of this process, plug-ins of no other packages, as "name==version", are imported.

    None allows all.
    """
    global _allowed  # and no context variable, which threads would escape
    _allowed = None if packages is None else tuple(pinned(*package.split("==")) for package in packages)


def allowed() -> tuple[str, ...] | None:
    """The packages whose plug-ins may be imported; None: all."""
    return _allowed


def packages_used() -> dict[str, str]:
    """The packages whose plug-ins this process has imported, each with its version."""
    return dict(_used)


def pinned(name: str, version: str) -> str:
    """A package in a version, by the one spelling of its name."""
    return f"{re.sub(r'[-_.]+', '-', name).lower()}=={version}"


@dataclass(frozen=True)
class Plugin:
    """Where a plug-in's value is found, and the packages, as ``name==version``, that its module belongs to."""

    path: str  # package.module:VALUE
    packages: tuple[str, ...]  # none: a module that no installed package brings

    @property
    def origin(self) -> str:
        """Its packages in words."""
        return " and ".join(self.packages) or "no installed package"

    def load(self, title: str) -> Any:
        """Import it, if its packages are allowed; ``title`` is what sentences call it."""
        if _allowed is not None and not (self.packages and set(self.packages) <= set(_allowed)):
            raise NotAllowedError(title, self.origin, _allowed)
        module, _, value = self.path.partition(":")
        try:
            found = getattr(importlib.import_module(module), value)
        except Exception as error:  # a foreign module may raise anything while it is imported
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            hint = "" if self.packages else "; have it on PYTHONPATH"
            raise ConfigError(
                f"{title} of {self.origin} cannot be imported from '{self.path}' ({reason}){hint}"
            ) from error
        for package in self.packages:
            name, _, number = package.partition("==")
            _used[name] = number
        return found


class Registry(Generic[T]):
    """Values of one kind by name.

    ``noun`` is what sentences call one, ``group`` the entry points' name for them, ``kind`` the type of a value, or
    the class that values derive from where they are ``classes`` themselves.
    """

    def __init__(
        self, noun: str, group: str, kind: type, own: Callable[[], Mapping[str, T]], *, classes: bool = False
    ) -> None:
        self.noun, self.group, self.kind, self._find, self.classes = noun, group, kind, own, classes

    @cached_property
    def own(self) -> dict[str, T]:
        """Those of this package, and whatever a program adds while it runs."""
        return dict(self._find())

    def __iter__(self) -> Iterator[str]:
        """All names, those of plug-ins last; no plug-in is imported."""
        return iter(dict.fromkeys((*self.own, *_installed(self.group))))

    def __getitem__(self, name: str) -> T:
        """The value of that name."""
        plugins = _installed(self.group).get(name, ())
        origins = [HOUSE] * (name in self.own) + [plugin.origin for plugin in plugins]
        if len(origins) > 1:
            raise ConfigError(f"{self.noun} '{name}' comes from {' and from '.join(origins)}; uninstall one of them")
        if name in self.own:
            return self.own[name]
        if not plugins:
            raise ConfigError(unknown(self.noun, name, self))
        value = self._loaded(name, plugins[0])
        if (itself := getattr(value, "name", name)) != name:
            raise ConfigError(f"{self.noun} '{name}' of {origins[0]} calls itself '{itself}'; give it one name")
        return value

    def get(self, name: str, field: str) -> T:
        """The value that a field of the configuration names, which may give its import path instead."""
        try:
            return self._loaded(name, plugin_at(name)) if ":" in name else self[name]
        except NotAllowedError:
            raise
        except ConfigError as error:
            raise ConfigError(f"{field}: {error}") from error

    def _loaded(self, name: str, plugin: Plugin) -> T:
        value = plugin.load(f"{self.noun} '{name}'")
        if not self._fits(value):
            found = f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
            wanted = f"a class that derives from {self.kind.__name__}" if self.classes else f"a {self.kind.__name__}"
            raise ConfigError(f"{self.noun} '{name}' of {plugin.origin} is {found}, not {wanted}")
        return cast("T", value)

    def _fits(self, value: object) -> bool:
        if self.classes:
            return isinstance(value, type) and issubclass(value, self.kind)
        return isinstance(value, self.kind)

    def origin(self, name: str) -> str:
        """The package that a name comes from, with its version where that is a plug-in."""
        if name in self.own:
            return HOUSE
        return " and ".join(plugin.origin for plugin in _installed(self.group).get(name, ()))

    def listed(self) -> Iterator[tuple[str, T]]:
        """Every name with its value; a warning for a plug-in that is broken."""
        for name in self:
            try:
                yield name, self[name]
            except ConfigError as error:
                warnings.warn(str(error), FedloomWarning, stacklevel=2)


def values_in(room: ModuleType, attribute: str) -> dict[str, Any]:
    """By its ``name``, the value that each module of a package gives ``attribute``; adding one is adding a file."""
    modules = (importlib.import_module(f"{room.__name__}.{info.name}") for info in pkgutil.iter_modules(room.__path__))
    values = [getattr(module, attribute) for module in modules if hasattr(module, attribute)]
    return {value.name: value for value in values}


@cache
def _packages_of(module: str) -> tuple[str, ...]:
    from importlib.metadata import packages_distributions, version  # a tenth of the time that --help takes

    return tuple(pinned(name, version(name)) for name in sorted(set(packages_distributions().get(module, ()))))


@cache
def _installed(group: str) -> Mapping[str, tuple[Plugin, ...]]:
    """The plug-ins of a group by name; several of one name are a mistake that shows when one of them is asked for."""
    from importlib.metadata import entry_points

    found: dict[str, tuple[Plugin, ...]] = {}
    for point in entry_points(group=group):
        plugin = Plugin(point.value, (pinned(point.dist.name, point.dist.version),) if point.dist else ())
        found[point.name] = (*found.get(point.name, ()), plugin)
    return found


def plugin_at(path: str) -> Plugin:
    """The plug-in of an import path; its packages are all that bring the path's first part."""
    if not IMPORT_PATH.fullmatch(path):
        raise ConfigError(f"'{path}' is no import path; write package.module:NAME")
    return Plugin(path, _packages_of(path.partition(":")[0].partition(".")[0]))
