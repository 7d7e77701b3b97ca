"""What people call the folders, columns and labels of their images."""

import re

NORMAL = frozenset(
    (
        *("good", "goods", "normal", "normals", "ok", "okfront", "healthy", "negative", "intact", "clean"),
        *("pass", "passed", "gut", "io", "undamaged", "nodamage", "nodefect", "defectfree", "nondefective"),
        *("notdefective", "notumor", "nofinding", "nocrack", "uncracked", "nonanomalous", "noanomaly"),
        *("accept", "accepted", "acceptable"),
    )
)
"""Folders and labels of normal images, as `bare` has them."""

MASK_NAMES = ("ground_truth", "groundtruth", "gt", "mask", "masks")
"""What folders of masks are called, in lower case; in the layout of MVTec AD the first alone."""

MASKS = frozenset(
    {*MASK_NAMES, "labelmasks", "annotation", "annotations", "labels", "segmentation", "segmentations"}
)
"""Folders of masks, as `bare` has them."""

_MASK = "masks?|gt|ground[-_. ]?truth"
_MASK_OF = re.compile(rf"(?:{_MASK})[-_. ](.+)|(.+)[-_. ](?:{_MASK}|label|seg|segmentation)", re.IGNORECASE)

TRAIN, TEST = ("train", "training"), ("test", "testing", "val", "valid", "validation")
"""Folders of training and of test images."""

LABELS = ("label", "class", "target", "defect", "anomaly", "category", "is_anomaly", "diagnosis", "y")
"""Columns of labels, the likeliest first."""

ZERO, ONE = frozenset({"0", "0.0", "false", "no"}), frozenset({"1", "1.0", "true", "yes"})
"""Labels that say no and yes, in lower case."""

_FILLERS = ("is", "was", "image", "part", "quality", "status", "label", "class")


def says_normal(column: str) -> bool:
    """Tells whether a column of yes and no says yes of normal images.

    Example:
        >>> says_normal("is_good"), says_normal("isNormal"), says_normal("not_good"), says_normal("defect")
        (True, True, False, False)
    """
    words = [word.lower() for word in re.findall("[A-Z]?[a-z]+|[A-Z]+", column)]
    return "".join(word for word in words if word not in _FILLERS) in NORMAL


def masked_name(name: str) -> str | None:
    """Returns what a mask or a folder of masks is called after; None where it is not called as one.

    Example:
        >>> masked_name("000_mask"), masked_name("GT-crack"), masked_name("crack")
        ('000', 'crack', None)
    """
    match = _MASK_OF.fullmatch(name)
    return match and (match[1] or match[2])


def bare(name: str) -> str:
    """Returns a name in lower case, without blanks, ``-``, ``_`` and ``.``."""
    return "".join(letter for letter in name.lower() if letter not in " -_.")
