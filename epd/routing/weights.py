"""How much of the load is for an instance, as it is written."""

from epd.routing.urls import service_url

MIN_WEIGHT = 0.001
MAX_WEIGHT = 1000.0


def check_weight(weight: float) -> float:
    """A weight: 0, or what can be compared with others.

    Raises:
        ValueError: it is none.
    """
    if weight == 0 or MIN_WEIGHT <= weight <= MAX_WEIGHT:
        return weight
    raise ValueError(f"a weight is 0, or from {MIN_WEIGHT} to {MAX_WEIGHT:.0f}")


def weight_of(written: str) -> tuple[str, float]:
    """The instance's URL and the weight of what is written as `http://host:8001=2`.

    Raises:
        ValueError: it is none. The message quotes no password.
    """
    url, equals, weight = written.rpartition("=")
    try:
        number = float(weight)
    except ValueError:
        equals = ""
    if not equals:
        raise ValueError("is no URL and weight, such as http://host:8001=2")
    return service_url(url), check_weight(number)
