"""Which classes experiment files may name, by role."""

FAMILIES: dict[type, dict[str, type]] = {}  # role -> name in files -> member


def registered(role: type) -> dict[str, type]:
    """Every registered member of a role, by its name in files."""
    return dict(FAMILIES[role])


def registered_name(thing: object) -> str:
    """The name that experiment files use for an object's class; that of the class where it is not registered."""
    for table in FAMILIES.values():
        for name, member in table.items():
            if type(thing) is member:
                return name
    return type(thing).__name__


def role_of(kind: type) -> type | None:
    return next((role for role, table in FAMILIES.items() if kind in table.values()), None)
