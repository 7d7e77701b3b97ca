"""Image sets without files, for tests that read no image."""

from pathlib import Path

from lit_fedad.data.sample import ImageSet, Sample


def image_set(*counts: int) -> ImageSet:
    """Builds a set of so many training images of the categories a, b, ..., interleaved, and no test image."""
    samples = [
        Sample(Path(f"{category}/{i:04}.png"), category)
        for category, count in zip("abcdefghij", counts, strict=False)
        for i in range(count)
    ]
    return ImageSet("toy", tuple(sorted(samples, key=lambda sample: sample.path.name)), ())
