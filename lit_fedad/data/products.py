"""Choice of the products of a set that are read."""

import difflib
from collections import Counter
from collections.abc import Sequence
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
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise UserError(f"{where}: no product '{name}'; the nearest is '{nearest}'")
        if count > 1:
            raise UserError(f"products: {name} is listed twice; remove one")
    return names
