"""Numbers of examples of properties that need more or fewer than the default."""

from hypothesis import settings


def scaled(examples: int) -> int:
    """Return this number of examples in proportion to the profile of the run.

    A number that a test sets itself would replace the one of the profile.
    """
    usual = settings.get_profile("default").max_examples
    return max(1, examples * settings().max_examples // usual)
