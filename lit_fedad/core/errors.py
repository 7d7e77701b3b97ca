"""The exception whose message is meant for users, and helpers that shorten the messages of other errors."""

from pathlib import Path

ANEW = "train with another out=DIR, or fresh=true"
"""Advice on how to begin a run again; for runs of real sites `FederationFolder.advised` replaces these words."""

RESTORE = f"restore it from a copy, or {ANEW}"
"""Advice about a file of a run that was changed or is missing."""


class UserError(Exception):
    """The error for bad input, which the user can correct.

    The message is one clear line: it names the file, key or client and says what to do. The command line prints
    it without a traceback and exits with status 2.
    """


def not_there(holder: object, name: str) -> NotImplementedError:
    """Builds the error for a method that a class must define, but does not.

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
    """Returns the first sentence of an error of torch; the next one would advise to read the file without protection.

    Example:
        >>> first_sentence(ValueError("Weights only load failed. Set weights_only to False."))
        'Weights only load failed'
    """
    return (one_line(error) or type(error).__name__).partition(". ")[0][:160]


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether memory was exhausted; the text is searched, as torch has no class for this error on CPUs."""
    phrases = ("out of memory", "can't allocate memory")
    return isinstance(error, MemoryError) or any(phrase in str(error) for phrase in phrases)


def lies_elsewhere(error: Exception, file: Path, *parts: object) -> bool:
    """Returns whether an error at a state that was read from a file may have another cause than the file.

    Memory may be exhausted, or a class of the user's own have a defect; such an error then notes the file.

    Args:
        error: The error.
        file: The file, or the folder of a checkpoint.
        *parts: The objects that work with the state.
    """
    if is_out_of_memory(error):
        return True
    if all(type(part).__module__.startswith("lit_fedad.") for part in parts):
        return False
    error.add_note(f"The state was read from {file}.")
    return True
