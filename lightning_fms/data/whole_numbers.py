"""Numbers that users give: whole, and not too low. Truth values are no numbers here, although Python counts them as such."""


def check_positive(**values: int | None) -> None:
    """Refuse what is no whole number of at least 1; `None` passes."""
    check_whole(1, **{name: value for name, value in values.items() if value is not None})


def check_whole(lowest: int | None = None, **values: int) -> None:
    """Refuse what is no whole number, or below the lowest."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or (lowest is not None and value < lowest):
            least = "" if lowest is None else f" of at least {lowest}"
            raise ValueError(f"{name}={value!r} must be a whole number{least}")
