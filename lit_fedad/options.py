"""The words of the command line."""

from lit_fedad.errors import UserError


def key_and_value(word: str) -> tuple[str, str]:
    """Splits a word at its first ``=``.

    Raises:
        UserError: There is none.
    """
    key, equals, value = word.partition("=")
    if not equals:
        raise UserError(f"'{word}' is not of the form key=value")
    return key, value
