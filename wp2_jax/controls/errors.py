"""Errors of the controls: each has a `kind` (a short stable name) and a message for people."""


class ControlError(ValueError):
    """A control that cannot be used.

    `kind` is a short stable name of the mistake (the same names as in the golden input file); `str()` is the
    message, which quotes the value, says what is allowed and how to repair it.
    """

    def __init__(self, kind: str, message: str):
        # Both go into args, so that the error survives pickling between loader processes.
        super().__init__(kind, message)
        self.kind = kind
        self.message = message

    def __str__(self) -> str:
        return self.message


class ActionError(ControlError):
    """An action string, row, key state or camera path that is not an action."""


class CaptionError(ControlError):
    """A caption or prompt schedule that cannot be read."""


class GeometryError(ControlError):
    """A picture size, clip length or memory option that the model cannot take."""


class ImageError(ControlError):
    """A picture that cannot be decoded or fitted."""


class ControlWarning(UserWarning):
    """A control was changed before use (clipped, trimmed); the message says how."""
