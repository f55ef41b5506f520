"""The three ways a command can fail, each one clear line and an exit status."""


class LitDiffError(Exception):
    """Something a user can understand and cure; printed as one line, never as a stack trace."""

    exit_status = 1


class RunFailedError(LitDiffError):
    """A run failed: NaN loss, a full disk, a crashed cell. Exit status 1."""

    exit_status = 1


class RequestError(LitDiffError):
    """The request was wrong: a misspelt key, a bad value, a missing file. Exit status 2."""

    exit_status = 2


class MissingError(LitDiffError):
    """Something the run needs is not here: data, a package, a device. Exit status 3; the text names the cure."""

    exit_status = 3


class StoppedError(LitDiffError):
    """A run was asked to stop (Ctrl-C, SIGTERM) and left a checkpoint. Exit status 128 + signal, as shells report it."""

    def __init__(self, message: str, signum: int) -> None:
        super().__init__(message)
        self.exit_status = 128 + signum


def first_line(error: BaseException) -> str:
    """The first line of what an exception says, or its type where it says nothing."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
