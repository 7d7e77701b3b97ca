"""Facts about the public sets behind the data configurations: addresses, licences, papers and sizes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

UNSTATED = "see the page"


class Counts(NamedTuple):
    """Numbers of images of one product type.

    Attributes:
        train: Normal training images.
        good: Normal test images.
        anomalous: Anomalous test images.
    """

    train: int
    good: int
    anomalous: int


@dataclass(frozen=True)
class Source:
    """A download.

    Attributes:
        title: Name of the set.
        address: Page of the download.
        licence: Licence; `UNSTATED` where it is not established.
        paper: Paper to cite; `UNSTATED` where the page names it.
    """

    title: str
    address: str
    licence: str
    paper: str


@dataclass(frozen=True)
class Card:
    """Description of a data configuration.

    Attributes:
        title: Its contents in one line.
        kind: The measurements that it allows.
        sources: Downloads that it needs.
        counts: Product -> official size; only where it is established, and where the split is the set's own.
        layout: What its layout was taken from, where no download was at hand; empty where this is not recorded.
    """

    title: str
    kind: Literal["detection, localisation", "detection", "classification", "semantic detection"]
    sources: tuple[Source, ...]
    counts: Mapping[str, Counts] = field(default_factory=dict)
    layout: str = ""


_MVTEC_AD = Source(
    "MVTec AD",
    "https://www.mvtec.com/company/research/datasets/mvtec-ad",
    "CC BY-NC-SA 4.0",
    "Bergmann et al., CVPR 2019, doi:10.1109/CVPR.2019.00982",
)
_MPDD = Source(
    "MPDD",
    "https://github.com/stepanje/MPDD",
    UNSTATED,
    "Jezek et al., ICUMT 2021, doi:10.1109/ICUMT54235.2021.9631567",
)
_VISA = Source(
    "VisA",
    "https://github.com/amazon-science/spot-diff",
    "CC BY 4.0",
    "Zou et al., ECCV 2022, arXiv:2207.14315",
)
_VISION = Source(
    "VISION",
    "https://huggingface.co/datasets/VISION-Workshop/VISION-Datasets",
    "CC BY-NC 4.0",
    "Bai et al., 2023, arXiv:2306.07890",
)
_TEXTURE_AD = Source(
    "Texture-AD, Wafer",
    "https://huggingface.co/datasets/texture-ad/Texture-AD-Benchmark",
    "Apache 2.0",
    "Lei et al., 2024, arXiv:2409.06367",
)


_MVTEC_AD_2 = Source(
    "MVTec AD 2",
    "https://www.mvtec.com/company/research/datasets/mvtec-ad-2",
    UNSTATED,
    "Heckler-Kram et al., 2025, arXiv:2503.21622",
)
_MVTEC_LOCO = Source(
    "MVTec LOCO AD",
    "https://www.mvtec.com/company/research/datasets/mvtec-loco",
    UNSTATED,
    "Bergmann et al., IJCV 130, 2022, doi:10.1007/s11263-022-01578-9",
)
_BTAD = Source(
    "BTAD",
    "https://avires.dimi.uniud.it/papers/btad/btad.zip",
    UNSTATED,
    "Mishra et al., ISIE 2021, arXiv:2104.10036",
)
_KOLEKTOR_SDD2 = Source(
    "KolektorSDD2",
    "https://www.vicos.si/resources/kolektorsdd2/",
    UNSTATED,
    "Bozic et al., Computers in Industry 129, 2021, arXiv:2104.06064",
)
_REAL_IAD = Source(
    "Real-IAD",
    "https://realiad4ad.github.io/Real-IAD/",
    UNSTATED,
    "Wang et al., CVPR 2024, arXiv:2403.12580",
)
_BMAD = Source(
    "BMAD",
    "https://github.com/DorisBao/BMAD",
    UNSTATED,
    "Bao et al., 2023, arXiv:2306.11876",
)


def _medianomaly(sets: str) -> Source:
    return Source(
        f"{sets}, packed by MedIAnomaly",
        "https://zenodo.org/records/12677223",
        UNSTATED,
        "Cai et al., 2024, arXiv:2404.04518",
    )


_BRAIN_TUMOR = Source(
    "Brain-Tumor",
    "https://www.kaggle.com/datasets/masoudnickparvar/brain-tumor-mri-dataset",
    "CC0",
    UNSTATED,
)
_HEAD_CT = Source(
    "HeadCT",
    "https://www.kaggle.com/datasets/felipekitamura/head-ct-hemorrhage",
    UNSTATED,
    UNSTATED,
)
_CHEST_2017 = Source(
    "ChestXRay2017",
    "https://data.mendeley.com/datasets/rscbjbr9sj/2",
    "CC BY 4.0",
    "Kermany et al., Cell 172(5), 2018, doi:10.1016/j.cell.2018.02.010",
)
_RSNA = Source(
    "RSNA",
    "https://www.kaggle.com/c/rsna-pneumonia-detection-challenge",
    UNSTATED,
    UNSTATED,
)
_VINDR = Source(
    "VinDr-CXR",
    "https://www.kaggle.com/c/vinbigdata-chest-xray-abnormalities-detection",
    UNSTATED,
    "Nguyen et al., Scientific Data 9:429, 2022, arXiv:2012.15029",
)
_CIFAR10 = Source(
    "CIFAR-10, python version",
    "https://www.cs.toronto.edu/~kriz/cifar.html",
    UNSTATED,
    "Krizhevsky, Learning multiple layers of features from tiny images, 2009",
)
_CIFAR100 = Source(
    "CIFAR-100, python version",
    "https://www.cs.toronto.edu/~kriz/cifar.html",
    UNSTATED,
    "Krizhevsky, Learning multiple layers of features from tiny images, 2009",
)
_TINY_IMAGENET = Source(
    "Tiny ImageNet",
    "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
    UNSTATED,
    "Le and Yang, Tiny ImageNet visual recognition challenge, 2015",
)
_STL10 = Source(
    "STL-10, binary files",
    "https://cs.stanford.edu/~acoates/stl10",
    UNSTATED,
    "Coates, Ng and Lee, AISTATS 2011",
)
_IMAGENETTE = Source(
    "ImageNette, any of its sizes",
    "https://github.com/fastai/imagenette",
    UNSTATED,
    "Howard, Imagenette, 2019",
)


def _medmnist(name: str) -> Source:
    return Source(
        f"{name} of MedMNIST",
        "https://medmnist.com",
        "CC BY 4.0",
        "Yang et al., Scientific Data 10:41, 2023, doi:10.1038/s41597-022-01721-8",
    )


_SVHN = Source(
    "SVHN, cropped digits",
    "http://ufldl.stanford.edu/housenumbers",
    UNSTATED,
    "Netzer et al., NIPS Workshop on Deep Learning and Unsupervised Feature Learning 2011",
)
_PLACES365 = Source(
    "Places365, validation images of 256 pixels",
    "http://places2.csail.mit.edu/download.html",
    UNSTATED,
    "Zhou et al., IEEE TPAMI 40(6), 2018, doi:10.1109/TPAMI.2017.2723009",
)
_EMBEDDED = Source(
    "textures",
    "made on first use, nothing to download",
    "CC0 (photographs of scikit-image)",
    "none",
)
_DRAWN = Source("motifs", "drawn by seed, nothing to download", "that of this package", "none")

_TEXTURES = {
    "carpet": Counts(280, 28, 89),
    "grid": Counts(264, 21, 57),
    "leather": Counts(245, 32, 92),
    "tile": Counts(230, 33, 84),
    "wood": Counts(247, 19, 60),
}
_OBJECTS = {
    "bottle": Counts(209, 20, 63),
    "cable": Counts(224, 58, 92),
    "capsule": Counts(219, 23, 109),
    "hazelnut": Counts(391, 40, 70),
    "metal_nut": Counts(220, 22, 93),
    "pill": Counts(267, 26, 141),
    "screw": Counts(320, 41, 119),
    "toothbrush": Counts(60, 12, 30),
    "transistor": Counts(213, 60, 40),
    "zipper": Counts(240, 32, 119),
}

# Of split_csv/1cls.csv, VisA's split for training on normal images.
_VISA_BOARDS = {
    "pcb1": Counts(904, 100, 100),
    "pcb2": Counts(901, 100, 100),
    "pcb3": Counts(905, 101, 100),
    "pcb4": Counts(904, 101, 100),
}
_VISA_OTHERS = {
    "candle": Counts(900, 100, 100),
    "capsules": Counts(542, 60, 100),
    "cashew": Counts(450, 50, 100),
    "chewinggum": Counts(453, 50, 100),
    "fryum": Counts(450, 50, 100),
    "macaroni1": Counts(900, 100, 100),
    "macaroni2": Counts(900, 100, 100),
    "pipe_fryum": Counts(450, 50, 100),
}

CARDS: dict[str, Card] = {
    "textures": Card("painted surfaces, five types", "detection, localisation", (_EMBEDDED,)),
    "mvtec": Card("fifteen products", "detection, localisation", (_MVTEC_AD,), _TEXTURES | _OBJECTS),
    "mvtec_textures": Card("textures of MVTec AD", "detection, localisation", (_MVTEC_AD,), _TEXTURES),
    "mpdd": Card(
        "metal parts",
        "detection, localisation",
        (_MPDD,),
        {
            "bracket_black": Counts(289, 32, 47),
            "bracket_brown": Counts(185, 26, 51),
            "bracket_white": Counts(110, 30, 30),
            "connector": Counts(128, 30, 14),
            "metal_plate": Counts(54, 26, 71),
            "tubes": Counts(122, 32, 69),
        },
    ),
    "mvtec_ad2": Card(
        "eight objects under changing light",
        "detection, localisation",
        (_MVTEC_AD_2,),
        layout="the trees and loaders that several users of the set published; they agree",
    ),
    "mvtec_loco": Card(
        "five objects, structural and logical defects",
        "detection",
        (_MVTEC_LOCO,),
        layout="the loaders that several users of the set published; they agree",
    ),
    "btad": Card(
        "three industrial products",
        "detection, localisation",
        (_BTAD,),
        layout="the loaders that several users of the set published; masks are BMP or PNG",
    ),
    "kolektor_sdd2": Card(
        "a production line's surface",
        "detection, localisation",
        (_KOLEKTOR_SDD2,),
        layout="the loaders that several users of the set published; they agree",
    ),
    "real_iad": Card(
        "thirty objects, five views of each",
        "detection, localisation",
        (_REAL_IAD,),
        layout="the trees and loaders that several users of the set published; of two places of the split files, the"
        " download's is the default",
    ),
    "bmad": Card(
        "brain, liver, retina, chest, tissue",
        "detection, localisation",
        (_BMAD,),
        layout="the README of the set's authors",
    ),
    "pcb": Card(
        "circuit boards",
        "detection, localisation",
        (_VISA, _VISION),
        _VISA_BOARDS,  # VISION comes without a split for anomaly detection
    ),
    "visa": Card("boards, food, candles", "detection, localisation", (_VISA,), _VISA_BOARDS | _VISA_OTHERS),
    "vision": Card("industrial parts", "detection, localisation", (_VISION,)),
    "wafer": Card("wafers of Texture-AD", "detection, localisation", (_TEXTURE_AD,)),
    "brain": Card("head MRI and CT", "detection", (_medianomaly("BrainTumor and BraTS2021"), _HEAD_CT)),
    "brain_kaggle": Card("head MRI and CT", "detection", (_BRAIN_TUMOR, _medianomaly("BraTS2021"), _HEAD_CT)),
    "xray": Card("chest X-rays", "detection", (_CHEST_2017, _medianomaly("RSNA and VinCXR"))),
    "xray_kaggle": Card("chest X-rays", "detection", (_CHEST_2017, _RSNA, _VINDR)),
    "medianomaly": Card(
        "one set of MedIAnomaly", "detection", (_medianomaly("RSNA, VinCXR, BrainTumor and LAG"),)
    ),
    "cifar10": Card("CIFAR-10", "classification", (_CIFAR10,)),
    "cifar100": Card("CIFAR-100, fine labels", "classification", (_CIFAR100,)),
    "tiny_imagenet": Card("Tiny ImageNet, 200 classes", "classification", (_TINY_IMAGENET,)),
    "stl10": Card("STL-10, labelled images at 32 pixels", "classification", (_STL10,)),
    "imagenette": Card("ten classes of ImageNet at 64 pixels", "classification", (_IMAGENETTE,)),
    "pathmnist": Card("colon pathology, nine tissues", "classification", (_medmnist("PathMNIST"),)),
    "octmnist": Card("retinal OCT, four classes", "classification", (_medmnist("OCTMNIST"),)),
    "organsmnist": Card(
        "abdominal CT, sagittal, eleven organs", "classification", (_medmnist("OrganSMNIST"),)
    ),
    "organcmnist": Card(
        "abdominal CT, coronal, eleven organs", "classification", (_medmnist("OrganCMNIST"),)
    ),
    "pneumoniamnist": Card("chest X-rays of children", "classification", (_medmnist("PneumoniaMNIST"),)),
    "motif_classes": Card("drawn motifs, ten classes", "classification", (_DRAWN,)),
    "motifs": Card("drawn motifs, ten normal families and three others", "semantic detection", (_DRAWN,)),
    "semantic_cifar10": Card("CIFAR-10 against CIFAR-100", "semantic detection", (_CIFAR10, _CIFAR100)),
    "semantic_cifar10_svhn": Card("CIFAR-10 against SVHN", "semantic detection", (_CIFAR10, _SVHN)),
    "semantic_cifar10_places365": Card(
        "CIFAR-10 against Places365", "semantic detection", (_CIFAR10, _PLACES365)
    ),
}
"""Name of a data configuration -> its card. Configurations for images of one's own have none."""
