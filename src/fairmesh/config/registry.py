"""Which classes experiment files may name, by role."""

FAMILIES: dict[type, dict[str, type]] = {}  # role -> name in files -> member

IMPORT = "import"  # the name under which a file names any class of a role by its import path


def registered(role: type) -> dict[str, type]:
    """Returns every registered member of a role, by its name in files."""
    return dict(FAMILIES[role])


def is_registered(kind: type) -> bool:
    """Returns whether a class has a name of its own in files."""
    return any(kind in table.values() for table in FAMILIES.values())


def registered_name(thing: object) -> str:
    """Returns the name of an object's class in experiment files, or the class's own name if it is not registered."""
    for table in FAMILIES.values():
        for name, member in table.items():
            if type(thing) is member:
                return name
    return type(thing).__name__


def role_of(kind: type) -> type | None:
    """Returns the role that a class is registered for or derived from, or None."""
    for role, table in FAMILIES.items():
        if kind is role or kind in table.values():
            return role
    return next((role for role in FAMILIES if issubclass(kind, role)), None)
