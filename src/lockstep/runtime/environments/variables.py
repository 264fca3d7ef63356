"""Environment variables as values, with errors that name the variable."""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.errors import UserError


def whole_number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return the variable as an int, or `default` if it is not set."""
    text = env.get(name)
    if text is None and default is not None:
        return default

    try:
        return int(text or "")
    except ValueError:
        found = f"{name}={text!r}" if text is not None else f"{name} is not set"
        raise UserError(
            f"the environment variable {name} must be a whole number",
            found,
            f"set {name} as your launcher does, or unset it",
        ) from None
