"""Choice of what is read of a set by names that users give."""

import difflib
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path

from lit_fedad.core.errors import UserError


def choose_products(products: Sequence[str | int] | None, known: Sequence[str], where: Path) -> list[str]:
    """Checks the requested products against those of the set.

    Args:
        products: Names in the order wanted; None takes all. A number stands for its name.
        known: Every product of the set, at least one.
        where: The file or folder that holds them, for messages.

    Returns:
        Names of products, each once.

    Raises:
        UserError: A product is unknown (naming the nearest) or listed twice, or the list is empty.

    Example:
        >>> choose_products(["pcb2", "pcb1"], ["candle", "pcb1", "pcb2"], Path("VisA"))
        ['pcb2', 'pcb1']
    """
    if products is None:
        return list(known)
    names = [str(name) for name in ([products] if isinstance(products, str) else products)]
    if not names:
        raise UserError("products: the list is empty; name at least one product, or leave it out")
    for name, count in Counter(names).items():
        require_known(name, known, f"{where}: no product '{name}'")
        if count > 1:
            raise UserError(f"products: {name} is listed twice; remove one")
    return names


def require_known(word: str, known: Collection[str], problem: str) -> None:
    """Refuses a word that is not known, and names the nearest that is.

    Raises:
        UserError: It is none of them.
    """
    if word not in known:
        nearest = difflib.get_close_matches(word, sorted(known), n=1, cutoff=0.0)
        raise UserError(problem + (f"; the nearest is '{nearest[0]}'" if nearest else "; it is empty"))
