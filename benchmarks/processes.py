"""Two processes against one: equal results, and the time of a round."""

from benchmarks._runs import run, seconds_a_round

COMMON = [
    "backbone.weights=random", "rounds=4", "partition=iid", "partition.clients=4", "data.train_per_product=40",
]  # fmt: skip


def main() -> None:
    """Prints seconds a round (ResNet-18, 128 px, 200 training images on 4 clients), and how far results differ."""
    results = {n: run(*COMMON, "fabric.accelerator=cpu", f"fabric.devices={n}") for n in (1, 2)}
    seconds = {n: seconds_a_round(result) for n, result in results.items()}
    difference = max(
        abs(results[1]["last"][name]["mean"] - results[2]["last"][name]["mean"])
        for name in ("i_auroc", "p_auroc")
    )
    print(f"1 process {seconds[1]:.2f} s, 2 processes {seconds[2]:.2f} s: {seconds[1] / seconds[2]:.2f}x")
    print(f"largest difference of a metric: {difference:.1e}")


if __name__ == "__main__":
    main()
