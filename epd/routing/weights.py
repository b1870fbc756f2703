"""Weights of instances, as written in settings."""

from epd.routing.urls import service_url

MIN_WEIGHT = 0.001
MAX_WEIGHT = 1000.0


def check_weight(weight: float) -> float:
    """Return a valid weight: 0, or one within the bounds.

    Raises:
        ValueError: the weight is invalid.
    """
    if weight == 0 or MIN_WEIGHT <= weight <= MAX_WEIGHT:
        return weight
    raise ValueError(f"a weight is 0, or from {MIN_WEIGHT} to {MAX_WEIGHT:.0f}")


def weight_of(written: str) -> tuple[str, float]:
    """Return the instance's URL and the weight of a text such as `http://host:8001=2`.

    Raises:
        ValueError: the text is invalid. The message contains no password.
    """
    url, equals, weight = written.rpartition("=")
    try:
        number = float(weight)
    except ValueError:
        equals = ""
    if not equals:
        raise ValueError("is not URL=WEIGHT, such as http://host:8001=2")
    return service_url(url), check_weight(number)
