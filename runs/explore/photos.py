"""The images of the page: the ones that come with scikit-learn, and what somebody uploads."""

import io
from dataclasses import dataclass

from PIL import Image, ImageOps

from deit_gka.data.sources import open_source
from deit_gka.figures.subjects import first_of_classes, photographs
from trainkit_gka.cli import UserError

FORMATS, SUFFIXES = ("JPEG", "PNG", "WEBP"), (".jpg", ".jpeg", ".png", ".webp")
MAX_BYTES, MAX_PIXELS = 8 * 2**20, 25 * 10**6
SIDE = 1024  # pixels; a session keeps its image no larger


@dataclass(frozen=True)
class Photo:
    """An RGB image that can be compared and hashed. size: (width, height)."""

    name: str
    size: tuple[int, int]
    rgb: bytes

    @classmethod
    def of(cls, name: str, image: Image.Image) -> "Photo":
        return cls(name, image.size, image.tobytes())

    @property
    def image(self) -> Image.Image:
        return Image.frombytes("RGB", self.size, self.rgb)


def bundled() -> dict[str, Photo]:
    """A handwritten digit of each class and two photographs, by name."""
    source = open_source("digits", "val")
    digits = first_of_classes(source, map(source.read, range(len(source))), len(source.classes))
    images = {name.replace("digits", "digit"): image for name, image in sorted(digits.items())} | photographs()
    return {name: Photo.of(name, image) for name, image in images.items()}


def read_upload(data: bytes, name: str) -> Photo:
    """An uploaded image under its name, turned as its camera says and made smaller if need be.

    What it is is decided by its content; nothing is decoded before its size is known.
    Raises UserError for files that have too many pixels or are not JPEG, PNG or WebP images.
    """
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            if image.width * image.height > MAX_PIXELS:
                most = f"at most {MAX_PIXELS // 10**6} million pixels"
                raise UserError(f"the image has {image.width:,} × {image.height:,} pixels; give one of {most}")
            image.draft("RGB", (SIDE, SIDE))
            image = ImageOps.exif_transpose(image)
            if image.mode.startswith("I"):  # greys of 16 bits, which convert would cut off at 255
                image = image.point(lambda grey: grey * (1 / 256)).convert("L")
            image = image.convert("RGB")
            image.thumbnail((SIDE, SIDE))
            return Photo.of(name, image)
    except Image.DecompressionBombError:
        raise UserError(f"the image is too large; give one of at most {MAX_PIXELS // 10**6} million pixels") from None
    except (OSError, SyntaxError, ValueError):  # what Pillow raises for files that are damaged or of another kind
        raise UserError("the file is not a JPEG, PNG or WebP image, or it is damaged; give another one") from None
