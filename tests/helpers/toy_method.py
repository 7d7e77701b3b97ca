"""The toy method of the federation's tests, computed by hand."""


def by_hand(rounds: int) -> list[float]:
    """One step of 0.5 for client 0 (target 1), three for client 1 (target 4), averaged 1 : 3."""
    w, path = 0.0, []
    for _ in range(rounds):
        first = w + 0.5 * (1 - w)
        second = w
        for _ in range(3):
            second += 0.5 * (4 - second)
        w = 0.25 * first + 0.75 * second
        path.append(w)
    return path
