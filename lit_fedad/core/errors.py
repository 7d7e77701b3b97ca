"""The one exception whose message is meant for the person at the keyboard, and what other errors say."""

ANEW = "train with another out=DIR, or fresh=true"
"""What a run is begun anew by; of real sites `FederationFolder.advised` puts other words in its place."""

RESTORE = f"restore it from a copy, or {ANEW}"
"""What to do about a file of a run that was changed or is missing."""


class UserError(Exception):
    """Bad input that the user can mend.

    The message is one clear line: it names the file, key or client and says what to do. The command line prints
    it without a traceback and exits with status 2.
    """


def not_there(holder: object, name: str) -> NotImplementedError:
    """Builds the error of a method that a class has to define, and does not.

    Example:
        >>> str(not_there(1, "send"))
        'int has no method send; define it (docs/extend.md)'
    """
    return NotImplementedError(f"{type(holder).__name__} has no method {name}; define it (docs/extend.md)")


def first_line(error: BaseException) -> str:
    r"""Returns the first line of an error's message, or the name of its type if it has none.

    Example:
        >>> first_line(ValueError("odd\nvery odd")), first_line(ValueError())
        ('odd', 'ValueError')
    """
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def one_line(error: BaseException) -> str:
    r"""Returns an error's whole message in one line.

    Example:
        >>> one_line(ValueError("odd\n  very odd"))
        'odd very odd'
    """
    return " ".join(str(error).split())


def first_sentence(error: BaseException) -> str:
    """Returns the first sentence of an error of torch, whose next one advises to read the file without protection.

    Example:
        >>> first_sentence(ValueError("Weights only load failed. Set weights_only to False."))
        'Weights only load failed'
    """
    return (one_line(error) or type(error).__name__).partition(". ")[0][:160]


def is_out_of_memory(error: BaseException) -> bool:
    """Tells whether an error says that memory could not be had; torch has no class for that of the processor."""
    told = ("out of memory", "can't allocate memory")
    return isinstance(error, MemoryError) or any(words in str(error) for words in told)
