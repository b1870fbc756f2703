"""Names of settings in error messages."""


def flag_of(field: str) -> str:
    """Return the flag of a setting."""
    return "--" + field.replace("_", "-")
