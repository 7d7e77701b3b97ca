"""The one exception whose message is meant for the person at the keyboard."""


class UserError(Exception):
    """Bad input that the user can mend.

    The message is one clear line: it names the file, key or client and says what to do. The command line prints
    it without a traceback and exits with status 2.
    """


def first_line(error: BaseException) -> str:
    r"""Returns the first line of an error's message, or the name of its type if it has none.

    Example:
        >>> first_line(ValueError("odd\nvery odd")), first_line(ValueError())
        ('odd', 'ValueError')
    """
    return next(iter(str(error).splitlines()), "") or type(error).__name__
