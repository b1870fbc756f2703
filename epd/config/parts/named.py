"""How errors name settings."""


def flag_of(field: str) -> str:
    """The flag of a setting."""
    return "--" + field.replace("_", "-")
